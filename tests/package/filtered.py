# SPDX-License-Identifier: Apache-2.0
"""filtered.py: a small kvferryd under a seccomp filter, in a folder of its own, for tests."""
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from logged import LoggedCase

RUN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seccomp_run.py")
PROFILE = os.path.join(ROOT, "charts", "kvferry", "files", "seccomp-io-uring.json")
SKIP = 77
DEADLINE_S = 120

SMALL = [
    "dram.bytes=96MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=96MiB", "staging.total=96MiB",
    "staging.client=4MiB", "clients.max=16",
]
STORE = ["nvme.0.bytes=128MiB", "nvme.0.segment_bytes=8MiB"]
URING = "io_uring_setup,io_uring_enter,io_uring_register"

COMPILER, KVFERRYD, KVFERRY = sys.argv[1:4]


def under(profile, *command, refuse="", errno=1):
    """The words that run a command under a profile."""
    return [sys.executable, "-B", RUN, "--cc", COMPILER, "--refuse", refuse, "--errno", str(errno),
            profile, "--", *command]


def skip_without_filters():
    done = subprocess.run(under("allow", "true"), capture_output=True, text=True, check=False,
                          timeout=DEADLINE_S)
    if done.returncode == SKIP:
        print(done.stderr)
        sys.exit(SKIP)


class Case(LoggedCase):
    maxDiff = None

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvf-filter-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.socket = os.path.join(self.folder, "kvferryd.sock")
        self.log = os.path.join(self.folder, "log")

    def start(self, command, env=None):
        return self.start_logged(command, env={**os.environ, **(env or {})})

    def store_line(self):
        """What the log says of how I/O is done: form and reasons."""
        found = re.search(r"nvme: \S+: 128 MiB, (.*)", self.log_text())
        self.assertIsNotNone(found, self.log_text())
        return found.group(1)

    def kvferry(self, *arguments, data=b""):
        done = subprocess.run([KVFERRY, *arguments, "--socket", self.socket], input=data,
                              capture_output=True, check=False, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stderr.decode() + self.log_text())
        return done.stdout

    def check_hits(self, process, command, env=None):
        """From memory, and from the drive after the daemon was killed."""
        block = os.urandom(300000)
        key = ["--key-text", block[:8].hex()]
        self.kvferry("put", *key, "--durable", data=block)
        self.assertEqual(self.kvferry("get", *key), block)
        process.kill()
        process.wait()
        process = self.start(command, env)
        self.assertEqual(self.kvferry("get", *key), block)
        process.terminate()
        self.assertEqual(process.wait(timeout=DEADLINE_S), 0, self.log_text())
