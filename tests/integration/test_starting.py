#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A daemon that recovers a drive for long: what the command, probes and clients are told meanwhile.
A failpoint holds it in the midst of it for as long as the test takes.

usage: test_starting.py KVFERRYD KVFERRY [unittest arguments]
"""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from logged import SMALL, DaemonCase

KVFERRYD, KVFERRY = sys.argv[1:3]
DEADLINE_S = 120
MIB = 1 << 20
BLOCKS = 24  # on two drives: not all on one, but once in eight million runs
AT = re.compile(r"recovering \S+second.store: (\d+) of (\d+) MiB looked at, (\d+) blocks so far")


class Starting(DaemonCase):
    FOLDER = "kvferry-starting-"
    SMALL = (*SMALL, "clients.max=8")

    def setUp(self):
        super().setUp()
        second = os.path.join(self.folder, "second.store")
        self.sets = [f"nvme.1.path={second}", "nvme.1.bytes=64MiB", "nvme.1.segment_bytes=8MiB"]
        self.block = os.urandom(20000)
        process = self.start_daemon(KVFERRYD, *self.sets)
        for i in range(BLOCKS):
            self.kvferry("put", "--key-text", f"block {i}", "--durable", data=self.block)
        process.kill()  # so that each drive has a segment without an end, which is scanned
        process.wait()

    def hold_at_second_scan(self):
        """A daemon that stands still there, for longer than any test."""
        command = [KVFERRYD, "--dir", self.folder]
        for value in [*self.SMALL, *self.sets]:
            command += ["--set", value]
        env = {**os.environ, "KVFERRY_FAILPOINTS": "nvme.recover_scan=delay:3600000ms@2"}
        with open(self.log, "ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env=env)
        self.addCleanup(self.end, process)
        end = time.monotonic() + DEADLINE_S
        while True:
            code, out, said = self.run_kvferry("stat")
            found = AT.search(out.decode())
            if code == 0 and found and int(found[1]) == int(found[2]) - 8:
                return process  # all segments but the one with blocks are empty
            self.assertIsNone(process.poll(), self.log_text())
            self.assertLess(time.monotonic(), end, out.decode() + said + self.log_text())
            time.sleep(0.02)

    def run_kvferry(self, *arguments, data=b""):
        done = subprocess.run([KVFERRY, *arguments, "--socket", self.socket], input=data,
                              capture_output=True, check=False, timeout=DEADLINE_S)
        return done.returncode, done.stdout, done.stderr.decode()

    def kvferry(self, *arguments, data=b""):
        code, out, said = self.run_kvferry(*arguments, data=data)
        self.assertEqual(code, 0, said + self.log_text())
        return out

    def get(self, path):
        connection = http.client.HTTPConnection("kvferryd", timeout=DEADLINE_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(DEADLINE_S)
        try:
            connection.sock.connect(self.socket + ".admin")
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())["text"]
        finally:
            connection.close()

    def test_what_is_told(self):
        process = self.hold_at_second_scan()
        texts = [self.kvferry("stat").decode(), self.get("/livez")[1], self.get("/readyz")[1],
                 self.kvferry("top", "--interval", "10ms").decode()]
        found = [AT.search(text).groups() for text in texts]
        self.assertEqual(found[1:], found[:-1])
        looked, total, blocks = map(int, found[0])
        self.assertLess(0, looked)
        self.assertTrue(0 < blocks < BLOCKS, blocks)  # those of the first drive
        for command in ("stat", "top"):
            stat = json.loads(self.kvferry(command, "-o", "json"))
            self.assertFalse(stat["ready"])
            self.assertEqual({**stat["starting"], "text": ""},
                             {"looked_bytes": looked * MIB, "total_bytes": total * MIB,
                              "blocks": blocks, "text": ""})
        self.assertEqual([self.get(path)[0] for path in ("/livez", "/readyz", "/metrics")],
                         [200, 503, 503])
        # what only its loop knows is not to be had yet
        for command in ("ls", "clients", "drain", "doctor"):
            code, out, said = self.run_kvferry(command)
            self.assertNotEqual(code, 0)
            self.assertRegex(out.decode() + said, AT)
        # and who attaches is refused, with the reason, and not left to wait
        code, _, said = self.run_kvferry("put", "--key-text", "two", data=b"two")
        self.assertNotEqual(code, 0)
        self.assertRegex(said, "busy.*the daemon starts: " + AT.pattern)
        end = time.monotonic() + DEADLINE_S
        while process.poll() is None:  # the first signal waits for the drive, the second does not
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
            self.assertLess(time.monotonic(), end)
        self.assertEqual(process.returncode, 1)
        self.start_daemon(KVFERRYD, *self.sets)
        for i in range(BLOCKS):
            self.assertEqual(self.kvferry("get", "--key-text", f"block {i}"), self.block)
        self.assertNotIn("starting", json.loads(self.kvferry("stat", "-o", "json")))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
