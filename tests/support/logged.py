# SPDX-License-Identifier: Apache-2.0
"""logged.py: a test case that starts a daemon, has what it says in one file, and ends it."""

import logging
import os
import subprocess
import tempfile
import time
import unittest

# A daemon of chunks of some hundred KiB; clients.max is its test's.
SMALL = ("dram.bytes=64MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=64MiB",
         "staging.total=96MiB", "staging.client=4MiB", "nvme.0.bytes=128MiB",
         "nvme.0.segment_bytes=8MiB")
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


class DaemonCase(LoggedCase):
    """A kvferryd in a folder of its own, whose name begins with FOLDER; SMALL are its settings."""

    FOLDER = "kvferry-"
    SMALL = ()
    shared = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix=self.FOLDER)
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.socket = os.path.join(self.folder, "kvferryd.sock")
        self.log = os.path.join(self.folder, "log")

    def start_daemon(self, kvferryd, *sets):
        command = [kvferryd, "--dir", self.folder]
        for value in [*self.SMALL, *sets]:
            command += ["--set", value]
        return self.start_logged(command)

    def share_daemon(self, kvferryd):
        """Use a daemon together with other tests of the program, which do it no harm: starting one
        takes longer than most of them."""
        if DaemonCase.shared is None:
            DaemonCase.shared = type(self)("share_daemon")
            DaemonCase.setUp(DaemonCase.shared)
            unittest.addModuleCleanup(DaemonCase.shared.doCleanups)
            DaemonCase.shared.start_daemon(kvferryd)
        self.socket = DaemonCase.shared.socket

    def hear(self, logger):
        """From now on self.warnings has the lines of this logger, which are not printed."""
        self.warnings = []
        handler = logging.Handler()
        handler.emit = lambda record: self.warnings.append(record.getMessage())
        logger = logging.getLogger(logger)
        logger.addHandler(handler)
        logger.propagate = False
        self.addCleanup(logger.removeHandler, handler)
