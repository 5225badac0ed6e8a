#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two daemons in two network namespaces: what one has is hit on the other; the wire between them is
cut and mended, and each get ends as a hit with the right bytes or as a miss.

usage: test_peers_nodes.py KVFERRYD KVFERRY [unittest arguments]
Exit code 77: this user, or this machine, cannot make network namespaces.
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from logged import LoggedCase  # noqa: E402
from wire import ip  # noqa: E402

KVFERRYD, KVFERRY = sys.argv[1:3]
NAMES = [f"kvf{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.199.17.1", "10.199.17.2"]
PORT = 7171
WAIT_S = 60
SMALL = ["dram.bytes=64MiB", "dram.area_bytes=1MiB", "nvme.0.bytes=64MiB",
         "nvme.0.segment_bytes=4MiB"]


def make_nodes():
    """Two namespaces with a wire between them. False: not here."""
    made = all(ip("netns", "add", name) for name in NAMES)
    made = made and ip("link", "add", NAMES[0], "netns", NAMES[0], "type", "veth", "peer", "name",
                       NAMES[1], "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES):
        made = made and ip("-n", name, "addr", "add", f"{address}/30", "dev", name)
        made = made and ip("-n", name, "link", "set", name, "up")
        made = made and ip("-n", name, "link", "set", "lo", "up")
    return made and all(is_up(name) for name in NAMES)


def is_up(name):
    """Wait until the kernel has seen that the other end is up, too."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        shown = subprocess.run(["ip", "-n", name, "link", "show", name], capture_output=True,
                               check=False).stdout
        if b"state UP" in shown:
            return True
        time.sleep(0.02)
    return False


def drop_nodes():
    for name in NAMES:
        ip("netns", "del", name)


def payload(number):
    seed = hashlib.sha256(str(number).encode()).digest()
    return seed * (300 + 2000 * (number % 5))


class Nodes(LoggedCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.log = os.path.join(self.folder, "log")
        self.key = os.path.join(self.folder, "key")
        with open(self.key, "wb") as file:
            file.write(bytes(range(32)))

    def start(self, side, *sets):
        """A daemon on one of the nodes, which asks the other one."""
        folder = os.path.join(self.folder, str(side))
        os.makedirs(folder, exist_ok=True)
        command = ["ip", "netns", "exec", NAMES[side], KVFERRYD, "--dir", folder]
        for value in [*SMALL, f"cluster_key={self.key}", f"peers.listen={ADDRESSES[side]}:{PORT}",
                      f"peers.nodes={ADDRESSES[1 - side]}:{PORT}", *sets]:
            command += ["--set", value]
        return self.start_logged(command, env={**os.environ, "UCX_TLS": "tcp"})

    def kvferry(self, side, *arguments, data=b""):
        socket = os.path.join(self.folder, str(side), "kvferryd.sock")
        return subprocess.run([KVFERRY, *arguments, "--socket", socket], input=data,
                              capture_output=True, timeout=120, check=False)

    def put(self, side, number):
        done = self.kvferry(side, "put", "--key-text", f"block number {number:06}",
                            data=payload(number))
        self.assertEqual(done.returncode, 0, done.stderr)

    def get(self, side, number):
        """True: a hit, whose bytes are right. False: a miss."""
        done = self.kvferry(side, "get", "--key-text", f"block number {number:06}")
        if done.returncode == 0:
            self.assertEqual(done.stdout, payload(number))
            return True
        self.assertIn(b"miss", done.stdout + done.stderr)
        return False

    def peers(self, side):
        done = self.kvferry(side, "peers", "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return [row for row in json.loads(done.stdout)["peers"] if row["asked"]]

    def wait_for(self, is_so, what):
        end = time.monotonic() + WAIT_S
        while not is_so():
            self.assertLess(time.monotonic(), end, f"waited for {what}; log:\n{self.log_text()}")
            time.sleep(0.05)

    def wait_blocks(self, side, blocks):
        self.wait_for(lambda: [row["blocks"] for row in self.peers(side)] == [blocks],
                      f"{blocks} blocks to be known on node {side}")

    def test_hit_and_partition(self):
        for side in (0, 1):
            self.start(side)
        for number in range(6):
            self.put(0, number)
        self.put(1, 100)
        self.wait_blocks(1, 6)
        self.wait_blocks(0, 1)
        for number in range(3):
            self.wait_for(lambda n=number: self.get(1, n), f"block {number}")
        self.wait_for(lambda: self.get(0, 100), "block 100")

        # nothing goes over the wire, and nobody is told: a miss by the deadline
        self.assertTrue(ip("-n", NAMES[0], "link", "set", NAMES[0], "down"))
        self.assertFalse(self.get(1, 3))
        self.assertTrue(self.get(1, 0))  # it is here by now
        self.wait_for(lambda: self.peers(1) == [], "the link to be given up")
        self.assertFalse(self.get(1, 4))

        self.assertTrue(ip("-n", NAMES[0], "link", "set", NAMES[0], "up"))
        self.wait_for(lambda: self.get(1, 5), "block 5, once the wire is mended")


if __name__ == "__main__":
    if not make_nodes():
        drop_nodes()
        print("no network namespaces here: skipped")
        sys.exit(77)
    try:
        unittest.main(argv=sys.argv[:1] + sys.argv[3:])
    finally:
        drop_nodes()
