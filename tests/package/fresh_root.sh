#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: fresh_root.sh ROOT [RESULT]
#
# As a new user: Debian 12 made anew in the folder ROOT (debootstrap, chroot; needs root), git, make
# and a C compiler, a checkout of HEAD, and then every command of README.md as it is written there,
# by package, by rendering the chart and by make demo, each until a block that was stored has been
# fetched. Takes minutes, so no test runs it. RESULT (tests/package/results/fresh_root.json) gets
# commands, seconds and what they said at the end; a command that fails ends it.
#
# Differences, of which none is kvferry's: no sudo (it is root), and where nothing is process 1
# that could start services, the unit's own ExecStart is run as its user. Systemd is tried at the
# end.
set -euo pipefail

root=${1:?usage: fresh_root.sh ROOT [RESULT]}
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
result=${2:-$here/results/fresh_root.json}
steps=$(mktemp)
trap 'rm -f "$steps"' EXIT

if [ -e "$root" ]; then
    echo "fresh_root.sh: $root is there already: remove it, or name another" >&2
    exit 2
fi
command -v debootstrap >/dev/null || {
    echo "fresh_root.sh: no debootstrap: apt-get install debootstrap" >&2
    exit 2
}

# inside COMMAND: in the new root, in the checkout.
inside() {
    DEBIAN_FRONTEND=noninteractive chroot "$root" /bin/bash -euc \
        "cd /srv/kvferry 2>/dev/null || cd /; export HOME=/srv; $1"
}

# step SECTION COMMAND [AS_RUN]: note how long it took and its last line.
step() {
    local section=$1 command=$2 as_run=${3:-$2} begin code=0
    echo "--- $section: $command"
    begin=$(date +%s)
    inside "$as_run" >"$root.log" 2>&1 || code=$?
    python3 - "$section" "$command" "$(($(date +%s) - begin))" "$code" "$root.log" >>"$steps" <<'PY'
import json
import sys
section, command, seconds, code, log = sys.argv[1:]
with open(log, encoding="utf-8", errors="replace") as file:
    lines = [line.strip() for line in file if line.strip()]
print(json.dumps({"by": section, "command": command, "seconds": int(seconds), "exit": int(code),
                  "last_line": lines[-1][:160] if lines else ""}))
PY
    tail -n 3 "$root.log"
    if [ "$code" -ne 0 ]; then
        tail -n 40 "$root.log" >&2
        echo "fresh_root.sh: failed: $command" >&2
        exit 1
    fi
}

# written COMMAND: a command of README.md; one that is not there word for word is an error of ours.
written() {
    grep -qxF -- "$1" "$tree/README.md" || grep -qF -- "$1 " "$tree/README.md" || {
        echo "fresh_root.sh: README.md does not say: $1" >&2
        exit 2
    }
}

try() {
    written "$2"
    step "$1" "$2" "${3:-${2//sudo /}}"
}

debootstrap --variant=minbase --include=git,make,gcc,libc6-dev,ca-certificates bookworm "$root" \
    >"$root.log" 2>&1
# the way to the network is the machine's, not the user's
cp -r /etc/apt/apt.conf.d "$root/etc/apt/" 2>/dev/null || true
cp -rL /etc/ssl/certs "$root/etc/ssl/" 2>/dev/null || true
cp -L /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
mount --bind /proc "$root/proc"
mount --bind /sys "$root/sys"
mount --bind /dev "$root/dev"
trap 'umount "$root/proc" "$root/sys" "$root/dev" 2>/dev/null || true; rm -f "$steps"' EXIT
git -C "$tree" archive --prefix=kvferry/ HEAD | tar -x -C "$root/srv"

by=package
deb='make deb && sudo apt-get install ./build/deb/kvferry_*.deb'
try $by "$deb" "${deb/sudo apt-get install/apt-get install -y}"
if [ -d "$root/run/systemd/system" ]; then
    try $by 'sudo systemctl enable --now kvferryd'
else
    written 'sudo systemctl enable --now kvferryd'
    # what the unit does: folders, user, command
    step $by 'sudo systemctl enable --now kvferryd' '
        install -d -o kvferry -g kvferry /run/kvferry /var/lib/kvferry
        command=$(sed -n "s/^ExecStart=//p" /usr/lib/systemd/system/kvferryd.service)
        setpriv --reuid=kvferry --regid=kvferry --clear-groups $command > /srv/daemon.log 2>&1 &
        until kvferry ping --count 1; do kill -0 $!; sleep 0.2; done'
fi
try $by 'sudo kvferry put README.md --key-text first'
try $by 'sudo kvferry get --key-text first | cmp - README.md && echo a hit'
inside 'kvferry drain' >/dev/null || true

by=chart
step $by 'apt-get install python3-pip' \
    'apt-get install -y --no-install-recommends python3-pip procps'
try $by 'tests/charts/get_tools.sh build/tools'
for begin in 'build/tools/helm-4 template' 'python3 tests/charts/test_chart_node.py'; do
    try $by "$(grep -m 1 "^$begin" "$tree/README.md")"
done

try demo 'make demo'

# Everything was as written. With systemd as process 1, where a container of it can be started: the
# package's service, enabled, started, used and stopped.
nspawn='skipped: no systemd-nspawn'
if command -v systemd-nspawn >/dev/null; then
    inside 'apt-get install -y --no-install-recommends systemd-sysv' >"$root.log" 2>&1
    cat >"$root/srv/check.sh" <<'CHECK'
#!/bin/bash
cd /srv/kvferry
{
    systemctl enable --now kvferryd && kvferry put README.md --key-text first &&
        kvferry get --key-text first | cmp - README.md && systemctl restart kvferryd &&
        kvferry ping --count 1 && systemctl show -p StatusText -p Type kvferryd &&
        systemctl stop kvferryd && echo "hit, restart and stop under systemd"
} >/srv/check.log 2>&1
systemctl poweroff --force
CHECK
    chmod +x "$root/srv/check.sh"
    units=$root/etc/systemd/system
    printf '[Service]\nType=oneshot\nExecStart=/srv/check.sh\n' >"$units/check.service"
    mkdir -p "$units/multi-user.target.wants"
    ln -sf ../check.service "$units/multi-user.target.wants/check.service"
    umount "$root/proc" "$root/sys" "$root/dev"
    timeout 300 systemd-nspawn --quiet --register=no --keep-unit -D "$root" --boot \
        >"$root.log" 2>&1 || true
    nspawn=$(tail -n 1 "$root/srv/check.log" 2>/dev/null || tail -n 1 "$root.log")
fi
python3 - "$steps" "$nspawn" "$(git -C "$tree" rev-parse --short HEAD)" "$(date +%F)" \
    >"$result" <<'PY'
import json
import sys
with open(sys.argv[1], encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
print(json.dumps({"root": "Debian 12, debootstrap --variant=minbase, chroot", "commit": sys.argv[3],
                  "date": sys.argv[4], "systemd_as_process_1": sys.argv[2], "steps": rows},
                 indent=2))
PY
echo "all as written; result in $result"
