#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# usage: fresh_root.sh ROOT [RESULT [PART...]]
#
# As a new user: Debian 12 made anew in the folder ROOT (debootstrap, chroot; needs root), git, make
# and a C compiler, a checkout of HEAD, and then every command of README.md as it is written there,
# by package, by rendering the chart and by make demo, each until a block that was stored has been
# fetched. Takes minutes, so no test runs it. RESULT (tests/package/results/fresh_root.json) gets
# commands, seconds and what they said at the end; a command that fails ends it.
#
# Parts are package, chart (which uses what the package has installed), demo and systemd; all of
# them without a name. A ROOT of this script is gone on with as it is, and what RESULT has of other
# parts stays.
#
# Differences, of which none is kvferry's: no sudo (it is root), and where nothing is process 1
# that could start services, the unit's own ExecStart is run as its user. Systemd is tried at the
# end.
set -euo pipefail

root=${1:?usage: fresh_root.sh ROOT [RESULT [PART...]]}
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
result=${2:-$here/results/fresh_root.json}
parts=${*:3}
parts=${parts:-package chart demo systemd}
steps=$(mktemp)
trap 'rm -f "$steps"' EXIT

if [ -e "$root" ] && [ ! -f "$root/srv/commit" ]; then
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

if [ ! -e "$root" ]; then
    debootstrap --variant=minbase --include=git,make,gcc,libc6-dev,ca-certificates bookworm \
        "$root" >"$root.log" 2>&1
    # the way to the network is the machine's, not the user's
    cp -r /etc/apt/apt.conf.d "$root/etc/apt/" 2>/dev/null || true
    cp -rL /etc/ssl/certs "$root/etc/ssl/" 2>/dev/null || true
    cp -L /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
    git -C "$tree" archive --prefix=kvferry/ HEAD | tar -x -C "$root/srv"
    git -C "$tree" rev-parse --short HEAD >"$root/srv/commit"
fi
mount --bind /proc "$root/proc"
mount --bind /sys "$root/sys"
mount --bind /dev "$root/dev"
trap 'umount "$root/proc" "$root/sys" "$root/dev" 2>/dev/null || true; rm -f "$steps"' EXIT

# Its service: by systemd where that is process 1, else folders, user and command of the unit.
by_package() {
    local deb='make deb && sudo apt-get install ./build/deb/kvferry_*.deb'

    try package "$deb" "${deb/sudo apt-get install/apt-get install -y}"
    try package 'sudo systemctl enable --now kvferryd' '
        install -d -o kvferry -g kvferry /run/kvferry /var/lib/kvferry
        command=$(sed -n "s/^ExecStart=//p" /usr/lib/systemd/system/kvferryd.service)
        setpriv --reuid=kvferry --regid=kvferry --clear-groups $command > /srv/daemon.log 2>&1 &
        until kvferry ping --count 1; do kill -0 $!; sleep 0.2; done'
    try package 'sudo kvferry put README.md --key-text first'
    try package 'sudo kvferry get --key-text first | cmp - README.md && echo a hit'
    inside 'kvferry drain' >/dev/null
}

by_chart() {
    step chart 'apt-get install python3-pip' \
        'apt-get install -y --no-install-recommends python3-pip procps'
    try chart 'tests/charts/get_tools.sh build/tools'
    for begin in 'build/tools/helm-4 template' 'python3 tests/charts/test_chart_node.py'; do
        try chart "$(grep -m 1 "^$begin" "$tree/README.md")"
    done
}

by_demo() {
    try demo 'make demo'
}

# The package's service, enabled, started, used, restarted and stopped by systemd as process 1, and
# once more by its socket unit.
by_systemd() {
    local units=$root/etc/systemd/system

    if ! command -v systemd-nspawn >/dev/null; then
        step systemd 'systemd-nspawn --boot' 'echo "skipped: no systemd-nspawn on this machine"'
        return
    fi
    step systemd 'apt-get install systemd-sysv' \
        'apt-get install -y --no-install-recommends systemd-sysv'
    cat >"$root/srv/check.sh" <<'CHECK'
#!/bin/bash
cd /srv/kvferry
{
    systemctl enable --now kvferryd && kvferry put README.md --key-text first &&
        kvferry get --key-text first | cmp - README.md && systemctl restart kvferryd &&
        kvferry ping --count 1 && systemctl show -p StatusText -p Type kvferryd &&
        systemctl stop kvferryd && echo "hit, restart and stop under systemd"
    # by the socket unit: who comes first starts the daemon, who comes during a restart waits
    systemctl enable --now kvferryd.socket && ! systemctl is-active --quiet kvferryd &&
        kvferry put README.md --key-text second && systemctl is-active kvferryd &&
        kvferry get --key-text second | cmp - README.md &&
        stat -c '%A %U %G %n' /run/kvferry/kvferryd.sock && systemctl kill -s STOP kvferryd &&
        { kvferry ping --count 1 & } && waits=$! && systemctl kill -s KILL kvferryd &&
        wait $waits && systemctl stop kvferryd.socket kvferryd &&
        [ ! -e /run/kvferry/kvferryd.sock ] && echo "the same by its socket"
} >/srv/check.log 2>&1
systemctl poweroff --force
CHECK
    chmod +x "$root/srv/check.sh"
    printf '[Service]\nType=oneshot\nExecStart=/srv/check.sh\n' >"$units/check.service"
    mkdir -p "$units/multi-user.target.wants"
    ln -sf ../check.service "$units/multi-user.target.wants/check.service"
    umount "$root/proc" "$root/sys" "$root/dev"
    timeout 300 systemd-nspawn --quiet --register=no --keep-unit -D "$root" --boot \
        >"$root.log" 2>&1 || true
    step systemd 'systemd-nspawn --boot' \
        'cat /srv/check.log; for said in "hit, restart" "the same by"; do
             grep -q "$said" /srv/check.log || exit 1
         done'
}

for part in $parts; do
    "by_$part"
done
touch "$result"
python3 - "$steps" "$result" "$(cat "$root/srv/commit")" "$(date +%F)" >"$steps.json" <<'PY'
import json
import sys
steps, result, commit, date = sys.argv[1:]
with open(steps, encoding="utf-8") as file:
    rows = [{**json.loads(line), "commit": commit, "date": date} for line in file]
with open(result, encoding="utf-8") as file:
    text = file.read()
anew = {row["by"] for row in rows}
before = [row for row in (json.loads(text)["steps"] if text else []) if row["by"] not in anew]
print(json.dumps({"root": "Debian 12, debootstrap --variant=minbase, chroot",
                  "steps": before + rows}, indent=2))
PY
mv "$steps.json" "$result"
echo "all as written; result in $result"
