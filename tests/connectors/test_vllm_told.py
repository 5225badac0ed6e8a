#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What vLLM and the daemon get to know of the vLLM connector: statistics, events, time that hits
have saved, and chunks computed again beside what is stored of them.

usage: test_vllm_told.py KVFERRYD PACKAGE_FOLDER [unittest arguments]
"""
import json
import os
import sys
import time
import unittest
from pathlib import Path
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = sys.argv[2]
sys.path[:0] = [HERE, PACKAGE]
VERSIONS = Path(PACKAGE) / "kvferry/tested_versions.json"

import standin  # noqa: E402

standin.install(json.loads(VERSIONS.read_text())["vllm"][-1])

from case import EngineCase as Case  # noqa: E402
from node import metrics  # noqa: E402

import kvferry  # noqa: E402
from kvferry.vllm import KvferryConnector, events, rate, stats  # noqa: E402
from kvferry.vllm import scheduler as scheduler_module  # noqa: E402


class Told(Case):
    """What vLLM and the daemon get to know: statistics and events."""

    def setUp(self):
        super().setUp()
        self.start()

    def numbers(self, *connectors):
        made = KvferryConnector.build_kv_connector_stats()
        for connector in connectors:
            grown = connector.get_kv_connector_stats()
            if grown is not None:
                made = made.aggregate(grown)
        return made

    def test_statistics(self):
        engine = self.stored(230)
        both = (engine.scheduler, engine.workers[0])
        first = self.numbers(*both)
        self.assertEqual(first.data["stored"], 4)
        self.assertEqual(self.numbers(*both).data, {})
        self.assertTrue(self.numbers(*both).is_empty())
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 224)
        more = self.numbers(*both)
        self.assertEqual((more.data["loaded"], more.data["loads"], more.data["hit_tokens"]),
                         (4, 1, 224))
        self.assertIn("kvferry avg load (ms)", more.reduce())
        self.assertEqual(set(first.aggregate(more).data) - set(stats.TEXTS), set())

    def test_failed_loads_have_reasons(self):
        engine = self.stored(200)
        real = kvferry.Client.get
        self.addCleanup(setattr, kvferry.Client, "get", real)
        for status, name in (("TOO_SLOW", "failed_too_slow"), ("MISS", "failed_gone"),
                             ("ERR_CORRUPT", "failed_lost")):
            kvferry.Client.get = lambda client, keys, budget=0, s=status: [
                kvferry.client.Hit(kvferry.Status[s])] * len(keys)
            request = self.request(name, 230)
            engine.load(request)
            self.assertEqual(engine.workers[0].get_kv_connector_stats().data[name], 3)
            engine.finish(request)
        kvferry.Client.get = real
        self.assertEqual(engine.scheduler._scheduler.counters.loads_failed, 3)

    def test_budget_is_of_the_whole_load(self):
        n = 64 * 20
        engine = self.stored(n, load_budget_ms=200)
        engine.free = list(range(engine.PAGES))
        request = self.request("again", n + 1)
        real, budgets = kvferry.Client.get, []

        def get(client, keys, budget_ms=0):
            budgets.append(budget_ms)
            time.sleep(0.25)
            return real(client, keys, budget_ms)

        with mock.patch.object(kvferry.Client, "get", get):
            engine.load(request)
        self.assertEqual(budgets, [200])
        self.assertEqual(len(engine.bad), (20 - 16) * 4)

    def test_late_loads(self):
        engine = self.stored(200, load_budget_ms=1)
        request = self.request("again", 230)
        real = kvferry.Client.get

        def get(*arguments):
            hits = real(*arguments)
            time.sleep(0.01)
            return hits

        with mock.patch.object(kvferry.Client, "get", get):
            engine.load(request)
        self.assertEqual(engine.workers[0].get_kv_connector_stats().data["loads_late"], 1)

    def test_prometheus(self):
        made = {}

        class Counter:
            def __init__(self, name, documentation, labelnames):
                made[name], self.n = self, 0

            def labels(self, *values):
                return self

            def inc(self, value):
                self.n += value

        page = KvferryConnector.build_prom_metrics(None, {"counter": Counter}, ["engine"],
                                                   {0: ["0"]})
        page.observe({"stored": 3, "load_s": 0.5})
        self.assertEqual(made["vllm:kvferry_stored"].n, 3)
        self.assertEqual(made["vllm:kvferry_load_seconds"].n, 0.5)
        self.assertEqual(len(made), len(stats.TEXTS))

    def test_the_daemon_is_told(self):
        engine = self.stored(200)
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 192)
        engine.step({request: (192, 38)})
        engine.finish(request)
        request = self.request("fails", 230, seed=0)
        engine.workers[0]._worker._load_one = lambda *what: False
        engine.load(request)
        sessions = (engine.scheduler._scheduler._session, engine.workers[0]._worker._store_session)
        for side in sessions:
            side.client().ping(60_000)  # behind what was reported
        said = metrics(self.socket)
        engine_said = {name: said[f"kvferry_engine_prompt_tokens_{name}_total"]
                       for name in ("computed", "loaded", "cached")}
        self.assertEqual(engine_said, {"computed": 238, "loaded": 192, "cached": 0})

    def test_events(self):
        engine = self.engine(changes={"events": True}, tp=2)
        request = self.request("first", 230)
        engine.load(request)
        engine.prefill(request)
        engine.step({})
        told = list(engine.scheduler.take_events())
        self.assertEqual([type(e).__name__ for e in told], ["BlockStored"] * 4)
        hashes = request.block_hashes
        self.assertEqual([h for e in told for h in e.block_hashes], hashes)
        self.assertEqual([e.parent_block_hash for e in told],
                         [None, hashes[3], hashes[7], hashes[11]])
        self.assertEqual([t for e in told for t in e.token_ids], request.tokens[:224])
        self.assertEqual({(e.block_size, e.medium, e.group_idx) for e in told}, {(16, "CPU", 0)})
        self.assertEqual(list(engine.scheduler.take_events()), [])
        engine.finish(request)
        engine.scheduler._scheduler._session.client().evict([hashes[7]])
        self.assertEqual(engine.ask(self.request("again", 230))[0], 64)
        gone, = engine.scheduler.take_events()
        self.assertEqual((type(gone).__name__, gone.block_hashes), ("BlockRemoved", hashes[4:8]))

    def test_events_of_a_rank_that_has_not_stored(self):
        engine = self.engine(changes={"events": True}, tp=2)
        engine.workers[1]._worker._stores = False
        request = self.request("first", 230)
        engine.load(request)
        engine.allocate(request)
        engine.step({request: (0, 230)}, compute=[(request, 0, 14)])
        engine.settle()
        engine.step({})
        self.assertEqual(list(engine.scheduler.take_events()), [])

    def test_a_rank_that_stores_twice_is_one_rank(self):
        """EXISTS is an answer too: of one whose engine has computed a chunk again."""
        engine = self.engine(changes={"events": True}, tp=2)
        engine.workers[1]._worker._stores = False
        for name in ("first", "again"):
            request = self.request(name, 230)
            engine.allocate(request)
            engine.step({request: (0, 230)}, compute=[(request, 0, 14)])
            engine.settle()
            engine.step({})
        self.assertEqual(list(engine.scheduler.take_events()), [])
        engine.workers[1]._worker._stores = True
        request = self.request("all", 230)
        engine.prefill(request)
        engine.step({})
        self.assertEqual(len(list(engine.scheduler.take_events())), 4)

    def test_two_keys_of_one_hash(self):
        """An adapter that is loaded again under its name has hashes of the one before it."""
        ledger = events.Ledger(1)
        for key in (b"one", b"two"):
            ledger.begun(key, events.Chunk([b"hash"], None, [], 1, "adapter"))
        ledger.stored({b"one": 1, b"two": 1})
        self.assertEqual([change.is_stored for change in ledger.take()], [True, True])

    def test_what_is_told_has_a_bound(self):
        self.addCleanup(setattr, events, "TOLD_MAX", events.TOLD_MAX)
        events.TOLD_MAX = 2
        ledger = events.Ledger(1)
        for i in range(4):
            key = bytes([i])
            ledger.begun(key, events.Chunk([key], None, [], None, None))
            ledger.stored({key: 1})
        self.assertEqual([(c.is_stored, c.chunk.hashes[0][0]) for c in ledger.take()],
                         [(True, 0), (True, 1), (True, 2), (False, 0), (True, 3), (False, 1)])


class Clock:
    """Stands in for the module time."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Rate(unittest.TestCase):
    """Seconds a token of prefills, by a clock of the test's."""

    def setUp(self):
        self.clock = Clock()
        self.addCleanup(setattr, rate, "time", rate.time)
        rate.time = self.clock
        self.rate = rate.PrefillRate()

    def step(self, seconds, prompts, n_tokens=None, ours=0.0):
        """A step of so many seconds, after a pause."""
        self.clock.now += 7
        n_tokens = n_tokens or sum(end - first for first, end in prompts)
        number = self.rate.scheduled(prompts, n_tokens)
        self.clock.now += seconds
        self.rate.ended({number: ours} if number else {})
        return number

    def saved(self, first, end):
        self.rate.saved(first, end)
        return self.rate.take()

    def test_nothing_is_said_without_a_rate(self):
        self.assertEqual(self.saved(0, 512), 0)
        self.assertEqual(self.step(1, [(0, rate.STEP_TOKENS - 1)]), 0)
        self.assertEqual(self.saved(0, 512), 0)
        self.step(1.5, [(0, 500)], ours=0.5)
        self.assertAlmostEqual(self.rate.take(), 1024 / 500)  # what was saved before is told of
        self.assertEqual(self.rate.take(), 0)

    def test_fastest_of_the_last_steps(self):
        for seconds in (3, 2, 4):
            self.step(seconds, [(0, 1000)])
        self.assertAlmostEqual(self.saved(0, 1000), 2)
        for _ in range(rate.KEPT):
            self.step(5, [(0, 1000)])
        self.assertAlmostEqual(self.saved(0, 1000), 5)

    def test_steps_with_other_work_say_nothing(self):
        self.assertEqual(self.step(1, [(0, 900)], n_tokens=1001), 0)
        self.assertNotEqual(self.step(1, [(0, 900)], n_tokens=1000), 0)

    def test_depths(self):
        self.step(1, [(0, 1000)])
        self.step(3, [(5000, 6000)])
        self.assertEqual([rate.depth_of(at) for at in (0, 1023, 1024, 2047, 2048, 4095, 4096)],
                         [0, 0, 1, 1, 2, 2, 3])
        # 0..4095 by the rate of the first depth, as none is known of the next two
        self.assertAlmostEqual(self.saved(0, 5096), 4.096 + 3)
        self.assertAlmostEqual(self.saved(100_000, 101_000), 3)

    def test_a_deeper_rate_where_there_is_no_other(self):
        self.step(3, [(5000, 6000)])
        self.assertAlmostEqual(self.saved(0, 1000), 3)

    def test_steps_that_overlap(self):
        """The next step is scheduled before the last one's result has come."""
        first = self.rate.scheduled([(0, 1000)], 1000)
        self.clock.now += 1
        second = self.rate.scheduled([(1000, 2000)], 1000)
        self.clock.now += 1
        self.rate.ended({first: 0})
        self.clock.now += 4
        self.rate.ended({second: 0})
        self.assertAlmostEqual(self.saved(0, 2000), 2 * 1.024 + 4 * 0.976)

    def test_steps_that_never_end_are_forgotten(self):
        for _ in range(10 * rate.UNDER_WAY):
            number = self.rate.scheduled([(0, 1000)], 1000)
        self.assertLessEqual(len(self.rate._steps), rate.UNDER_WAY)
        self.rate.ended({number: 0, 1: 0})
        self.assertEqual(self.saved(0, 1000), 0)  # no time has passed: that is no rate


class SavedAndDrift(Case):
    """What hits have saved, and chunks computed again: on the daemon's page of metrics."""

    def setUp(self):
        super().setUp()
        self.start()
        self.addCleanup(setattr, rate, "STEP_TOKENS", rate.STEP_TOKENS)
        rate.STEP_TOKENS = 64

    def said(self, engine, name):
        engine.scheduler._scheduler._session.client().ping(60_000)  # behind what was reported
        return metrics(self.socket)[f"kvferry_engine_{name}_total"]

    def test_seconds_saved(self):
        engine = self.stored(200)
        self.assertEqual(self.said(engine, "saved_seconds"), 0)
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 192)
        saved = engine.scheduler._scheduler.counters.saved_s
        self.assertGreater(saved, 0)
        self.assertAlmostEqual(self.said(engine, "saved_seconds"), saved, delta=2e-6)
        self.assertEqual(engine.scheduler.get_kv_connector_stats().data["saved_s"], saved)

    def test_a_hit_before_a_rate_is_known(self):
        self.stored(200)
        engine = self.engine()
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 192)
        self.assertEqual(engine.scheduler._scheduler.counters.saved_s, 0)
        other = self.request("other", 200, seed=1)
        engine.prefill(other)
        self.assertGreater(engine.scheduler._scheduler.counters.saved_s, 0)

    def test_what_did_not_load_has_saved_nothing(self):
        engine = self.stored(200)
        engine.workers[0]._worker._load_one = lambda *what: False
        engine.load(self.request("again", 230))
        self.assertEqual(engine.scheduler._scheduler.counters.saved_s, 0)

    def again(self, engine, name, content):
        """A prompt that is stored, found, and computed all the same."""
        engine.content = lambda *what: engine.numbers(content(*what))
        request = self.request(name, 230)
        engine.ask(request)
        engine.prefill(request)
        engine.finish(request)
        for side in engine.workers:
            if side._drift is not None:
                self.assertTrue(side._drift._is_free.wait(60))

    def stored_once(self, again_s_least):
        """An engine that compares so seldom, with a prompt that is stored: it, and its content."""
        self.addCleanup(setattr, scheduler_module, "AGAIN_S_LEAST", scheduler_module.AGAIN_S_LEAST)
        scheduler_module.AGAIN_S_LEAST = again_s_least
        engine = self.engine()
        content = engine.content
        self.again(engine, "first", content)
        return engine, content

    def test_drift(self):
        engine, content = self.stored_once(3600.0)
        self.assertEqual(self.said(engine, "drift_chunks"), 0)
        self.again(engine, "same", content)
        self.assertEqual(self.said(engine, "drift_chunks"), 1)
        self.assertEqual(self.said(engine, "drift_error_ppm"), 0)
        self.again(engine, "soon", content)
        self.assertEqual(self.said(engine, "drift_chunks"), 1)  # one in an hour
        engine.scheduler._scheduler._next_again = 0.0
        self.again(engine, "other", lambda *what: content(*what)[::-1])
        self.assertEqual(self.said(engine, "drift_chunks"), 2)
        self.assertGreater(self.said(engine, "drift_error_ppm"), 10_000)
        self.assertEqual((engine.bad, self.warnings), (set(), []))

    def test_pages_are_the_engines_at_once(self):
        """What is compared is what the step has written, whatever comes after it."""
        engine = self.engine()
        content = engine.content
        self.again(engine, "first", content)
        drift = engine.workers[0]._drift
        held, real = [], drift._fetch

        def fetch(*what):
            addresses, wait, memory = real(*what)
            for array in engine.arrays[0]:
                array.memory[:] = bytes(len(array.memory))
            held.append(memory)
            return addresses, wait, memory

        drift._fetch = fetch
        self.again(engine, "same", content)
        self.assertEqual(len(held), 1)
        self.assertEqual(self.said(engine, "drift_chunks"), 1)
        self.assertEqual(self.said(engine, "drift_error_ppm"), 0)

    def test_a_copy_that_cannot_be_made_is_no_concern_of_the_engine(self):
        engine, content = self.stored_once(0.0)
        drift = engine.workers[0]._drift
        real = drift._fetch

        def refused(*_what):
            raise RuntimeError("no memory to pin")

        drift._fetch = refused
        self.again(engine, "none", content)
        self.assertEqual(self.said(engine, "drift_chunks"), 0)
        self.assertEqual(len([line for line in self.warnings if "no memory to pin" in line]), 1)
        drift._fetch = real
        engine.scheduler._scheduler._next_again = 0.0
        self.again(engine, "same", content)
        self.assertEqual(self.said(engine, "drift_chunks"), 1)

    def test_no_daemon_no_figure(self):
        engine = self.engine()
        content = engine.content
        self.again(engine, "first", content)
        request = self.request("again", 230)
        engine.ask(request)
        self.kill()
        engine.prefill(request)
        self.assertTrue(engine.workers[0]._drift._is_free.wait(60))
        engine.finish(request)
        self.assertEqual([line for line in self.warnings if "comparison" in line], [])

    def test_what_was_loaded_is_not_compared(self):
        engine = self.stored(256)
        request = self.request("again", 300)
        self.assertEqual(engine.load(request), 256)
        self.assertIsNone(engine.step({request: (256, 44)}, compute=[(request, 16, 18)]).again)

    def test_behind_loss_nothing_is_compared(self):
        engine = self.stored(200)
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        engine.allocate(request)
        ours = engine.scheduler._scheduler
        for tainted, expected in ((set(), {1, 2}), ({engine.table["again"][1]}, {None})):
            ours._taint._behind |= tainted
            compared = set()
            for _ in range(4):
                ours._next_again, ours._requests["again"].next_store = 0.0, None
                step = engine.step({request: (64, 166)}, compute=[(request, 4, 14)])
                compared.add(step.again and step.again.depth)
            self.assertEqual(compared, expected)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
