#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: rootfs.sh BUILD_DIR ROOT
#
# Make the image's file system in the folder ROOT, without a container engine: Debian 12 by
# debootstrap, the packages of packages.txt, and what BUILD_DIR (built on Debian 12) installs. Needs
# root. `tar -C ROOT -c . | docker import --change 'USER 10001:10001' - NAME` makes an image of it.
set -euo pipefail

build=${1:?usage: rootfs.sh BUILD_DIR ROOT}
root=${2:?usage: rootfs.sh BUILD_DIR ROOT}
here=$(cd "$(dirname "$0")" && pwd)

if [ -e "$root" ]; then
    echo "rootfs.sh: $root is there already: remove it, or name another" >&2
    exit 2
fi
command -v debootstrap >/dev/null || {
    echo "rootfs.sh: no debootstrap: apt-get install debootstrap" >&2
    exit 2
}
debootstrap --variant=minbase --include="$(paste -sd, "$here/packages.txt")" bookworm "$root" \
    >"$root.log" 2>&1 || {
    tail -n 5 "$root.log" >&2
    echo "rootfs.sh: debootstrap failed, see $root.log" >&2
    exit 1
}
rm -f "$root.log"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
DESTDIR=$(cd "$root" && pwd) cmake --install "$build" --prefix /usr --strip >/dev/null
rm -rf "$root"/usr/include "$root"/usr/lib/*/cmake "$root"/usr/lib/*/pkgconfig \
    "$root"/usr/lib/*/*.a
