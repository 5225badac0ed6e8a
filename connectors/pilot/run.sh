#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvferry beside no offload, vLLM's own and LMCache, on your GPU node: run.sh --help
#
# Needs vllm and the kvferry wheel in the environment of $PYTHON (else python3), and kvferryd on
# PATH or in --build. Nothing outside --out is written.
set -euo pipefail
folder=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "run.sh: no $python: name a Python 3.10 or newer in PYTHON" >&2
    exit 2
fi
exec "$python" -B "$folder/pilot.py" "$@"
