# SPDX-License-Identifier: Apache-2.0
"""logged.py: a test case that starts a daemon, has what it says in one file, and ends it."""

import subprocess
import time
import unittest

# what a loaded machine may need
READY_S = 120


class LoggedCase(unittest.TestCase):
    """self.log is the path of the file, set by whoever derives from this."""

    def start_logged(self, command, is_ready=lambda said: "admin socket " in said, **how):
        """Start a command and wait until is_ready(what it has said so far). The words of how are
        subprocess.Popen's. The process is killed when the test ends."""
        with open(self.log, "ab") as log:
            begin = log.tell()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       **how)
        self.addCleanup(self.end, process)
        end = time.monotonic() + READY_S
        while not is_ready(self.log_text(begin)):
            self.assertIsNone(process.poll(), self.log_text())
            self.assertLess(time.monotonic(), end, self.log_text())
            time.sleep(0.02)
        return process

    @staticmethod
    def end(process):
        if process.poll() is None:
            process.kill()
        process.wait()

    def log_text(self, begin=0):
        with open(self.log, "rb") as file:
            file.seek(begin)
            return file.read().decode()
