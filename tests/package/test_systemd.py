#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The systemd units: installed where they say, right in systemd's eyes, and no hindrance: the
daemon serves hits under its system call filter, and tells the service manager when it is ready.

usage: test_systemd.py CC KVFERRYD KVFERRY CMAKE BUILD_DIR [unittest arguments]
"""
import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import unittest

import filtered
from filtered import KVFERRYD, SMALL, STORE, under

CMAKE, BUILD = sys.argv[4:6]
ANALYZE = shutil.which("systemd-analyze")
SYSUSERS = shutil.which("systemd-sysusers")
EXPOSURE_MOST = 2.5  # of 10; a service without any hardening has 9.6


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False,
                          timeout=filtered.DEADLINE_S)


def has_filters():
    return ANALYZE and run(ANALYZE, "syscall-filter", "@system-service").returncode == 0


class Unit(filtered.Case):
    def setUp(self):
        super().setUp()
        self.prefix = os.path.join(self.folder, "prefix")
        done = run(CMAKE, "--install", BUILD, "--prefix", self.prefix, "--component", "service")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.unit = os.path.join(self.prefix, "lib", "systemd", "system", "kvferryd.service")
        os.mkdir(os.path.join(self.prefix, "sbin"))
        os.symlink(KVFERRYD, os.path.join(self.prefix, "sbin", "kvferryd"))
        self.socket_unit = os.path.join(os.path.dirname(self.unit), "kvferryd.socket")
        self.service = self.read(self.unit)["Service"]

    @staticmethod
    def read(unit):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.optionxform = str
        parser.read(unit)
        return parser

    def test_paths_follow_the_prefix(self):
        self.assertEqual(self.service["ExecStart"], f"{self.prefix}/sbin/kvferryd --config "
                         f"{self.prefix}/etc/kvferry/kvferryd.yaml")

    @unittest.skipUnless(ANALYZE, "skipped: no systemd-analyze")
    def test_verify(self):
        # its manual pages are not installed here
        done = run(ANALYZE, "verify", "--man=no", self.unit, self.socket_unit)
        ours = [line for line in (done.stdout + done.stderr).splitlines() if "kvferry" in line]
        self.assertEqual((done.returncode, ours), (0, []), done.stderr)

    @unittest.skipUnless(ANALYZE, "skipped: no systemd-analyze")
    def test_security(self):
        done = run(ANALYZE, "security", "--offline=yes", "--no-pager", self.unit)
        found = re.search(r"exposure level for kvferryd.service: ([\d.]+)", done.stdout)
        self.assertIsNotNone(found, done.stdout + done.stderr)
        self.assertLessEqual(float(found.group(1)), EXPOSURE_MOST, done.stdout)

    def test_socket_unit(self):
        """It makes the default socket as the daemon would, in a folder that outlives the service,
        and runs nothing."""
        options = run(KVFERRYD, "--print-options").stdout
        unit = self.read(self.socket_unit)["Socket"]
        for option, key in (("path", "ListenSequentialPacket"), ("mode", "SocketMode")):
            default = re.search(rf"^sockets\[\]\.{option}\t\w+\t(\S+)\t", options, re.MULTILINE)
            self.assertEqual(unit[key], default.group(1))
        self.assertEqual((unit["SocketUser"], unit["SocketGroup"]),
                         (self.service["User"], self.service["Group"]))
        self.assertEqual([key for key in unit if key.startswith("Exec") or key == "Accept"], [])
        self.assertEqual(self.service["RuntimeDirectoryPreserve"], "yes")
        with open(os.path.join(self.prefix, "lib", "tmpfiles.d", "kvferry.conf"),
                  encoding="utf-8") as file:
            self.assertIn("d %s %s kvferry kvferry -" % (
                os.path.dirname(unit["ListenSequentialPacket"]),
                self.service["RuntimeDirectoryMode"]), file.read())

    def test_default_file_is_right(self):
        """What `install` puts where ExecStart looks, with a socket that a user here can make."""
        path = os.path.join(filtered.ROOT, "agent", "kvferryd.yaml")
        done = run(KVFERRYD, "--config", path, "--set", f"sockets.0.path={self.socket}", "--check")
        self.assertEqual(done.returncode, 0, done.stderr)

    @unittest.skipUnless(SYSUSERS, "skipped: no systemd-sysusers")
    def test_user(self):
        os.mkdir(os.path.join(self.folder, "etc"))
        done = run(SYSUSERS, f"--root={self.folder}",
                   os.path.join(self.prefix, "lib", "sysusers.d", "kvferry.conf"))
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("passwd", "group"):
            with open(os.path.join(self.folder, "etc", name), encoding="utf-8") as file:
                self.assertRegex(file.read(), r"(?m)^kvferry:")
        self.assertEqual((self.service["User"], self.service["Group"]), ("kvferry", "kvferry"))

    def test_time_to_stop(self):
        """The drain ends before systemd loses patience."""
        options = run(KVFERRYD, "--print-options").stdout
        drain = re.search(r"^drain\.timeout\tduration\t(\d+)s\t", options, re.MULTILINE)
        self.assertLess(int(drain.group(1)) + 30,
                        int(self.service["TimeoutStopSec"].removesuffix("s")))

    def expand(self, name):
        """System calls of one of systemd's sets, sets in it too."""
        out = run(ANALYZE, "syscall-filter", name).stdout
        words = re.findall(r"^ +([@\w-]+)$", re.sub("\x1b[^m]*m", "", out), re.MULTILINE)
        for word in words:
            if word.startswith("@"):
                yield from self.expand(word)
            else:
                yield word

    @unittest.skipUnless(has_filters(), "skipped: systemd-analyze lists no system calls")
    def test_hits_under_the_filter(self):
        sets = self.service["SystemCallFilter"].split()
        names = sorted({name for one in sets for name in self.expand(one)})
        self.assertGreater(len(names), 100)
        profile = os.path.join(self.folder, "filter.json")
        with open(profile, "w", encoding="utf-8") as file:
            json.dump({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1, "syscalls": [
                {"names": names, "action": "SCMP_ACT_ALLOW"}]}, file)
        words = [word for value in [*SMALL, *STORE] for word in ("--set", value)]
        command = under(profile, KVFERRYD, "--dir", self.folder, *words)
        path = os.path.join(self.folder, "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.settimeout(filtered.DEADLINE_S)
            process = self.start(command, {"NOTIFY_SOCKET": path})
            said = manager.recv(4096)
            while said.startswith(b"EXTEND_TIMEOUT"):  # a start that takes a second says how far
                said = manager.recv(4096)
            self.assertIn(b"READY=1", said)
            self.check_hits(process, command, {"NOTIFY_SOCKET": path})


if __name__ == "__main__":
    filtered.skip_without_filters()
    unittest.main(argv=[sys.argv[0], *sys.argv[6:]])
