#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test_directory.py: daemons that know nothing of each other but a Redis or Valkey server.

Blocks of all are hits on all; who joins late learns by snapshot, of nodes that it has no link with
as well; the server may die, stand still, lie, forget or want a password: that costs misses and
never an error.

    test_directory.py KVFERRYD KVFERRY
"""
import hashlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from logged import LoggedCase  # noqa: E402

KVFERRYD, KVFERRY = sys.argv[1:3]
# what Debian calls redis-check-rdb (of redis-tools, which starts no service) is the server by name
SERVER = (shutil.which("valkey-server") or shutil.which("redis-server") or
          shutil.which("redis-check-rdb"))
CLI = shutil.which("valkey-cli") or shutil.which("redis-cli")
WAIT_S = 120
SMALL = ["dram.bytes=32MiB", "dram.area_bytes=1MiB", "staging.total=16MiB", "staging.client=4MiB",
         "nvme.0.bytes=64MiB", "nvme.0.segment_bytes=4MiB", "peers.timeout=60s",
         "peers.heartbeat=60s", "directory.lease=60s"]


def free_port():
    """None of those that the system gives to who asks for any: UCX of another daemon could have it
    by the time it is listened on."""
    while True:
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", random.randrange(20000, 30000)))
                return one.getsockname()[1]
            except OSError:
                continue


def payload(number):
    seed = hashlib.sha256(str(number).encode()).digest()
    return seed * (200 + 1500 * (number % 4))


class Directory(LoggedCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvf-dir-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.log = os.path.join(self.folder, "log")
        self.socket = os.path.join(self.folder, "redis.sock")
        self.key = os.path.join(self.folder, "key")
        with open(self.key, "wb") as file:
            file.write(bytes(range(32)))

    def start_server(self, *more, address=None):
        address = address or ["--port", "0", "--unixsocket", self.socket]
        return self.start_logged(
            ["redis-server", *address, "--save", "", "--appendonly", "no", "--dir", self.folder,
             *more],
            is_ready=lambda said: "eady to accept connections" in said, executable=SERVER)

    def cli(self, *arguments, data=None):
        """What the server answers. data: the last argument, as bytes."""
        done = subprocess.run([CLI, "-s", self.socket, *(["-x"] if data is not None else []),
                               *arguments], input=data, capture_output=True, timeout=WAIT_S,
                              check=True)
        return done.stdout.decode(errors="replace").split("\n")[:-1]

    def start(self, name, *sets, listens=True):
        folder = os.path.join(self.folder, name)
        os.makedirs(folder, exist_ok=True)
        command = [KVFERRYD, "--dir", folder]
        mine = [f"cluster_key={self.key}", f"directory.address={self.socket}"]
        if listens:
            mine.append(f"peers.listen=127.0.0.1:{free_port()}")
        for value in [*SMALL, *mine, *sets]:
            command += ["--set", value]
        return self.start_logged(command)

    def kvferry(self, name, *arguments, data=b""):
        path = os.path.join(self.folder, name, "kvferryd.sock")
        return subprocess.run([KVFERRY, *arguments, "--socket", path], input=data,
                              capture_output=True, timeout=2 * WAIT_S, check=False)

    def put(self, name, *numbers):
        for number in numbers:
            done = self.kvferry(name, "put", "--key-text", f"block number {number:06}",
                                data=payload(number))
            self.assertEqual(done.returncode, 0, done.stderr)

    def get(self, name, number):
        """True: a hit, whose bytes are right. False: a miss."""
        done = self.kvferry(name, "get", "--key-text", f"block number {number:06}")
        if done.returncode == 0:
            self.assertEqual(done.stdout, payload(number))
            return True
        self.assertIn(b"miss", done.stdout + done.stderr)
        return False

    def metrics(self, name):
        done = self.kvferry(name, "stat", "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["metrics"]

    def peers(self, name, state):
        done = self.kvferry(name, "peers", "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return [row for row in json.loads(done.stdout)["peers"] if row["state"] == state]

    def wait_for(self, is_so, what):
        end = time.monotonic() + WAIT_S
        while not is_so():
            self.assertLess(time.monotonic(), end, f"waited for {what}; log:\n{self.log_text()}")
            time.sleep(0.05)

    def wait_metric(self, name, metric, is_enough):
        self.wait_for(lambda: is_enough(self.metrics(name)[metric]), f"{metric} of {name}")

    def test_late(self):
        self.start_server()
        for name in "abc":
            self.start(name)
        self.put("a", 0, 1, 2)
        self.put("b", 10, 11)
        for name in "abc":
            self.wait_metric(name, "peers", lambda n: n == 2)
        self.wait_metric("c", "peer_hints", lambda n: n == 5)
        self.assertTrue(self.get("c", 0))
        self.assertTrue(self.get("c", 10))
        self.assertTrue(self.get("a", 11))
        self.put("c", 20)

        # one link at a time: of the others it knows by the directory, and is linked when it asks
        self.start("d", "peers.links=1", listens=False)
        self.wait_metric("d", "directory_nodes", lambda n: n == 3)
        self.wait_for(lambda: len(self.peers("d", "listed")) == 2, "two nodes without a link")
        self.wait_metric("d", "peer_hints", lambda n: n == 6)
        for number in (1, 20, 10, 2):
            self.wait_for(lambda n=number: self.get("d", n), f"block {number}")
        self.assertGreaterEqual(self.metrics("d")["get_hits_remote"], 3)
        self.assertLessEqual(self.metrics("d")["peers"], 1)
        self.assertEqual(self.metrics("d")["directory_refused"], 0)

        # what is new is told, by the stream
        self.put("a", 30)
        self.put("b", 31)
        self.put("c", 32)
        for number in (30, 31, 32):
            self.wait_for(lambda n=number: self.get("d", n), f"block {number}")

    def test_server_dies(self):
        server = self.start_server()
        for name in "ab":
            self.start(name)
        self.put("a", 0, 1, 2, 3)
        self.wait_metric("b", "peer_hints", lambda n: n == 4)
        self.wait_metric("b", "peers", lambda n: n == 1)
        self.assertTrue(self.get("b", 0))
        self.assertIn(b"peers     ok     linked to 1", self.kvferry("b", "doctor").stdout)
        server.kill()
        server.wait()
        self.wait_metric("b", "directory_up", lambda n: n == 0)
        doctor = self.kvferry("b", "doctor")
        self.assertEqual(doctor.returncode, 0)
        self.assertIn(b"peers     note   the directory's server does not answer", doctor.stdout)
        self.assertTrue(self.get("b", 1))  # by the link
        self.put("a", 4)
        self.wait_for(lambda: self.get("b", 4), "a block that came while the server was away")
        self.assertFalse(self.get("b", 99))

        os.unlink(self.socket)
        self.start_server()  # which knows nothing
        for name in "ab":
            self.wait_metric(name, "directory_up", lambda n: n == 1)
        self.start("c", "peers.links=1", listens=False)
        self.wait_metric("c", "directory_nodes", lambda n: n == 2)
        self.wait_metric("c", "peer_hints", lambda n: n == 5)
        self.wait_for(lambda: self.get("c", 3), "a block of a")
        self.assertEqual(self.metrics("b")["peers"], 1)

        # all of it is lost, and nobody's connection breaks: told anew when the lease is renewed
        self.kvferry("b", "evict", "--key-text", "block number 000004")
        self.start("d", "directory.lease=3s")
        self.put("d", 50)
        self.wait_metric("d", "peers", lambda n: n == 2)
        self.cli("flushall")
        self.wait_for(lambda: any("head:" in key for key in self.cli("keys", "*")),
                      "a node to tell again what it has")

    def test_server_stands_still(self):
        server = self.start_server()
        for name in "ab":
            self.start(name)
        self.put("a", 0, 1)
        self.wait_metric("b", "peer_hints", lambda n: n == 2)
        self.wait_metric("b", "peers", lambda n: n == 1)
        server.send_signal(signal.SIGSTOP)
        self.addCleanup(server.send_signal, signal.SIGCONT)
        self.put("a", 2)
        self.assertTrue(self.get("b", 0))
        self.wait_for(lambda: self.get("b", 2), "a block that the server was not told of")
        self.wait_metric("b", "directory_up", lambda n: n == 0)
        server.send_signal(signal.SIGCONT)
        self.wait_metric("b", "directory_up", lambda n: n == 1)

    def test_liar(self):
        seed = random.randrange(1 << 32)
        dice = random.Random(seed)
        self.start_server()
        self.start("a")
        self.put("a", 0)
        self.start("b", "peers.links=1", listens=False)
        self.wait_metric("b", "peer_hints", lambda n: n == 1)
        prefix = next(key for key in self.cli("keys", "*nodes"))[:-len("nodes")]
        me = self.cli("smembers", prefix + "nodes")[0]

        # nodes that are none: no lease, garbage, a lease with another node's name or one wrong bit
        lease = subprocess.run([CLI, "-s", self.socket, "get", f"{prefix}lease:{me}"],
                               capture_output=True, check=True).stdout[:-1]
        self.assertEqual(len(lease), 128)
        at = dice.randrange(128)
        wrong = lease[:at] + bytes([lease[at] ^ 1 << dice.randrange(8)]) + lease[at + 1:]
        for name, value in [("00000000000000aa", b"x" * dice.randrange(1, 300)),
                            ("00000000000000bb", lease), ("00000000000000cc", wrong)]:
            self.cli("sadd", prefix + "nodes", name)
            self.cli("set", f"{prefix}lease:{name}", data=value)
        self.cli("sadd", prefix + "nodes", "00000000000000dd", "no node", "")
        self.wait_metric("b", "directory_refused", lambda n: n >= 3)
        self.assertEqual(self.metrics("b")["directory_nodes"], 1, f"seed {seed}")
        self.assertNotIn("00000000000000dd", self.cli("smembers", prefix + "nodes"))

        # events that are none: garbage, and a gap; what is told after that is told from the start
        before = self.metrics("b")["directory_refused"]
        self.start("c", "peers.links=1", f"peers.nodes=127.0.0.1:{free_port()}", listens=False)
        self.wait_metric("c", "peer_hints", lambda n: n == 1)
        self.cli("xadd", f"{prefix}events:{me}", "90000-1", "b", data=os.urandom(200))
        self.wait_metric("c", "directory_refused", lambda n: n > before)
        self.assertTrue(self.get("b", 0))
        self.put("b", 7)
        self.assertTrue(self.get("b", 7))
        self.assertFalse(self.get("c", 7))

    def test_password(self):
        port = free_port()
        password = os.path.join(self.folder, "password")
        with open(password, "w", encoding="ascii") as file:
            file.write("wrong\n")
        self.start_server("--requirepass", "right one",
                          address=["--port", str(port), "--bind", "127.0.0.1"])
        self.start("a", f"directory.address=127.0.0.1:{port}",
                   f"directory.password_file={password}")
        self.wait_metric("a", "directory_failures", lambda n: n >= 1)
        self.put("a", 0)
        self.assertTrue(self.get("a", 0))
        with open(password, "w", encoding="ascii") as file:
            file.write("right one\n")
        self.wait_metric("a", "directory_up", lambda n: n == 1)
        self.assertNotIn("right one", self.log_text())

    def serve_badly(self, answer):
        """A server that answers PING, and then as it should not: answer(send). What each connection
        has taken of that is in the list that comes back, in bytes."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.socket)
        listener.listen()
        taken = []

        def send(connection, slot, data):
            taken[slot] += connection.send(data)

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                taken.append(0)
                slot = len(taken) - 1
                with connection:
                    connection.settimeout(WAIT_S)
                    try:
                        connection.recv(1 << 16)
                        connection.send(b"+PONG\r\n")
                        connection.recv(1 << 16)
                        answer(lambda data: send(connection, slot, data))
                        connection.recv(1 << 16)  # until the other side has enough of it
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self.addCleanup(thread.join, WAIT_S)
        self.addCleanup(listener.close)
        self.addCleanup(listener.shutdown, socket.SHUT_RDWR)
        return taken

    def assert_ends(self, process):
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(WAIT_S), 0, self.log_text())

    def test_answer_dribbles(self):
        def dribble(send):
            send(b"$1000000\r\n")
            while True:
                time.sleep(0.3)
                send(b"x")

        taken = self.serve_badly(dribble)
        daemon = self.start("a")
        self.wait_metric("a", "directory_failures", lambda n: n >= 1)
        self.put("a", 0)
        self.assertTrue(self.get("a", 0))
        before = len(taken)
        self.wait_for(lambda: len(taken) > before and taken[-1] > 12, "an answer under way")
        self.assert_ends(daemon)

    def test_answer_is_endless(self):
        most = 64 << 20

        def flood(send):
            send(b"$500000000\r\n")
            for _ in range(most >> 16):
                send(b"x" * (1 << 16))

        taken = self.serve_badly(flood)
        daemon = self.start("a")
        self.wait_for(lambda: "an answer without an end" in self.log_text(), "a refusal")
        self.wait_metric("a", "directory_failures", lambda n: n >= 2)
        self.assertLess(max(taken), most // 4)
        self.put("a", 0)
        self.assertTrue(self.get("a", 0))
        self.assert_ends(daemon)

    def test_answer_of_many_parts(self):
        self.serve_badly(lambda send: send(b"*2000000000\r\n"))
        daemon = self.start("a")
        self.wait_for(lambda: "an answer of too many parts" in self.log_text(), "a refusal")
        self.assert_ends(daemon)

    def events(self, name, **query):
        path = os.path.join(self.folder, name, "kvferryd.sock.admin")
        words = "&".join(f"{key}={value}" for key, value in query.items())
        connection = http.client.HTTPConnection("kvferryd", timeout=WAIT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(WAIT_S)
        connection.sock.connect(path)
        connection.request("GET", f"/v1/events?{words}")
        answer = connection.getresponse()
        said = json.loads(answer.read())
        connection.close()
        return answer.status, said

    def test_events_of_a_router(self):
        """What a router needs, as vLLM's publisher would say it: all that is there, then changes
        by number, and a word where numbers are missing."""
        self.start_server()
        self.start("a")
        self.put("a", *range(5))
        known, cursor, number = None, "0", None
        while cursor is not None:
            status, said = self.events("a", cursor=cursor, max=2)
            self.assertEqual(status, 200)
            number = number or said["number"]
            cursor = said["next_cursor"]
            _, batch, rank = said["batch"]
            self.assertIsNone(rank)
            for event in batch:
                if event["type"] == "AllBlocksCleared":
                    known = set()
                else:
                    self.assertEqual((event["type"], event["medium"]), ("BlockStored", "CPU"))
                    known |= set(event["block_hashes"])
        self.assertEqual(len(known), 5)
        done = self.kvferry("a", "evict", "--key-text", "block number 000002")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.put("a", 7)
        _, said = self.events("a", number=number)
        for event in said["batch"][1]:
            hashes = set(event["block_hashes"])
            if event["type"] == "BlockRemoved":
                self.assertLessEqual(hashes, known)
                known -= hashes
            else:
                known |= hashes
        self.assertEqual(len(known), 5)
        self.assertEqual(said["number"], f"{int(number, 16) + 2:x}")
        self.assertEqual(self.events("a", number=said["number"])[1]["batch"][1], [])
        self.assertEqual(self.events("a", number="ffffff")[0], 404)
        self.assertEqual(self.events("a", number="no")[0], 400)

    def test_refused(self):
        for sets, word in [(["directory.address=nowhere"], "host:port"),
                           ([f"directory.address={self.socket}",
                             "directory.password_file=/nowhere/at/all"], "password"),
                           (["directory.address=127.0.0.1:6379", "cluster_key="], "cluster_key")]:
            command = [KVFERRYD, "--dir", self.folder, "--set", f"cluster_key={self.key}"]
            for value in [*SMALL, *sets]:
                command += ["--set", value]
            done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(word, done.stderr.decode())


if __name__ == "__main__":
    if SERVER is None or CLI is None:
        print("no Redis or Valkey server here (redis-tools of Debian): skipped")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
