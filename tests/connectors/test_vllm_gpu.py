#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector's GPU side: pages on the fake CUDA driver, which runs what is queued in any
order that streams and events allow. A wait that is missing shows as wrong bytes.

usage: test_vllm_gpu.py KVFERRYD PACKAGE_FOLDER [unittest arguments]
       with KVFERRY_CUDA_DRIVER and KVFERRY_LIBRARY_DIR
"""
import ctypes
import gc
import hashlib
import json
import os
import random
import sys
import time
import types
import unittest
import weakref
from pathlib import Path
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = sys.argv[2]
sys.path[:0] = [HERE, PACKAGE]
VERSIONS = Path(PACKAGE) / "kvferry/tested_versions.json"

import standin  # noqa: E402

standin.install(json.loads(VERSIONS.read_text())["vllm"][-1])

from case import DIGEST  # noqa: E402
from node import metrics  # noqa: E402
from standin_gpu import BLOCK, CUDA, Case, GpuEngine  # noqa: E402

import kvferry  # noqa: E402
from kvferry.vllm import scheduler as scheduler_module  # noqa: E402
from kvferry.vllm import taint, worker, worker_gpu  # noqa: E402
from kvferry.vllm.scheduler import Scheduler  # noqa: E402
from kvferry._abi import ffi  # noqa: E402
from kvferry.gpu import GpuEvent  # noqa: E402
from kvferry.vllm.jobs import StoreChunk  # noqa: E402
from kvferry.vllm.worker_gpu import GpuWorker  # noqa: E402

class Gpu(Case):
    def test_pages_are_free_at_once(self):
        """What is queued behind a store does not show in it."""
        engine = self.engine()
        for seed in range(4):
            self.store(engine, 256, seed)
        engine.settle()
        for seed in range(4):
            request = self.request(f"again {seed}", 300, seed)
            self.assertEqual(engine.load(request), 256)
            self.assertTrue(engine.holds(request, 0, 16), seed)
            engine.finish(request)
        self.assertEqual((engine.bad, self.warnings), (set(), []))

    def test_load_waits_for_what_reads_its_pages(self):
        """Pages that are still to be stored are given to a load: both are right."""
        engine = self.engine()
        self.store(engine, 192, 1)
        engine.settle()
        for turn in range(4):
            engine.free.sort()  # so that the load gets the pages of what is stored before it
            first = self.request(f"out {turn}", 192, 10 + turn)
            self.assertEqual(engine.load(first), 0)
            engine.allocate(first)
            pages = set(engine.table[first.request_id])
            CUDA.fake_cuda_hold(True)
            engine.step({first: (0, 192)}, compute=[(first, 0, 12)])
            engine.finish(first)
            back = self.request(f"back {turn}", 200, 1)
            self.assertEqual(engine.ask(back)[0], 192)
            engine.allocate(back, 192)
            engine.step({})
            CUDA.fake_cuda_hold(False)
            engine.wait_load(back)
            self.assertTrue(pages & set(engine.table[back.request_id][:12]))
            self.assertTrue(engine.holds(back, 0, 12), turn)
            engine.finish(back)
            engine.settle()
            again = self.request(f"again {turn}", 200, 10 + turn)
            self.assertEqual(engine.load(again), 192)
            self.assertTrue(engine.holds(again, 0, 12), turn)
            engine.finish(again)

    def test_local_hit_ends_inside_a_chunk(self):
        engine = self.engine()
        self.store(engine, 256)
        engine.settle()
        request = self.request("again", 300)
        engine.allocate(request)
        for page in engine.table["again"]:
            engine.write(page, lambda rank, layer: bytes(engine.arrays[0][0].strides[0]))
        self.assertEqual(engine.load(request, computed=80), 256 - 80)
        self.assertTrue(engine.holds(request, 5, 16))
        self.assertFalse(any(engine.holds(request, i, i + 1) for i in range(5)))

    def test_long_prompt_goes_in_parts(self):
        n = 64 * 20
        engine = self.engine()
        self.store(engine, n)
        engine.settle()
        engine.free = list(range(engine.PAGES))
        request = self.request("again", n)
        self.assertEqual(engine.load(request), n - 1)
        self.assertTrue(engine.holds(request, 0, n // BLOCK))

    def test_stores_end_before_the_engine(self):
        """What has been taken is stored, though no step comes after it."""
        engine = self.engine()
        self.store(engine, 256)
        engine.close()
        self.assertEqual(self.engine().ask(self.request("again", 300))[0], 256)

    def test_daemon_dies_before_the_load(self):
        engine = self.engine()
        self.store(engine)
        engine.settle()
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        self.kill()
        engine.allocate(request, 192)
        engine.wait_load(request)
        self.assertEqual(engine.bad, set(engine.table["again"][:12]))
        self.assertEqual(engine.ask(request)[0], 0)

    def test_budget_that_no_call_takes(self):
        """A request cannot stop the engine by what it asks for."""
        engine = self.engine()
        self.store(engine)
        engine.settle()
        request = self.request("again", 230, kv_transfer_params={"kvferry.budget_ms": 1 << 32})
        self.assertEqual(engine.load(request), 192)
        self.assertIn("not from 0 to 3600000", self.warnings[0])
        engine.finish(request)
        request = self.request("0 is the least", 230, kv_transfer_params={"kvferry.budget_ms": 0})
        self.assertEqual(engine.ask(request)[0], 192)
        engine.allocate(request, 192)
        self.assertEqual(engine.scheduler._scheduler._loads[0].budget_ms, 1)
        engine.wait_load(request)

    def test_call_that_cannot_be_made(self):
        engine = self.engine()
        self.store(engine)
        engine.settle()
        request = self.request("again", 230)
        with mock.patch.object(kvferry.gpu.Gpu, "get", side_effect=OverflowError("no number")):
            self.assertEqual(engine.load(request), 192)
        self.assertEqual(engine.bad, set(engine.table["again"][:12]))
        self.assertIn("no number", self.warnings[0])

    def test_engine_that_nobody_closes(self):
        """All of it is collected in one cycle, in any order: what closes the GPU's handle keeps its
        client until then."""
        gpu = self.engine().workers[0]._worker._gpu
        _, _, kept, _ = gpu._finalizer.peek()
        self.assertIs(kept[-1], gpu._client)
        engine = GpuEngine(self.settings(), self.device)
        self.store(engine)
        ended = weakref.ref(engine.workers[0]._worker._gpu)
        del engine
        gc.collect()
        self.assertIsNone(ended())

    def test_lossy_profile(self):
        engine = self.engine(profile="balanced", allow_uncalibrated=True)
        self.store(engine)
        engine.settle()
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 192)
        self.assertEqual(engine.finish(request)["kvferry.profile"], "balanced")
        self.assertEqual(engine.bad, set())


class Ring:
    """A GPU handle with room for one chunk, in a time of its own, of which a poll takes some."""

    POLL_S, ROOM_S = 0.05, 0.02

    def __init__(self, encoded_at=10, stored_at=10, block_at=0):
        # polls behind the put
        self.encoded_at, self.stored_at, self.block_at = encoded_at, stored_at, block_at
        self.now, self.request, self.polls = 0.0, 0, None

    def put(self, items, **_):
        if self.polls is not None:
            raise kvferry.BusyError(kvferry.Status["ERR_BUSY"], "put")
        self.request, self.polls = self.request + 1, 0
        return self.request, 1

    def poll(self, timeout_ms=0):
        self.now += self.POLL_S
        self.polls = None if self.polls is None else self.polls + 1
        kinds = ["block"] if self.polls == self.block_at else []
        kinds += ["pages-free"] if self.polls == self.encoded_at else []
        if self.polls == self.stored_at:
            kinds += ["block", "request"]
            self.polls = None
        return [GpuEvent(self.request, 0, kind, "", kvferry.Status["OK"], 0) for kind in kinds]

    def close(self):
        pass


class Room(unittest.TestCase):
    """A step has more chunks than the ring has room for."""

    def store(self, ring, n=3):
        """Counts of chunks that have been handed over and left out."""
        client = types.SimpleNamespace(report=lambda *what: None)
        session = types.SimpleNamespace(client=lambda: client, close=lambda: None)
        device = types.SimpleNamespace(free_bytes=lambda: 1 << 30, stream=lambda: 1)
        clock = types.SimpleNamespace(monotonic=lambda: ring.now)
        with mock.patch.multiple(worker_gpu, Gpu=lambda *what, **how: ring, time=clock,
                                 agrees=lambda *what: True), \
                mock.patch.object(worker, "ROOM_S", ring.ROOM_S):
            side = GpuWorker(None, 1, lambda: session, True, device, self.fail)
            ring.now = 0.0
            side.store([StoreChunk(bytes([i]), bytes([i - 1]) if i else None, i, 64 * i, [i])
                        for i in range(n)], True)
            side.close()
        return side.counters.handed, side.counters.skipped

    def test_gpu_runs_the_step_later(self):
        """Nothing leaves the ring before, which is longer than what is waited for the daemon."""
        self.assertEqual(self.store(Ring()), (3, 0))

    def test_gpu_does_not_run_it(self):
        ring = Ring(encoded_at=1000, stored_at=1000)
        self.assertEqual(self.store(ring), (1, 2))
        self.assertLess(ring.now, 3 * worker_gpu.STEP_S)

    def test_daemon_takes_nothing(self):
        ring = Ring(encoded_at=1, stored_at=1000)
        self.assertEqual(self.store(ring), (1, 2))
        self.assertLess(ring.now, 10 * ring.POLL_S)

    def test_a_block_is_not_the_whole_step(self):
        """Of several bursts the first is stored while the GPU has yet to run the others."""
        self.assertEqual(self.store(Ring(block_at=1)), (3, 0))

    def test_close_waits_for_what_was_taken(self):
        ring = Ring()
        self.assertEqual(self.store(ring, 1), (1, 0))
        self.assertIsNone(ring.polls)


class SetUp(Case):
    def opened(self, free_bytes, step_bytes, ring_bytes=0, errors=(), poll=lambda *what: []):
        """Rings that were asked for, when it is tried twice at once and once again later."""
        asked, errors = [], list(errors)

        def opens(*_what, ring_bytes, **_how):
            asked.append(ring_bytes)
            if errors:
                raise kvferry.KvferryError(kvferry.Status[errors.pop(0)], "kvf_gpu_open")
            return types.SimpleNamespace(poll=poll, close=lambda: None)

        session = types.SimpleNamespace(client=lambda: types.SimpleNamespace(), close=lambda: None)
        device = types.SimpleNamespace(free_bytes=lambda: free_bytes)
        clock = types.SimpleNamespace(now=1.0)
        clock.monotonic = lambda: clock.now
        self.said = []
        with mock.patch.multiple(worker_gpu, Gpu=opens, time=clock):
            side = GpuWorker(None, 1, lambda: session, True, device, self.said.append, step_bytes,
                             ring_bytes)
            side.idle()
            side._handle()
            clock.now += worker_gpu.AGAIN_S
            side._handle()
            side.close()
        return asked

    def test_ring(self):
        """Room for two steps, at most a share of what is free; else what the library takes."""
        gib = 1 << 30
        self.assertEqual(self.opened(20 * gib, gib), [5 * gib // 2])
        self.assertEqual(self.opened(10 * gib, gib), [2 * gib])
        self.assertEqual(self.opened(gib, gib), [0])
        self.assertEqual(self.opened(20 * gib, 1 << 20), [0])
        self.assertEqual(self.opened(20 * gib, gib, 3 * gib), [3 * gib])

    def test_gpu_that_fails_at_once(self):
        def poll(*_what):
            raise kvferry.KvferryError(kvferry.Status["ERR_IO"], "kvf_gpu_poll")

        self.assertEqual(self.opened(0, 1, poll=poll), [0])
        self.assertIn("not served from here on", self.said[0])

    def test_no_memory_for_it(self):
        """It is tried again, later; what cannot change is not."""
        self.assertEqual(self.opened(0, 1, 8, ["ERR_NO_MEMORY"]), [8, 8])
        self.assertIn("gpu_ring_bytes", self.said[0])
        self.assertEqual(self.opened(0, 1, 8, ["ERR_UNSUPPORTED"]), [8])

    def test_ring_without_room_for_a_chunk(self):
        """The engine goes on without; what is enough is said."""
        engine = self.engine(gpu_ring_bytes=1)
        self.assertRegex(self.warnings[0], "ring_bytes is 1, a block takes [0-9]+")
        self.assertIn("the GPU is not served", self.warnings[1])
        self.store(engine)
        self.assertEqual(engine.ask(self.request("again", 230))[0], 0)

    def test_default_stream(self):
        """Its number in torch is no stream to the driver: nothing would be queued behind it."""
        seen = []

        def kvf_gpu_put(*arguments):
            seen.append(int(ffi.cast("uintptr_t", arguments[6])))
            return 0

        gpu = object.__new__(kvferry.gpu.Gpu)
        gpu._c, gpu._region = ffi.NULL, 0
        gpu._lib = types.SimpleNamespace(kvf_gpu_put=kvf_gpu_put)
        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace()
        with mock.patch.dict(sys.modules, torch=torch):
            device = worker_gpu.TorchDevice()
        for number in (0, 4096):
            torch.cuda.current_stream = lambda number=number: types.SimpleNamespace(
                cuda_stream=number)
            gpu.put([], stream=device.stream())
        gpu.put([])
        self.assertEqual(seen, [1, 4096, 0])

    def test_expandable_segments(self):
        self.addCleanup(os.environ.pop, "PYTORCH_ALLOC_CONF", None)
        for value, warns in (("expandable_segments:False", False),
                             ("backend:native,expandable_segments:True", True)):
            os.environ["PYTORCH_ALLOC_CONF"] = value
            self.engine()
            self.assertEqual(any("unset it" in line for line in self.warnings), warns, value)


class Drift(Case):
    def again(self, engine, name, content):
        """A prompt that is stored, found, and computed all the same; its pages are given to others
        in the same moment."""
        engine.content = lambda *what: engine.numbers(content(*what))
        request = self.request(name, 230)
        engine.ask(request)
        engine.allocate(request)
        engine.step({request: (0, 230)}, compute=[(request, 0, 14)])
        for page in engine.table[name]:
            engine.write(page, lambda rank, layer: bytes(engine.arrays[0][0].strides[0]))
        engine.settle()
        engine.finish(request)
        self.assertTrue(engine.workers[0]._drift._is_free.wait(60))
        engine.scheduler._scheduler._session.client().ping(60_000)
        said = metrics(self.socket)
        return [said[f"kvferry_engine_drift_{what}_total"] for what in ("chunks", "error_ppm")]

    def test_pages_are_copied_behind_the_step(self):
        self.addCleanup(setattr, scheduler_module, "AGAIN_S_LEAST", scheduler_module.AGAIN_S_LEAST)
        scheduler_module.AGAIN_S_LEAST = 0.0
        engine = self.engine()
        content = engine.content
        self.assertEqual(self.again(engine, "first", content), [0, 0])
        for turn in range(1, 4):
            self.assertEqual(self.again(engine, f"same {turn}", content), [turn, 0])
        chunks, ppm = self.again(engine, "other", lambda *what: content(*what)[::-1])
        self.assertEqual(chunks, 4)
        self.assertGreater(ppm, 10_000)
        self.assertEqual((engine.bad, self.warnings), (set(), []))


class ChainedEngine(GpuEngine):
    """What it computes follows from the bytes of the page before, as a model's KV does from what
    attention reads: what is wrong in a page shows in all behind it."""

    def page_before(self, request, block):
        self.device.wait()
        self.held.clear()
        if block == 0:
            return b""
        return bytes(self.arrays[0][0].page(self.table[request.request_id][block - 1]))

    def compute(self, request, first, end):
        for block in range(first, end):
            before = hashlib.sha256(self.page_before(request, block)).digest()
            tokens = repr(request.tokens[block * BLOCK:(block + 1) * BLOCK]).encode()
            # small numbers of bf16: a codec changes them a little, and makes no NaN of them
            noise = random.Random(before + tokens)
            self.write(self.table[request.request_id][block], lambda rank, layer: b"".join(
                bytes((noise.randrange(256), 0x3E)) for _ in range(self.HEADS * self.DIM * BLOCK *
                                                                   2)))


class Tainted(Case):
    """Bytes stored under `exact` are those of a run that has never loaded anything."""

    N = 256

    def chained(self, **changes):
        engine = ChainedEngine(self.settings(**changes), self.device)
        self.addCleanup(engine.close)
        return engine

    def turn(self, engine, name, n, computed=None):
        """A request from beginning to end: what it loaded."""
        request = self.request(name, n)
        hit = engine.load(request) if computed is None else 0
        begin = computed if computed is not None else hit
        engine.allocate(request)
        engine.step({request: (begin, n - begin)}, compute=[(request, begin // BLOCK, n // BLOCK)])
        engine.settle()
        return request, hit

    def stored(self, engine, request):
        """Payloads of all chunks of a request in the namespace of an engine that is `exact`."""
        facts = engine.scheduler._facts
        with kvferry.Client(self.socket, geometry=facts.geometry, namespace_label=facts.label,
                            weights_digest=bytes.fromhex(DIGEST)) as client:
            keys = [request.block_hashes[i] for i in range(3, self.N // BLOCK, 4)]
            hits = client.get(keys, 1)
            return [bytes(hit.payload) if hit.status == 0 else None for hit in hits]

    def cold_run(self):
        cold = self.chained(namespace="cold")
        request, hit = self.turn(cold, "cold", self.N)
        self.assertEqual(hit, 0)
        made = self.stored(cold, request)
        self.assertEqual([part is None for part in made], [False] * 4)
        return made

    def test_two_engines(self):
        """A loads with loss; B shares its prefix under `exact`."""
        cold = self.cold_run()
        first = self.chained(profile="balanced", allow_uncalibrated=True)
        self.assertEqual(self.turn(first, "a", 130)[1], 0)
        again = self.chained(profile="balanced", allow_uncalibrated=True)
        self.assertEqual(self.turn(again, "a again", self.N)[1], 128)
        exact = self.chained()
        request, hit = self.turn(exact, "b", self.N)
        self.assertEqual(hit, 0)
        self.assertEqual(self.stored(exact, request), cold)

    def change_of_profile(self, follows=True):
        """An engine that has loaded with loss, and keeps its pages while a daemon comes back that
        takes it under `exact` only. What it has stored there, beside a cold run's. follows: the
        scheduler has seen that before the step in which it is to be seen."""
        first = self.chained(profile="balanced", allow_uncalibrated=True)
        self.turn(first, "a", 130)
        again = self.chained(profile="balanced", allow_uncalibrated=True)
        request, hit = self.turn(again, "a again", 130)
        self.assertEqual(hit, 128)
        self.kill()
        self.start("allow_uncalibrated=false")
        end = time.monotonic() + 120
        while follows and again.scheduler._scheduler._profile != "exact":
            self.assertLess(time.monotonic(), end)
            again.ask(self.request("meanwhile", 70, seed=9))
        again.workers[0]._worker._session.client().ping(60_000)
        longer = self.request("longer", self.N)
        again.table["longer"] = again.table.pop(request.request_id)  # vLLM's own cache has them
        if follows:
            again.ask(longer, 128)
        again.allocate(longer)
        again.step({longer: (128, self.N - 128)}, compute=[(longer, 8, self.N // BLOCK)])
        again.settle()
        return again, longer

    def test_profile_changes_under_an_engine(self):
        again, longer = self.change_of_profile()
        self.assertEqual(self.stored(again, longer), [None] * 4)
        self.assertGreater(again.scheduler._scheduler.counters.stores_tainted, 0)
        cold = self.cold_run()
        exact = self.chained()
        request, hit = self.turn(exact, "b", self.N)
        self.assertEqual(hit, 0)
        self.assertEqual(self.stored(exact, request), cold)

    def test_worker_attaches_before_the_scheduler(self):
        """The step is decided for the profile that has been in force."""
        connected = Scheduler.connected
        self.addCleanup(setattr, Scheduler, "connected", connected)
        Scheduler.connected = lambda scheduler, profile, lossless: (
            None if lossless else connected(scheduler, profile, lossless))
        again, longer = self.change_of_profile(follows=False)
        self.assertEqual(self.stored(again, longer), [None] * 4)
        self.assertGreater(again.workers[0]._worker.counters.skipped, 0)

    def test_scheduler_attaches_in_a_step(self):
        """What the step stores is decided behind that."""
        poll = Scheduler._poll
        self.addCleanup(setattr, Scheduler, "_poll", poll)

        def attached(scheduler, client, *how):
            client.ping(60_000)
            poll(scheduler, client, *how)

        Scheduler._poll = attached
        again, longer = self.change_of_profile(follows=False)
        self.assertEqual(self.stored(again, longer), [None] * 4)
        self.assertGreater(again.scheduler._scheduler.counters.stores_tainted, 0)

    def test_worker_loads_nothing_of_the_other_kind(self):
        self.turn(self.chained(profile="balanced", allow_uncalibrated=True), "a", 130)
        again = self.chained(profile="balanced", allow_uncalibrated=True)
        request = self.request("again", 130)
        self.assertEqual(again.ask(request)[0], 128)
        again.scheduler._scheduler._lossless = True  # as it would be noted
        again.allocate(request, 128)
        again.wait_load(request)
        self.assertEqual(again.bad, set(again.table["again"][:8]))

    def test_profile_changes_can_fail(self):
        """Without the memory of which pages were loaded with loss, other bytes are stored."""
        self.addCleanup(setattr, taint.Taint, "forbids", taint.Taint.forbids)
        taint.Taint.forbids = lambda *what: False
        again, longer = self.change_of_profile()
        made = self.stored(again, longer)
        self.assertIsNotNone(made[3])
        self.assertNotEqual(made[3], self.cold_run()[3])


class Unplugged(Case):
    """After the others: the fake device does not come back."""

    def test_device_fails(self):
        engine = self.engine()
        self.store(engine)
        engine.settle()
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        engine.allocate(request, 192)
        CUDA.fake_cuda_hold(True)
        engine.step({})
        CUDA.fake_cuda_fail_after(ctypes.c_uint64(0))
        CUDA.fake_cuda_hold(False)
        engine.wait_load(request)
        self.assertEqual(engine.bad, set(engine.table["again"][:12]))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
