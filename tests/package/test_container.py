#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferryd in what a container is made of, without a container engine: mount and PID namespaces, a
root that nobody can write to, a user without rights, 64 KiB of locked memory, a seccomp profile,
and a memory cgroup apart from the engine's.

usage: test_container.py CC KVFERRYD KVFERRY CONTAINER_ENGINE [unittest arguments]
"""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

import filtered
from filtered import KVFERRYD, PROFILE, SMALL, STORE, URING, under

ENGINE = sys.argv[4]
MIB = 1 << 20
USER = GROUP = 10001
ENGINE_USER = 20001
PUT_GIB = 10
GROWN_MOST = 16 * MIB

# As root, in namespaces of its own: all mounts but $1 become read-only, then the rest of the words
# run as a user without any right. Ends with 3 if something could be written all the same.
ENTER = r"""
mount --bind "$1" "$1"
while read -r _ at kind options _; do
    case $kind in proc|sysfs|devpts|cgroup*|devtmpfs|mqueue) continue ;; esac
    case $at in "$1") continue ;; esac
    case ,$options, in *,ro,*) continue ;; esac
    mount -o remount,bind,ro "$at" 2>/dev/null || true
done < /proc/self/mounts
for at in / /tmp /var/tmp; do
    if (: > "$at/kvf-probe") 2>/dev/null; then
        rm -f "$at/kvf-probe"
        exit 3
    fi
done
touch "$1/probe" && rm "$1/probe"
shift
exec "$@"
"""
NAMESPACES = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--propagation",
              "private"]
WITHOUT_RIGHTS = [
    "prlimit", "--memlock=65536:65536", "--core=0:0", "setpriv", f"--reuid={USER}",
    f"--regid={GROUP}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
    "--no-new-privs",
]


def contained(folder, *command):
    return [*NAMESPACES, "sh", "-ec", ENTER, "sh", folder, *WITHOUT_RIGHTS, *command]


def children(parent):
    """Processes that this one has started."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == parent:
                    yield int(name)


def skip_without_namespaces():
    for program in ("unshare", "setpriv", "prlimit"):
        if shutil.which(program) is None:
            print(f"skipped: no {program} (util-linux)")
            sys.exit(filtered.SKIP)
    if os.geteuid() != 0 or subprocess.run([*NAMESPACES, "true"], check=False,
                                           capture_output=True).returncode != 0:
        print("skipped: namespaces cannot be made here; root can, where it may mount")
        sys.exit(filtered.SKIP)


def memory_cgroup():
    """(folder of our memory cgroup, name of its usage file), None where there is none."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        text = file.read()
    for pattern, root, name in ((r"^\d+:(?:\w+,)*memory(?:,\w+)*:(.*)$", "/sys/fs/cgroup/memory",
                                 "memory.usage_in_bytes"),
                                (r"^0::(.*)$", "/sys/fs/cgroup", "memory.current")):
        found = re.search(pattern, text, re.MULTILINE)
        if found and os.path.isdir(root + found.group(1)):
            return root + found.group(1).rstrip("/"), name
    return None, None


class Container(filtered.Case):
    def setUp(self):
        super().setUp()
        os.chmod(self.folder, 0o755)
        self.data = os.path.join(self.folder, "data")
        os.mkdir(self.data)
        shutil.chown(self.data, USER, GROUP)
        os.chmod(self.data, 0o2750)
        self.socket = os.path.join(self.data, "kvferryd.sock")
        # where every user can read them
        self.programs = {}
        for path in (KVFERRYD, filtered.KVFERRY, ENGINE, filtered.RUN, PROFILE):
            self.programs[path] = shutil.copy(path, self.folder)
            os.chmod(self.programs[path], 0o755)
        filtered.RUN, self.run_before = self.programs[filtered.RUN], filtered.RUN
        self.addCleanup(setattr, filtered, "RUN", self.run_before)

    def command(self, *more, refuse=""):
        sets = [word for value in [*SMALL, *STORE, *more] for word in ("--set", value)]
        return contained(self.data, *under(
            self.programs[PROFILE], self.programs[KVFERRYD], "--dir", self.data, *sets,
            refuse=refuse))

    def kvferry(self, *arguments, data=b""):
        """As an engine would: another user, in the socket's group, in none of its namespaces."""
        done = subprocess.run(
            [self.programs[filtered.KVFERRY], *arguments, "--socket", self.socket], input=data,
            capture_output=True, check=False, timeout=filtered.DEADLINE_S, user=ENGINE_USER,
            group=ENGINE_USER, extra_groups=[GROUP], cwd="/")
        self.assertEqual(done.returncode, 0, done.stderr.decode() + self.log_text())
        return done.stdout

    def check_hits(self, process, command, env=None):
        block = os.urandom(300000)
        self.kvferry("put", "--key-text", "k", "--durable", data=block)
        self.assertEqual(self.kvferry("get", "--key-text", "k"), block)
        self.end(process)
        self.start(command, env)
        self.assertEqual(self.kvferry("get", "--key-text", "k"), block)

    @staticmethod
    def end(process):
        """The daemon is unshare's child, which waits for it."""
        if process.poll() is None:
            for child in children(process.pid):
                os.kill(child, signal.SIGKILL)
            process.wait(timeout=filtered.DEADLINE_S)

    def test_default_profile(self):
        command = self.command(refuse=URING)
        process = self.start(command)
        self.assertRegex(self.store_line(), r"^threads \(io_uring-fixed: Operation not permitted")
        self.check_hits(process, command)

    def test_our_profile(self):
        """Buffers to register do not fit into 64 KiB; I/O goes on without, and the log says so."""
        command = self.command()
        process = self.start(command)
        self.assertRegex(self.store_line(),
                         r"^io_uring|^threads \(.*kernel.io_uring_disabled")
        self.check_hits(process, command)
        if "io_uring-fixed (the best form)" in self.log_text():
            self.assertIn("raise the limit of locked memory", self.log_text())

    def test_memory_is_charged_to_the_daemon(self):
        folder, name = memory_cgroup()
        with contextlib.ExitStack() as stack:
            groups = {}
            for who in ("daemon", "engine"):
                groups[who] = f"{folder}/kvf-{os.getpid()}-{who}"
                try:
                    os.mkdir(groups[who])
                except (OSError, TypeError) as error:
                    self.skipTest(f"skipped: no memory cgroup can be made here: {error}")
                stack.callback(self.remove_group, groups[who])
            if not os.path.exists(os.path.join(groups["engine"], name)):
                self.skipTest(f"skipped: {groups['engine']} has no {name}")
            process = self.start(self.inside(groups["daemon"], self.command()))
            stack.callback(self.end, process)
            usage = os.path.join(groups["engine"], name)
            done = subprocess.run(
                self.inside(groups["engine"], [ENGINE, self.socket, usage, str(PUT_GIB)]),
                capture_output=True, text=True, check=False, timeout=filtered.DEADLINE_S)
            self.assertEqual(done.returncode, 0, done.stderr + self.log_text())
            start, grown = map(int, re.fullmatch(r"start (\d+) grown (-?\d+)\n",
                                                 done.stdout).groups())
            self.assertGreaterEqual(start, MIB)  # its buffer: it is counted at all
            self.assertLess(grown, GROWN_MOST)
            with open(os.path.join(groups["daemon"], name), encoding="utf-8") as file:
                self.assertGreaterEqual(int(file.read()), 96 * MIB)  # the arena

    @staticmethod
    def inside(group, command):
        return ["sh", "-ec", 'echo $$ > "$0/cgroup.procs"; exec "$@"', group, *command]

    @staticmethod
    def remove_group(path):
        end = time.monotonic() + filtered.DEADLINE_S
        while True:  # until the last of its processes is gone
            try:
                os.rmdir(path)
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)


if __name__ == "__main__":
    filtered.skip_without_filters()
    skip_without_namespaces()
    unittest.main(argv=[sys.argv[0], *sys.argv[5:]])
