#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry doctor: what is wrong is named, one thing, with its cure.

usage: test_doctor.py KVFERRYD KVFERRY [unittest arguments]
"""
import json
import os
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
import logged  # noqa: E402

KVFERRYD, KVFERRY = sys.argv[1:3]
DEADLINE_S = 120


class Doctor(logged.DaemonCase):
    FOLDER = "kvferry-doctor-"
    SMALL = ["dram.bytes=32MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=32MiB",
             "staging.total=64MiB", "staging.client=8MiB", "clients.max=4", "nvme.0.bytes=64MiB",
             "nvme.0.segment_bytes=4MiB", "nvme.0.engine=threads"]

    def start(self, *sets):
        return self.start_daemon(KVFERRYD, *sets)

    def kvferry(self, *arguments, data=""):
        return subprocess.run([KVFERRY, *arguments, "--socket", self.socket], input=data,
                              capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    def wrong(self):
        """Name and text of what is wrong: it is the last row, and the only one."""
        done = self.kvferry("doctor", "-o", "json")
        report = json.loads(done.stdout)
        states = [row["state"] for row in report["checks"]]
        self.assertEqual((done.returncode, report["ok"]), (1, False), report)
        self.assertEqual((states[-1], states.count("WRONG")), ("WRONG", 1))
        return report["checks"][-1]["name"], report["checks"][-1]["text"]

    def test_nothing_is_wrong(self):
        self.start()
        done = self.kvferry("doctor")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertNotIn("WRONG", done.stdout)
        self.assertEqual([line.split()[0] for line in done.stdout.splitlines()],
                         ["socket", "attach", "admin", "version", "service", "memory", "drive",
                          "speed", "gpu", "counters"])

    def test_no_socket(self):
        name, text = self.wrong()
        self.assertEqual(name, "socket")
        self.assertIn("start kvferryd", text)
        with open(self.socket, "w", encoding="utf-8"):
            pass
        self.assertIn("is no socket", self.wrong()[1])

    def test_a_socket_that_nobody_serves(self):
        self.end(self.start())
        name, text = self.wrong()
        self.assertEqual(name, "attach")
        self.assertIn("has ended", text)

    def test_no_admin_socket(self):
        self.start()
        os.rename(self.socket + ".admin", self.socket + ".gone")
        name, text = self.wrong()
        self.assertEqual(name, "admin")
        self.assertIn("--admin-socket", text)

    def test_disabled(self):
        self.start()
        self.assertEqual(self.kvferry("disable").returncode, 0)
        self.assertEqual(self.wrong(), ("service", "an operator has disabled it; kvferry enable"))
        self.assertEqual(self.kvferry("enable").returncode, 0)
        self.assertEqual(self.kvferry("disable", "--namespace", 16 * "1").returncode, 0)
        name, text = self.wrong()
        self.assertEqual(name, "service")
        self.assertIn("has disabled 1 namespace(s): kvferry ls shows which", text)
        self.assertEqual(self.kvferry("enable").returncode, 0)
        self.assertEqual(self.kvferry("doctor").returncode, 0)

    def test_conflict(self):
        self.start()
        self.assertEqual(self.kvferry("put", "--key-text", "a", data="one").returncode, 0)
        self.assertEqual(self.kvferry("put", "--key-text", "a", data="two").returncode, 1)
        name, text = self.wrong()
        self.assertEqual(name, "counters")
        self.assertIn("share a namespace", text)

    def test_observe(self):
        self.start("mode=observe")
        done = self.kvferry("doctor")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("mode observe: nothing is stored", done.stdout)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
