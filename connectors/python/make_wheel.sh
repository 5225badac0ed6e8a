#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The Python package as a wheel, with libkvferry, libkvferry_gpu and ISA-L inside.
#
#   make_wheel.sh BUILD_FOLDER OUT_FOLDER
#
# It fits every Python 3 on a system with the C library of this one or a newer one.
set -euo pipefail
build=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
python=${PYTHON:-/usr/bin/python3}

if ! "$python" -c 'import setuptools, wheel, pip' 2>/dev/null; then
    echo "$python has no pip, setuptools or wheel: apt-get install python3-pip python3-setuptools" \
         "python3-wheel, or name another one in PYTHON" >&2
    exit 2
fi
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
# As installed: without the paths of the build folder in them.
DESTDIR="$stage/root" cmake --install "$build/client" >/dev/null
cp -r "$build/connectors/python" "$stage/package"
package=$stage/package/kvferry
for name in libkvferry.so.0 libkvferry_gpu.so.0; do
    cp -L --remove-destination "$(find "$stage/root" -name "$name" | head -n 1)" "$package/$name"
done
isal=$(ldd "$package/libkvferry.so.0" | awk '$1 == "libisal.so.2" { print $3 }')
cp -L "$isal" "$package/libisal.so.2"
cp /usr/share/doc/libisal2/copyright "$package/libisal.copyright"
strip "$package"/*.so.*
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$out" "$stage/package"
ls "$out"/kvferry-*.whl
