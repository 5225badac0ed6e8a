#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The other stores of `tests/bench/run engines`, each in a virtual environment.
#
#   engines_venvs.sh FOLDER [mooncake] [lmcache]
#
# FOLDER is outside the repository and takes 7 GB, nearly all of it torch, which lmcache needs; give
# `mooncake` alone for 200 MB. Valkey or Redis is the system's: apt-get install redis-server.
# Python: $PYTHON, else python3, 3.10 to 3.13.
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '3,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
folder=$1
shift
mkdir -p "$folder"
for name in "${@:-mooncake lmcache}"; do
    for one in $name; do
        case $one in
        mooncake) packages="numpy mooncake-transfer-engine-non-cuda==0.3.13.post1" ;;
        lmcache) packages="lmcache==0.5.6" ;;
        *)
            echo "$one: neither mooncake nor lmcache" >&2
            exit 2
            ;;
        esac
        "${PYTHON:-python3}" -m venv "$folder/$one"
        # shellcheck disable=SC2086
        "$folder/$one/bin/pip" install --quiet $packages
        echo "$folder/$one: $packages"
    done
done
