#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sockets that a service manager has made and keeps: clients that connect while there is no daemon
wait for the next one, the daemon leaves the sockets as they are, and takes none that are not its
configuration's.

usage: test_activation.py KVFERRYD KVFERRY [unittest arguments]
"""
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from logged import SMALL, DaemonCase

KVFERRYD, KVFERRY = sys.argv[1:3]
ACTIVATE = shutil.which("systemd-socket-activate")
DEADLINE_S = 120
NO_DAEMON = 3  # exit code of the command where nobody listens
CONFIG = 2  # of the daemon

# As a service manager starts a process: descriptors from 3 on, and its own number in LISTEN_PID.
SHIM = """
import fcntl, os, sys
fds, owner, names, command = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
# first out of the way of each other
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 64) for fd in fds.split(",")]
for i, fd in enumerate(fds):
    os.dup2(fd, 3 + i)
os.closerange(3 + len(fds), 128)
os.environ.update(LISTEN_FDS=os.environ.get("COUNT", str(len(fds))), LISTEN_FDNAMES=names,
                  LISTEN_PID=owner or str(os.getpid()))
os.execv(command[0], command)
"""


class Activation(DaemonCase):
    FOLDER = "kvferry-activation-"

    def listen(self, path=None, kind=socket.SOCK_SEQPACKET, mode=0o600, listens=True):
        one = socket.socket(socket.AF_UNIX, kind)
        self.addCleanup(one.close)
        one.bind(path or self.socket)
        os.chmod(path or self.socket, mode)
        if listens:
            one.listen(16)
        return one

    def command(self, sockets, *sets, owner="", names="kvferryd.socket"):
        words = [KVFERRYD, "--dir", self.folder]
        for value in [*SMALL, "clients.max=8", *sets]:
            words += ["--set", value]
        fds = ",".join(str(one.fileno()) for one in sockets)
        return [sys.executable, "-c", SHIM, fds, owner, names, *words]

    def start(self, sockets, *sets, **how):
        return self.start_logged(self.command(sockets, *sets, **how),
                                 pass_fds=[one.fileno() for one in sockets])

    def refused(self, sockets, *sets, count=None, **how):
        """What a daemon says that does not start with these."""
        env = {**os.environ, **({"COUNT": count} if count else {})}
        done = subprocess.run(self.command(sockets, *sets, **how), capture_output=True, text=True,
                              pass_fds=[one.fileno() for one in sockets], check=False, env=env,
                              timeout=DEADLINE_S)
        self.assertEqual(done.returncode, CONFIG, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        return done.stderr

    def kvferry(self, *arguments, data=b"", path=None):
        """(exit code, stdout, stderr)."""
        done = subprocess.run([KVFERRY, *arguments, "--socket", path or self.socket], input=data,
                              capture_output=True, check=False, timeout=DEADLINE_S)
        return done.returncode, done.stdout, done.stderr.decode()

    def until_served(self, *arguments, **how):
        """Run a command until it succeeds. It may tire of waiting; it never finds nobody."""
        end = time.monotonic() + DEADLINE_S
        while True:
            code, out, said = self.kvferry(*arguments, **how)
            if code == 0:
                return out
            self.assertNotEqual(code, NO_DAEMON, said)
            self.assertLess(time.monotonic(), end, said + self.log_text())

    def inode(self):
        return os.stat(self.socket).st_ino

    def stop(self, process):
        process.terminate()
        self.assertEqual(process.wait(timeout=DEADLINE_S), 0, self.log_text())

    def test_waits_and_survives(self):
        """Connected before the first daemon, over a restart, and after the last one has ended."""
        kept = self.listen()
        inode = self.inode()
        block = os.urandom(200000)
        waiting = subprocess.Popen([KVFERRY, "ping", "--count", "1", "--socket", self.socket],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(self.end, waiting)
        first = self.start([kept])
        said = waiting.communicate(timeout=DEADLINE_S)[1].decode()
        self.assertNotEqual(waiting.returncode, NO_DAEMON, said)
        self.assertIn("which the service manager keeps", self.log_text())
        self.until_served("put", "--key-text", "first", "--durable", data=block)
        self.stop(first)
        self.assertEqual(self.inode(), inode)
        # nobody is there, and connecting is not refused
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early:
            early.settimeout(DEADLINE_S)
            early.connect(self.socket)
            early.send(b"not a HELLO")
            second = self.start([kept])
            self.assertEqual(self.until_served("get", "--key-text", "first"), block)
            while early.recv(4096):  # it was looked at, and is told to go
                pass
        self.assertEqual(stat.S_IMODE(os.stat(self.socket).st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(os.stat(self.socket + ".held").st_mode), 0o600)
        self.stop(second)
        self.assertEqual(self.inode(), inode)

    def test_who_gave_up_gets_nothing(self):
        kept = self.listen()
        for _ in range(5):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tired:
                tired.connect(self.socket)
                tired.send(b"not a HELLO")
        self.start([kept])
        self.until_served("ping", "--count", "1")
        self.assertNotIn("disconnected", self.log_text())

    def test_tenants_and_admin(self):
        """Two tenants' sockets and the admin socket passed, a third tenant's made as ever."""
        paths = [self.socket, self.socket + ".b", self.socket + ".c"]
        sets = [f"sockets.{i}.{key}={value}" for i, path in enumerate(paths)
                for key, value in (("path", path), ("tenant", f"t{i}"))]
        kept = [self.listen(paths[1]), self.listen(self.socket + ".admin", socket.SOCK_STREAM),
                self.listen(paths[0])]
        process = self.start(kept, *sets, names="b:admin:a")
        self.until_served("put", "--key-text", "one", data=b"of t0", path=paths[0])
        self.assertEqual(self.until_served("get", "--key-text", "one", path=paths[0]), b"of t0")
        for path in paths[1:]:  # another tenant's blocks are not there
            self.until_served("ping", "--count", "1", path=path)
            self.assertNotEqual(self.kvferry("get", "--key-text", "one", path=path)[0], 0)
        self.assertIn(b"ready", self.until_served("stat"))
        self.stop(process)
        self.assertEqual([os.path.exists(path) for path in [*paths, self.socket + ".admin"]],
                         [True, True, False, True])

    def test_wrong_ones_are_refused(self):
        kept = self.listen()
        other = self.socket + ".other"
        file = open(os.path.join(self.folder, "file"), "w", encoding="utf-8")
        self.addCleanup(file.close)
        tcp = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(tcp.close)
        mute = self.listen(self.socket + ".mute", listens=False)
        gone = self.listen(self.socket + ".gone")
        os.unlink(self.socket + ".gone")
        stream = self.listen(self.socket + ".stream", socket.SOCK_STREAM)
        for sockets, sets, parts in (
                ([file], [], ["descriptor 3 (a)", "is not a socket", "only"]),
                ([kept, tcp], [], ["descriptor 4 (b)", "not a Unix socket"]),
                ([kept, self.listen(other)], [], ["descriptor 4 (b)", other, "name it in sockets"]),
                ([stream], [f"sockets.0.path={self.socket}.stream"],
                 ["wrong type", "ListenSequentialPacket="]),
                ([self.listen(self.socket + ".admin")], [], ["wrong type", "ListenStream="]),
                ([mute], [f"sockets.0.path={self.socket}.mute"], ["does not listen", "Accept=no"]),
                ([kept, kept], [], ["descriptor 4 (b)", "second one"]),
                ([gone], [f"sockets.0.path={self.socket}.gone"], ["restart the socket unit"])):
            said = self.refused(sockets, *sets, names="a:b")
            for part in parts:
                self.assertIn(part, said)
        self.assertIn("LISTEN_FDS=many", self.refused([kept], count="many"))
        self.assertIn("LISTEN_FDS=99", self.refused([kept], count="99"))
        # one more than there is
        self.assertIn("descriptor 4 (unnamed)", self.refused([kept], count="2"))
        self.assertTrue(stat.S_ISSOCK(os.stat(self.socket).st_mode))

    def test_of_another_process(self):
        """A variable that was left by somebody else: the daemon makes its own socket."""
        kept = self.listen(self.socket + ".other")
        process = self.start([kept], owner="1")
        self.until_served("ping", "--count", "1")
        self.stop(process)
        self.assertFalse(os.path.exists(self.socket))

    def connect_once_bound(self, process):
        end = time.monotonic() + DEADLINE_S
        first = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while first.connect_ex(self.socket) != 0:
            self.assertIsNone(process.poll(), self.log_text())
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        return first

    @unittest.skipUnless(ACTIVATE, "skipped: no systemd-socket-activate")
    def test_by_systemd(self):
        """Its own tool listens, and starts the daemon when the first client comes."""
        daemon = self.command([])[6:]  # without the shim
        with open(self.log, "ab") as log:
            process = subprocess.Popen([ACTIVATE, "--seqpacket", "-l", self.socket,
                                        "--fdname=kvferryd.socket", *daemon],
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.addCleanup(self.end, process)
        self.addCleanup(self.connect_once_bound(process).close)
        self.until_served("put", "--key-text", "one", data=b"first client")
        self.assertIn("which the service manager keeps", self.log_text())
        self.stop(process)
        self.assertTrue(os.path.exists(self.socket))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
