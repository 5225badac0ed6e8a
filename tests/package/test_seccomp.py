#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferryd under the chart's seccomp profile, and under what container runtimes do by default: the
same profile without io_uring.

usage: test_seccomp.py CC KVFERRYD KVFERRY [unittest arguments]
"""
import errno
import json
import subprocess
import sys
import unittest

import filtered
from filtered import KVFERRYD, PROFILE, SMALL, STORE, URING, under


def settings(words):
    return [word for value in words for word in ("--set", value)]


class Seccomp(filtered.Case):
    def command(self, *more):
        return [KVFERRYD, "--dir", self.folder, *settings([*SMALL, *STORE, *more])]

    def test_io_uring_refused(self):
        """Runtimes refuse with EPERM, or with ENOSYS where the kernel is to look older."""
        for error in (errno.EPERM, errno.ENOSYS):
            with self.subTest(error=errno.errorcode[error]):
                command = under(PROFILE, *self.command(), refuse=URING, errno=int(error))
                process = self.start(command)
                self.assertRegex(self.store_line(), r"^threads \(io_uring-fixed: .*"
                                 r"blocked by a seccomp profile or kernel.io_uring_disabled")
                self.check_hits(process, command)

    def test_profile_is_no_hindrance(self):
        """The daemon does under it what it does without: io_uring, where the machine has it."""
        process = self.start(self.command())
        without = self.store_line()
        process.terminate()
        process.wait(timeout=filtered.DEADLINE_S)
        command = under(PROFILE, *self.command())
        process = self.start(command)
        self.assertEqual(self.store_line(), without)
        self.check_hits(process, command)

    def test_an_engine_that_must_be(self):
        """Who asks for io_uring by name is told why there is none."""
        command = under(PROFILE, *self.command("nvme.0.engine=uring"), refuse=URING)
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              timeout=filtered.DEADLINE_S)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("blocked by a seccomp profile or kernel.io_uring_disabled", done.stderr)

    def test_profile_refuses_what_a_daemon_never_does(self):
        with open(PROFILE, encoding="utf-8") as file:
            profile = json.load(file)
        allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"
                   for name in rule["names"]}
        self.assertLessEqual(set(URING.split(",")), allowed)
        self.assertEqual(profile["defaultAction"], "SCMP_ACT_ERRNO")
        for name in ("mount", "bpf", "init_module", "kexec_load", "reboot", "setns", "unshare",
                     "keyctl", "perf_event_open", "pivot_root", "open_by_handle_at", "swapon"):
            self.assertNotIn(name, allowed)
        done = subprocess.run(under(PROFILE, "unshare", "--user", "true"), capture_output=True,
                              text=True, check=False, timeout=filtered.DEADLINE_S)
        self.assertIn("Operation not permitted", done.stderr)


if __name__ == "__main__":
    filtered.skip_without_filters()
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
