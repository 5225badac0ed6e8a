#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package against a real daemon: bytes, pages, leases, failures, asyncio.

usage: test_binding.py KVFERRYD PACKAGE_FOLDER [unittest arguments]
"""
import asyncio
import ctypes.util
import hashlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
KVFERRYD, PACKAGE = sys.argv[1:3]
sys.path.insert(0, PACKAGE)

from logged import LoggedCase  # noqa: E402

import kvferry  # noqa: E402
from kvferry import Status  # noqa: E402
from kvferry.aio import AsyncClient  # noqa: E402

SMALL = ["dram.bytes=64MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=64MiB",
         "staging.total=64MiB", "staging.client=4MiB", "nvme.0.bytes=128MiB",
         "nvme.0.segment_bytes=8MiB", "clients.max=16"]
WAIT_MS = 60_000


# A program whose threads never leave their handles alone.
ENDS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import kvferry
begun = threading.Semaphore(0)

def work(client):
    while True:
        try:
            client.ping(5)
        except kvferry.KvferryError:
            pass
        begun.release()

clients = [kvferry.Client(sys.argv[2], staging_bytes=1 << 20) for _ in range(4)]
for client in clients:
    threading.Thread(target=work, args=(client,), daemon=True).start()
for _ in range(16):
    begun.acquire()
sys.exit(7)
"""


DENIES = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import kvferry
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) != 0:
    sys.exit(77)
client = kvferry.Client(sys.argv[2], log=lambda severity, line: None)
print(client.put([kvferry.Put(b"a key of 16 byte", data=b"x")])[0].name)
client.close()
"""


def key(number):
    return b"python binding %016d" % number


def block(number, size=100_000):
    return (b"block %d of a test " % number * (size // 16))[:size]


class Array:
    """Pages in a bytearray: what numpy and torch arrays have, and no more."""

    def __init__(self, memory, shape, strides, offset=0):
        self.memory, self.shape, self.strides = memory, shape, strides
        pointer = kvferry.buffers.address(memory) + offset
        self.__array_interface__ = {"data": (pointer, False)}


def kv_layer(n_pages, tokens, heads, dim):
    """One layer of bf16 pages, K and V side by side in a row: (bytearray, K, V)."""
    row = 2 * dim * 2
    strides = (tokens * heads * row, row, tokens * row, 2)
    memory = bytearray(n_pages * strides[0])
    shape = (n_pages, tokens, heads, dim)
    return memory, Array(memory, shape, strides), Array(memory, shape, strides, dim * 2)


class Case(LoggedCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvferry-python-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.log = os.path.join(self.folder, "log")
        self.socket = os.path.join(self.folder, "kvferryd.sock")
        self.start()

    def start(self, *sets, **how):
        command = [KVFERRYD, "--dir", self.folder]
        for value in [*SMALL, *sets]:
            command += ["--set", value]
        self.daemon = self.start_logged(command, **how)

    def client(self, **options):
        client = kvferry.Client(self.socket, **options)
        self.addCleanup(client.close)
        return client


class Bytes(Case):
    def test_put_lookup_get_release(self):
        client = self.client()
        keys = [key(i) for i in range(4)]
        items = [kvferry.Put(k, data=block(i)) for i, k in enumerate(keys)]
        self.assertEqual(client.put(items), [Status.OK] * 4)
        self.assertEqual(client.put(items[:1]), [Status.EXISTS])
        found = client.lookup(keys + [key(9)], lease=True)
        self.assertEqual((found.run_chunks, found.ready_chunks), (4, 4))
        self.assertTrue(client.holds(found.lease))
        self.assertTrue(client.release(found.lease))
        self.assertFalse(client.release(found.lease))
        hits = client.get(keys + [key(9)])
        self.assertEqual([hit.status for hit in hits], [Status.OK] * 4 + [Status.MISS])
        for i, hit in enumerate(hits[:4]):
            self.assertEqual(hit.tier, "dram")
            self.assertEqual(bytes(hit.payload), block(i))
            self.assertTrue(hit.payload.readonly)
            self.assertTrue(client.release(hit.lease))
        self.assertEqual(client.evict(keys[:2]), 2)
        self.assertEqual(client.lookup(keys).run_chunks, 0)
        self.assertEqual(client.stat()["namespace_blocks"], 2)

    def test_any_buffer(self):
        client = self.client()
        data = block(5)
        for i, buffer in enumerate((data, bytearray(data), memoryview(data))):
            self.assertEqual(client.put([kvferry.Put(key(i), data=buffer)]), [Status.OK])
            hit, = client.get([key(i)])
            self.assertEqual(bytes(hit.payload), data)
            self.assertTrue(client.release(hit.lease))

    def test_numpy(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        client = self.client()
        array = numpy.arange(50_000, dtype=numpy.uint16)
        self.assertEqual(client.put([kvferry.Put(key(0), data=array)]), [Status.OK])
        hit, = client.get([key(0)])
        view = numpy.frombuffer(hit.payload, dtype=numpy.uint16)
        self.assertTrue((view == array).all())
        self.assertEqual(view.ctypes.data, hit.record + kvferry.client.RECORD_PAGE_BYTES)
        self.assertTrue(client.release(hit.lease))

    def test_requests_in_flight(self):
        client = self.client()
        wanted = {}
        for i in range(8):
            item = kvferry.Put(key(i), data=block(i, 4096))
            wanted[client.submit_put([item], user=i)] = i
        poller = select.poll()
        poller.register(client.fileno(), select.POLLIN)
        while wanted:
            self.assertTrue(poller.poll(WAIT_MS), "nothing came")
            for event in client.poll():
                self.assertEqual(event.hit.status, Status.OK)
                if event.is_request:
                    self.assertEqual(wanted.pop(event.request), event.user)
        self.assertFalse(client.cancel(1 << 40))


class Failures(Case):
    def test_no_daemon(self):
        with self.assertRaises(kvferry.SessionError) as caught:
            kvferry.Client(os.path.join(self.folder, "nobody"), connect_timeout_ms=10)
        self.assertEqual(caught.exception.status, Status.ERR_NO_DAEMON)
        self.assertIn("no_daemon", str(caught.exception))
        self.assertIn("does not exist: is kvferryd running", str(caught.exception))

    def test_choices_that_make_no_sense(self):
        """The exception says which one, and what there may be."""
        for options, words in (({"staging_bytes": 1 << 37}, "137438953472, and 68719476736"),
                               ({"namespace_label": "n" * 64}, "label has more than 63 bytes"),
                               ({"name": "a\nb"}, "control characters"),
                               ({"shard": 4, "shard_count": 4}, "shard 4 of 4"),
                               ({"ring_entries": 1 << 20}, "and 32768 is the most")):
            with self.assertRaisesRegex(kvferry.KvferryError, words):
                self.client(**options)

    def test_no_memory_is_executable(self):
        """systemd's MemoryDenyWriteExecute: there is no log then, and all else."""
        done = subprocess.run([sys.executable, "-c", DENIES, PACKAGE, self.socket], check=False,
                              stdout=subprocess.PIPE, text=True)
        if done.returncode == 77:
            self.skipTest("the kernel cannot deny it")
        self.assertEqual((done.returncode, done.stdout), (0, "OK\n"))

    def test_arguments(self):
        client = self.client()
        with self.assertRaises(kvferry.KvferryError) as caught:
            client.lookup([b"too short"])
        self.assertEqual(caught.exception.status, Status.ERR_INVALID)
        with self.assertRaises(kvferry.KvferryError):
            client.put([kvferry.Put(b"too short", data=b"x")])
        with self.assertRaises(kvferry.KvferryError):
            client.get([])

    def test_log_says_what_is_wrong(self):
        said = []
        geometry = kvferry.Geometry(2, 1, 64, 64, 256, dtype="bf16")
        client = self.client(geometry=geometry, profile="balanced",
                             log=lambda severity, line: said.append(line))
        self.assertEqual(client.info().profile, "exact")
        self.assertTrue(client.info().lossless)
        self.assertTrue(any("balanced" in line for line in said), said)

    def test_daemon_dies_and_comes_back(self):
        client = self.client()
        client.put([kvferry.Put(key(0), data=block(0))], durable=True)
        first = client.info().incarnation
        self.daemon.kill()
        self.daemon.wait()
        with self.assertRaises(kvferry.SessionError):
            client.ping(200)
        self.start()
        for _ in range(600):
            hit, = client.get([key(0)], budget_ms=1000)
            if hit.status == Status.OK:
                break
            select.select([], [], [], 0.1)
        self.assertEqual((hit.status, hit.tier), (Status.OK, "nvme"))
        self.assertEqual(bytes(hit.payload), block(0))
        self.assertNotEqual(client.info().incarnation, first)


    def test_the_process_ends_while_a_thread_is_in_a_call(self):
        """As an engine that ends by an exception, with the connector's threads at work."""
        for turn in range(3):
            done = subprocess.run([sys.executable, "-B", "-c", ENDS, PACKAGE, self.socket],
                                  capture_output=True, text=True, check=False)
            self.assertEqual((turn, done.returncode, done.stderr), (turn, 7, ""))


class PagedKv(Case):
    GEOMETRY = kvferry.Geometry(n_layers=3, n_heads=2, dim_k=64, dim_v=64, chunk_tokens=64)

    def layers(self, fill):
        made = [kv_layer(8, 16, 2, 64) for _ in range(3)]
        if fill:
            for number, (memory, _, _) in enumerate(made):
                values = bytes([0, 0x3f, 7, 0xbf, number, 0x40])
                memory[:] = (values * (len(memory) // 6 + 1))[:len(memory)]
        pages = kvferry.Pages.of([k for _, k, _ in made], [v for _, _, v in made])
        return [memory for memory, _, _ in made], pages

    def test_pages_go_out_and_come_back(self):
        client = self.client(geometry=self.GEOMETRY)
        source, source_pages = self.layers(fill=True)
        target, target_pages = self.layers(fill=False)
        item = kvferry.Put(key(0), pages=source_pages, page_ids=[5, 2, 7, 0])
        self.assertEqual(client.put([item]), [Status.OK])
        hit, = client.get([key(0)])
        client.decode(hit, target_pages, [1, 3, 4, 6])
        page = 16 * 2 * 2 * 64 * 2
        for out, back in zip(source, target):
            for a, b in zip([5, 2, 7, 0], [1, 3, 4, 6]):
                self.assertEqual(out[a * page:(a + 1) * page], back[b * page:(b + 1) * page])
            for b in (0, 2, 5, 7):
                self.assertEqual(back[b * page:(b + 1) * page], bytes(page))
        self.assertTrue(client.release(hit.lease))

    def test_last_tokens_only(self):
        client = self.client(geometry=self.GEOMETRY)
        source, source_pages = self.layers(fill=True)
        target, target_pages = self.layers(fill=False)
        client.put([kvferry.Put(key(1), pages=source_pages, page_ids=[0, 1, 2, 3])])
        hit, = client.get([key(1)])
        client.decode(hit, target_pages, [6, 7], token_first=32, n_tokens=32)
        page = 16 * 2 * 2 * 64 * 2
        for out, back in zip(source, target):
            self.assertEqual(out[2 * page:4 * page], back[6 * page:8 * page])
            self.assertEqual(back[:6 * page], bytes(6 * page))
        self.assertTrue(client.release(hit.lease))

    def test_strides_of_layers_differ(self):
        one, two = kv_layer(2, 16, 2, 64), kv_layer(2, 16, 4, 64)
        with self.assertRaises(ValueError):
            kvferry.Pages.of([one[1], two[1]])


class Asyncio(Case):
    def test_many_at_once(self):
        async def work():
            client = AsyncClient(self.client())
            keys = [key(i) for i in range(48)]
            puts = [client.put([kvferry.Put(k, data=block(i))]) for i, k in enumerate(keys)]
            statuses = await asyncio.gather(*puts)
            self.assertEqual(statuses, [[Status.OK]] * 48)
            found = await client.lookup(keys)
            self.assertEqual(found.ready_chunks, 48)
            hits = await client.get(keys + [key(99)])
            self.assertEqual(hits[-1].status, Status.MISS)
            for i, hit in enumerate(hits[:48]):
                self.assertEqual(bytes(hit.payload), block(i))
                self.assertTrue(client._client.release(hit.lease))
            client.close()
        asyncio.run(work())

    def test_nobody_waits_any_more(self):
        """What comes of requests whose tasks were canceled is given back."""
        async def work():
            own = self.client()
            client = AsyncClient(own)
            keys = [key(i) for i in range(8)]
            await client.put([kvferry.Put(k, data=block(i)) for i, k in enumerate(keys)])
            for cancel in own.cancel, lambda request: False:  # in time, and too late
                own.cancel = cancel
                for polls in range(3):
                    tasks = [asyncio.ensure_future(client.get(keys)),
                             asyncio.ensure_future(client.lookup(keys, lease=True))]
                    for _ in range(polls):
                        await asyncio.sleep(0)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    while client._waiting:
                        await asyncio.sleep(0.001)
                    left = [t.result() for t in tasks if not t.cancelled()]
                    self.assertEqual(left, [])
                    self.assertEqual(own.stat()["leased_bytes"], 0)
            client.close()
        asyncio.run(work())


def client_key(cluster_key, tenant):
    """What `kvferry client-key` prints, by docs/protocol.md."""
    hasher = hashlib.blake2b(digest_size=32, key=cluster_key)
    for field in (b"kvferry derive 1", b"remote client", tenant.encode()):
        hasher.update(len(field).to_bytes(8, "little") + field)
    return f"{tenant} {hasher.hexdigest()}\n"


@unittest.skipUnless(ctypes.util.find_library("ucp"), "no UCX here")
class OtherNode(Case):
    """A daemon on another node: the library opens UCX and libsodium by itself."""

    SETS = ()

    def start(self, *sets, **how):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        cluster = os.path.join(self.folder, "cluster.key")
        own = os.path.join(self.folder, "client.key")
        with open(cluster, "wb") as file:
            file.write(bytes(range(32)))
        with open(own, "w", encoding="ascii") as file:
            file.write(client_key(bytes(range(32)), "default"))
        os.environ["UCX_TLS"] = "tcp"
        self.address = f"tcp://127.0.0.1:{port}?key={own}"
        super().start(f"cluster_key={cluster}", f"peers.listen=127.0.0.1:{port}", *self.SETS,
                      *sets, **how)

    def test_put_and_get(self):
        self.socket = self.address
        client = self.client(namespace_label="far")
        items = [kvferry.Put(key(i), data=block(i)) for i in range(5)]
        self.assertEqual(client.put(items), [Status.OK] * 5)
        for number, hit in enumerate(client.get([key(i) for i in range(6)])):
            if number == 5:
                self.assertEqual(hit.status, Status.MISS)
                continue
            self.assertEqual(hit.status, Status.OK)
            self.assertEqual(bytes(hit.payload), block(number))
            self.assertTrue(client.release(hit.lease))


class PatientNode(OtherNode):
    """It waits for long for others, which do not wait so long for it."""

    SETS = ("peers.heartbeat=60s",)

    def test_client_that_is_idle(self):
        self.socket = self.address
        client = self.client()
        client.ping(WAIT_MS)
        time.sleep(6)  # a client gives up after 5
        client.ping(WAIT_MS)
        self.assertEqual(client.info().reconnects, 0)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
