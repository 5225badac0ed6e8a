#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector with a real daemon and a stand-in of vLLM (standin.py): who gets which pages.

usage: test_vllm.py KVFERRYD PACKAGE_FOLDER [unittest arguments]
"""
import dataclasses
import inspect
import json
import os
import signal
import sys
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = sys.argv[2]
sys.path[:0] = [HERE, PACKAGE]
TESTED = json.loads((Path(PACKAGE) / "kvferry/tested_versions.json").read_text())["vllm"][-1]

import standin  # noqa: E402

standin.install(TESTED)

from case import DIGEST, EngineCase as Case  # noqa: E402
from standin import Engine, FullAttentionSpec  # noqa: E402

import kvferry  # noqa: E402
import kvferry.vllm as connector  # noqa: E402
from kvferry import session  # noqa: E402
from kvferry.vllm import KvferryConnector, identity, worker  # noqa: E402
from kvferry.vllm import scheduler as scheduler_module  # noqa: E402

CHUNK, BLOCK = 64, Engine.BLOCK


class Hits(Case):
    def setUp(self):
        super().setUp()
        self.start()

    def test_whole_chunks_come_back(self):
        self.stored(200)
        engine = self.engine()
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 192)
        self.assertTrue(engine.holds(request, 0, 192 // BLOCK))
        self.assertFalse(engine.holds(request, 12, 13))
        engine.step({request: (192, 38)}, compute=[(request, 12, 14)])
        self.assertEqual(engine.finish(request), {"kvferry.hit_tokens": 192, "kvferry.tier": "dram",
                                                  "kvferry.profile": "exact"})
        self.assertEqual(engine.bad, set())

    def test_one_token_is_left_of_a_full_hit(self):
        engine = self.stored(192)
        request = self.request("again", 192)
        self.assertEqual(engine.load(request), 191)
        self.assertTrue(engine.holds(request, 0, 12))

    def test_local_hit_ends_inside_a_chunk(self):
        engine = self.stored(256)
        request = self.request("again", 300)
        engine.allocate(request)
        self.assertEqual(engine.load(request, computed=80), 256 - 80)
        self.assertTrue(engine.holds(request, 80 // BLOCK, 16))
        self.assertFalse(any(engine.holds(request, i, i + 1) for i in range(80 // BLOCK)))

    def test_longer_local_hit_needs_nothing(self):
        engine = self.stored(200)
        self.assertEqual(engine.ask(self.request("again", 230), computed=192)[0], 0)

    def test_other_prompt_is_a_miss(self):
        engine = self.stored(200)
        self.assertEqual(engine.load(self.request("other", 200, seed=1)), 0)
        self.assertEqual(engine.load(self.request("short", CHUNK - 1)), 0)

    def test_asked_often_nothing_changes(self):
        engine = self.stored(200)
        request = self.request("again", 230)
        for _ in range(20):
            self.assertEqual(engine.ask(request)[0], 192)
        engine.allocate(request, 192)
        engine.wait_load(request)
        engine.allocate(request)  # blocks for the rest: nothing is loaded a second time
        self.assertEqual(engine.step({}).loads, [])
        self.assertTrue(engine.holds(request, 0, 12))

    def test_blocks_are_known_without_a_hit(self):
        engine = self.engine()
        request = self.request("first", 200)
        self.assertEqual(engine.ask(request)[0], 0)
        engine.allocate(request)
        step = engine.step({request: (0, 200)}, compute=[(request, 0, 12)])
        table = engine.table["first"]
        self.assertEqual([c.pages for c in step.stores], [table[0:4], table[4:8], table[8:12]])
        self.assertEqual([c.depth for c in step.stores], [0, 1, 2])
        self.assertEqual([c.parent for c in step.stores],
                         [None] + [c.key for c in step.stores[:2]])

    def test_hit_is_kept_while_it_waits(self):
        engine = self.stored(200)
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        keys = [request.block_hashes[i] for i in (3, 7, 11)]
        facts = engine.scheduler._facts
        with kvferry.Client(self.socket, geometry=facts.geometry, namespace_label=facts.label,
                            weights_digest=bytes.fromhex(DIGEST), shard=kvferry.SHARD_NONE
                            ) as other:
            self.assertEqual(other.lookup(keys).run_chunks, 3)
        leased = engine.scheduler._scheduler._session.client().stat()["leased_bytes"]
        self.assertGreater(leased, 0)
        engine.finish(request)
        leased = engine.scheduler._scheduler._session.client().stat()["leased_bytes"]
        self.assertEqual(leased, 0)

    def test_lease_that_nobody_takes_up_is_given_back(self):
        engine = self.stored(200)
        self.addCleanup(setattr, scheduler_module, "LEASE_S", scheduler_module.LEASE_S)
        scheduler_module.LEASE_S = 0.0
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        time.sleep(0.01)
        engine.step({})
        client = engine.scheduler._scheduler._session.client()
        self.assertEqual(client.stat()["leased_bytes"], 0)
        self.assertEqual(engine.ask(request)[0], 192)

    def late(self, engine, request, computed, tails):
        """Look up with answers of whole chunks, or of tails, that come only in the next step."""
        engine.ask(self.request("to attach", 20, 9))
        client = engine.scheduler._scheduler._session.client()
        poll, submit = client.poll, client.submit_lookup

        def submit_late(keys, **options):
            if bool(options["n_tails"]) == tails:
                client.poll = lambda *_: []
            return submit(keys, **options)

        client.submit_lookup = submit_late
        answer = engine.scheduler.get_num_new_matched_tokens(request, computed)
        self.assertEqual(answer, (None, False))
        client.poll, client.submit_lookup = poll, submit
        seen = engine.scheduler._scheduler._requests[request.request_id]
        while seen.result is None:
            engine.step({})
        return seen

    def test_tail_that_comes_too_late(self):
        """It is no answer to what is asked later."""
        engine = self.stored(230)
        request = self.request("again", 230)
        seen = self.late(engine, request, 0, True)
        seen.started -= 1e6  # its budget is over
        self.assertEqual(engine.ask(request)[0], 192)
        self.assertIsNone(seen.result)
        engine.allocate(request, 192)
        engine.wait_load(request)
        self.assertEqual(self.leased(engine), 0)
        self.assertEqual(engine.load(request), 224)  # after a preemption
        self.assertTrue(engine.holds(request, 0, 14))

    def test_answer_that_nobody_waits_for_any_more(self):
        self.addCleanup(setattr, scheduler_module, "LEASE_S", scheduler_module.LEASE_S)
        for tails in False, True:
            engine = self.stored(230, seed=tails)
            seen = self.late(engine, self.request("again", 230, tails), 0, tails)
            self.assertGreater(self.leased(engine), 0)
            scheduler_module.LEASE_S = 0.0
            engine.step({})
            self.assertIsNone(seen.result)
            self.assertEqual(self.leased(engine), 0)
            scheduler_module.LEASE_S = 60.0

    def test_local_hit_shrinks_during_a_lookup(self):
        """What is promised has been looked up, from its beginning."""
        engine = self.engine()
        for tails in False, True:
            request = self.request(f"none of it {tails}", 230, 1)
            self.late(engine, request, 2 * CHUNK, tails)
            self.assertEqual(engine.ask(request)[0], 0)
        engine = self.stored(230)
        for tails in False, True:
            request = self.request(f"all of it {tails}", 230)
            self.late(engine, request, 2 * CHUNK, tails)
            self.assertEqual(engine.load(request), 224)
            self.assertTrue(engine.holds(request, 0, 14))
            engine.finish(request)

    def leased(self, engine):
        return engine.scheduler._scheduler._session.client().stat()["leased_bytes"]

    def test_another_connector_is_chosen(self):
        """MultiConnector: pages are told with nothing to load from here."""
        engine = self.stored(200)
        request = self.request("again", 400)
        self.assertEqual(engine.ask(request)[0], 192)
        engine.allocate(request)
        self.assertEqual(self.leased(engine), 0)
        step = engine.step({request: (300, 100)}, compute=[(request, 0, 25)])
        self.assertEqual(step.loads, [])
        self.assertEqual([(c.token_start, c.pages) for c in step.stores],
                         [(256, engine.table["again"][16:20]), (320, engine.table["again"][20:24]),
                          (384, engine.table["again"][24:25])])
        self.assertEqual(engine.finish(request)["kvferry.hit_tokens"], 0)

    def test_aborted_before_an_answer(self):
        engine = self.stored(200)
        request = self.request("gone", 230)
        scheduler = engine.scheduler._scheduler
        poll = scheduler._poll
        scheduler._poll = lambda *what: None  # as if the daemon took its time
        self.assertEqual(engine.scheduler.get_num_new_matched_tokens(request, 0), (None, False))
        engine.finish(request)
        scheduler._poll = poll
        end = time.monotonic() + 60
        while scheduler._lookups:
            self.assertLess(time.monotonic(), end)
            engine.step({})
        self.assertEqual(self.leased(engine), 0)

    def test_hits_are_counted_once(self):
        engine = self.stored(200)
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 192)
        engine.step({request: (192, 38)}, compute=[(request, 12, 14)])
        engine.settle()
        request.num_preemptions = 1
        engine.free = engine.table.pop("again") + engine.free
        self.assertEqual(engine.load(request), 224)  # and its tail, stored meanwhile
        self.assertEqual(engine.finish(request)["kvferry.hit_tokens"], 192)

    def test_requests_that_read_no_cache(self):
        engine = self.stored(200)
        skip = SimpleNamespace(skip_reading_prefix_cache=True)
        for i, more in enumerate(({"skip_reading_prefix_cache": True}, {"sampling_params": skip},
                                  {"kv_transfer_params": {"kvferry.load": False}},
                                  {"mm_features": ["an image"]}, {"prompt_embeds": "rows"})):
            self.assertEqual(engine.ask(self.request(f"again {i}", 230, **more))[0], 0, more)
        self.assertEqual(engine.ask(self.request("again", 230))[0], 192)


class Stores(Case):
    def setUp(self):
        super().setUp()
        self.start()

    def stores_of(self, engine, request, computed=0):
        engine.ask(request)
        engine.allocate(request)
        step = engine.step({request: (computed, request.num_tokens - computed)})
        return [c.token_start for c in step.stores]

    def test_what_a_request_asks_for(self):
        engine = self.engine()
        for params, starts in (({"kvferry.store": False}, []),
                               ({"max_offload_tokens": 70}, [0]),
                               ({"max_offload_tokens": 100}, [0, 64]),  # the last one is a tail
                               ({"max_offload_tokens": 0}, []), ({}, [0, 64, 128]),
                               ({"max_offload_tokens": "all"}, [0, 64, 128]),
                               ({"max_offload_tokens": 1 << 40}, [0, 64, 128])):
            request = self.request(f"r {params}", 200, seed=len(str(params)),
                                   kv_transfer_params=params)
            self.assertEqual(self.stores_of(engine, request), starts, params)
            engine.finish(request)
        self.assertEqual(sum("max_offload_tokens is" in line for line in self.warnings), 2)

    def test_requests_cannot_fill_the_log(self):
        engine = self.engine()
        for i in range(50):
            engine.ask(self.request(f"r {i}", 20, kv_transfer_params={
                "kvferry.budget_ms": "x" * i, f"kvferry.{i}": 1, "max_offload_tokens": -i - 1}))
        self.assertEqual(len(self.warnings), 3, self.warnings)

    def test_answers_are_stored_only_if_wanted(self):
        for seed, (store, starts) in enumerate((("prompt", [0]), ("all", [0, 64]), ("none", []))):
            engine = self.engine(store=store)
            request = self.request("r", 130, seed=seed, prompt=70)
            self.assertEqual(self.stores_of(engine, request), starts, store)
            engine.finish(request)

    def test_prompt_in_parts(self):
        engine = self.engine()
        request = self.request("r", 200)
        engine.ask(request)
        engine.allocate(request)
        starts = [[c.token_start for c in engine.step({request: (0, 70)}).stores]]
        for computed, n in ((70, 50), (120, 10), (130, 70)):
            step = engine.step(cached={request: (computed, n)})
            starts.append([c.token_start for c in step.stores])
        self.assertEqual(starts, [[0], [], [64], [128]])

    def test_what_was_loaded_is_not_stored_again(self):
        engine = self.stored(130)
        request = self.request("again", 200)
        self.assertEqual(engine.load(request), 128)
        self.assertEqual([c.token_start for c in engine.step({request: (128, 72)}).stores], [128])
        full = self.request("full", 128)
        self.assertEqual(engine.load(full), 127)
        self.assertEqual(engine.step({full: (127, 1)}).stores, [])

    def test_preempted_request_goes_on_where_it_was(self):
        engine = self.engine()
        request = self.request("r", 200)
        engine.ask(request)
        engine.allocate(request)
        engine.step({request: (0, 130)}, compute=[(request, 0, 8)])
        engine.settle()
        engine.free = engine.table.pop("r") + engine.free  # preempted: its pages are given away
        self.assertEqual(engine.load(request), 128)
        self.assertTrue(engine.holds(request, 0, 8))
        step = engine.step(cached={request: (128, 72)}, compute=[(request, 8, 12)])
        self.assertEqual([(c.token_start, c.pages) for c in step.stores],
                         [(128, engine.table["r"][8:12])])

    def test_full_staging_drops_stores(self):
        engine = self.stored(64)
        self.addCleanup(setattr, worker, "ROOM_S", worker.ROOM_S)
        worker.ROOM_S = 0.001
        self.daemon.send_signal(signal.SIGSTOP)  # nothing is taken out of staging
        try:
            for i in range(20):
                request = self.request(f"r {i}", 256, seed=1 + i)
                engine.allocate(request)
                engine.step({request: (0, 256)}, compute=[(request, 0, 16)])
                engine.finish(request)
        finally:
            self.daemon.send_signal(signal.SIGCONT)
        counters = engine.workers[0]._worker.counters
        self.assertGreater(counters.skipped, 0)
        self.assertGreater(counters.handed, 1)
        engine.settle()


class Tails(Case):
    """The end of a prompt that is no whole chunk, to the last of its pages that is full."""

    def setUp(self):
        super().setUp()
        self.start()

    def facts_of(self, step):
        return [(c.token_start, c.n_tokens, len(c.pages)) for c in step.stores]

    def test_tail_comes_back(self):
        engine = self.stored(230)
        request = self.request("same", 230)
        self.assertEqual(engine.load(request), 224)
        self.assertTrue(engine.holds(request, 0, 14))
        engine.finish(request)
        longer = self.request("longer", 400)
        self.assertEqual(engine.load(longer), 224)
        self.assertTrue(engine.holds(longer, 0, 14))
        shorter = self.request("shorter", 215)  # the tail has more than it: nothing of it is known
        self.assertEqual(engine.load(shorter), 192)

    def test_tail_alone(self):
        engine = self.stored(50)
        request = self.request("longer", 70)
        self.assertEqual(engine.load(request), 48)
        self.assertTrue(engine.holds(request, 0, 3))
        same = self.request("same", 48)
        self.assertEqual(engine.load(same), 47)
        self.assertTrue(engine.holds(same, 0, 3))

    def test_longest_of_some(self):
        engine = self.engine()
        for n, hit in ((80, 0), (110, 80)):
            request = self.request(f"r {n}", n)
            self.assertEqual(engine.load(request), hit)
            engine.prefill(request, hit)
            engine.finish(request)
        self.assertEqual(engine.load(self.request("again", 300)), 96)

    def test_stored_once_and_superseded(self):
        engine = self.engine()
        request = self.request("r", 230)
        engine.ask(request)
        engine.allocate(request)
        first = engine.step({request: (0, 230)}, compute=[(request, 0, 14)])
        self.assertEqual(self.facts_of(first), [(0, 0, 4), (64, 0, 4), (128, 0, 4), (192, 32, 2)])
        self.assertEqual(first.stores[3].parent, first.stores[2].key)
        self.assertIsNone(first.stores[3].supersedes)
        self.assertEqual(engine.step(cached={request: (230, 1)}).stores, [])
        engine.settle()
        engine.finish(request)
        longer = self.request("longer", 260)
        self.assertEqual(engine.load(longer), 224)
        step = engine.step({longer: (224, 36)}, compute=[(longer, 14, 16)])
        self.assertEqual(self.facts_of(step), [(192, 0, 4)])
        self.assertEqual(step.stores[0].supersedes, first.stores[3].key)
        engine.settle()
        engine.finish(longer)
        # the tail is gone, and what it was the beginning of is there instead
        self.assertEqual(engine.load(self.request("same", 230)), 192)
        self.assertEqual(engine.load(self.request("again", 300)), 256)

    def test_tail_on_the_drive(self):
        engine = self.stored(230)
        with kvferry.Client(self.socket) as other:
            other.put([kvferry.Put(b"behind the others", data=b"x")], durable=True)
        engine.close()  # while it maps the memory of a daemon that is gone, the next one has little
        self.kill()
        self.start()
        engine = self.engine()
        request = self.request("again", 300)
        self.assertEqual(engine.load(request), 224)
        self.assertTrue(engine.holds(request, 0, 14))

    def test_tails_are_not_wanted(self):
        engine = self.stored(230, tails=False)
        self.assertEqual(engine.load(self.request("again", 230)), 192)
        self.assertEqual(self.engine().load(self.request("others", 230)), 192)

    def test_tail_that_does_not_load(self):
        engine = self.stored(230)
        real = worker.Worker._load_one
        self.addCleanup(setattr, worker.Worker, "_load_one", real)

        def fails(worker_self, client, chunk, hit, wanted):
            return real(worker_self, client, chunk, hit, wanted and chunk.n_tokens == 64)

        worker.Worker._load_one = fails
        request = self.request("again", 230)
        engine.load(request)
        self.assertEqual(engine.bad, set(engine.table["again"][12:14]))
        self.assertEqual(engine.finish(request)["kvferry.hit_tokens"], 192)

    def test_all_ranks_have_it_or_none(self):
        engine = self.engine(tp=2)
        request = self.request("r", 110)
        engine.load(request)
        engine.prefill(request)
        engine.finish(request)
        self.assertEqual(engine.load(self.request("again", 200)), 96)
        other = self.request("torn", 110, seed=3)
        engine.load(other)
        engine.allocate(other)
        engine.workers[1]._worker._stores = False
        engine.step({other: (0, 110)}, compute=[(other, 0, 6)])
        engine.workers[1]._worker._stores = True
        engine.settle()
        engine.finish(other)
        self.assertEqual(engine.load(self.request("torn again", 200, seed=3)), 0)


class Failures(Case):
    def test_engine_starts_without_daemon(self):
        engine = self.engine()
        request = self.request("r", 200)
        self.assertEqual(engine.load(request), 0)
        engine.prefill(request)
        engine.finish(request)
        self.assertTrue(any("no daemon" in line for line in self.warnings))
        self.start()
        time.sleep(2 * session.RETRY_S)
        request = self.request("s", 200)
        self.assertEqual(engine.load(request), 0)
        engine.prefill(request)
        engine.finish(request)
        again = self.request("t", 200)
        self.assertEqual(engine.load(again), 192)
        self.assertTrue(engine.holds(again, 0, 12))

    def test_hash_is_not_asked_for_all_the_time(self):
        """It takes up to a fifth of a second of the scheduler's thread where a daemon is slow."""
        tried = []

        def opens(*_what, **_how):
            tried.append(time.monotonic())
            raise kvferry.SessionError(kvferry.Status.ERR_TIMEOUT)

        engine = self.engine()
        with mock.patch.object(connector, "Client", opens):
            engine.ask(self.request("without a daemon", 20))
            self.assertEqual(tried, [])
            self.start()
            time.sleep(2 * session.RETRY_S)
            began = time.monotonic()
            for i in range(50):
                engine.ask(self.request(f"r {i}", 20))
            self.assertGreater(len(tried), 0)
            self.assertLessEqual(len(tried), 1 + (time.monotonic() - began) / session.RETRY_S)
            gaps = [after - before for before, after in zip(tried, tried[1:])]
            self.assertEqual([gap for gap in gaps if gap < connector.RETRY_S], [])

    def test_poll_that_fails_in_a_step(self):
        self.start()
        engine = self.stored(200)
        client = engine.scheduler._scheduler._session.client()

        def poll(*_what):
            raise kvferry.KvferryError(kvferry.Status.ERR_INVALID, "kvf_poll")

        with mock.patch.object(client, "poll", poll):
            engine.step({})
        self.assertTrue(any("kvf_poll: invalid" in line for line in self.warnings))
        self.assertEqual(engine.load(self.request("again", 230)), 192)

    def test_daemon_comes_back_under_an_engine(self):
        self.start()
        engine = self.stored(200)
        with kvferry.Client(self.socket) as other:
            other.put([kvferry.Put(b"behind the others", data=b"x")], durable=True)
        self.kill()
        self.assertEqual(engine.load(self.request("meanwhile", 230)), 0)
        self.start()
        request, end = self.request("again", 230), time.monotonic() + 120
        while engine.ask(request)[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)  # attaching is tried now and then
        self.assertEqual(engine.load(request), 192)
        self.assertTrue(engine.holds(request, 0, 12))
        other = self.request("other", 200, seed=1)
        engine.prefill(other)
        self.assertEqual(engine.load(self.request("other again", 230, seed=1)), 192)

    def test_chunks_on_the_drive(self):
        self.start()
        engine = self.stored(200)
        with kvferry.Client(self.socket) as other:
            other.put([kvferry.Put(b"behind the others", data=b"x")], durable=True)
        self.kill()
        self.start()
        engine = self.engine()
        request = self.request("again", 230)
        self.assertEqual(engine.load(request), 192)
        self.assertTrue(engine.holds(request, 0, 12))
        sources = engine.scheduler.get_external_cache_hit_sources(request, 192)
        self.assertEqual([(s.name, n) for s, n in sources.items()], [("DISK", 192)])
        self.assertEqual(engine.finish(request)["kvferry.tier"], "nvme")

    def test_no_budget_is_the_shorter_run(self):
        self.start()
        self.stored(200)
        with kvferry.Client(self.socket) as other:
            other.put([kvferry.Put(b"behind the others", data=b"x")], durable=True)
        self.kill()
        self.start()
        engine = self.engine(lookup_budget_ms=0)
        hit, nones = engine.ask(self.request("again", 230))
        self.assertEqual(nones, 0)
        self.assertIn(hit, (0, 64, 128, 192))

    def test_daemon_dies_before_the_load(self):
        self.start()
        engine = self.stored(200)
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        self.kill()
        engine.allocate(request, 192)
        engine.wait_load(request)
        self.assertEqual(engine.bad, set(engine.table["again"][:12]))
        self.assertEqual(engine.ask(request), (0, 0))
        self.start()
        time.sleep(2 * session.RETRY_S)
        # the key that failed stays a miss for this request, and is stored again
        self.assertEqual(engine.ask(request)[0], 0)
        step = engine.step({request: (0, 230)}, compute=[(request, 0, 14)])
        self.assertEqual([c.token_start for c in step.stores], [0, 64, 128, 192])

    def test_abort_while_loading(self):
        self.start()
        engine = self.stored(200)
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        engine.allocate(request, 192)
        engine.step({})
        table = engine.table["again"]
        engine.scheduler.request_finished_all_groups(request, (table,))
        engine.wait_load(request)  # the report still comes: vLLM frees the pages then
        client = engine.scheduler._scheduler._session.client()
        self.assertEqual(client.stat()["leased_bytes"], 0)

    def test_flipped_byte_is_no_hit(self):
        self.start()
        engine = self.stored(200)
        with kvferry.Client(self.socket) as other:
            other.put([kvferry.Put(b"behind the others", data=b"x")], durable=True)
        self.kill()
        store = os.path.join(self.folder, "nvme.store")
        with open(store, "r+b") as file:
            data = bytearray(file.read())
            for at in range((1 << 20) + 5000, len(data), 8192):
                data[at] ^= 4
            file.seek(0)
            file.write(data)
        self.start()
        engine = self.engine()
        self.assertEqual(engine.load(self.request("again", 230)), 0)


class Ranks(Case):
    """Eight ranks: a chunk is there for all of them or for none."""

    N = 8

    def setUp(self):
        super().setUp()
        self.start()

    def rank_clients(self, engine):
        """A handle of each rank's."""
        for rank in range(self.N):
            facts = engine.workers[rank]._facts
            client = kvferry.Client(self.socket, geometry=facts.geometry, shard=rank,
                                    namespace_label=facts.label, shard_count=self.N,
                                    weights_digest=bytes.fromhex(DIGEST), staging_bytes=1 << 20)
            self.addCleanup(client.close)
            yield client

    def stored_at_ranks(self, engine, name, seed, without=None):
        """A chunk that all ranks have computed, and all but one of them stored."""
        request = self.request(name, 64, seed=seed)
        self.assertEqual(engine.load(request), 0)
        engine.allocate(request)
        for rank, worker_side in enumerate(engine.workers):
            worker_side._worker._stores = rank != without
        engine.step({request: (0, 64)}, compute=[(request, 0, 4)])
        engine.settle()
        engine.finish(request)
        return bytes(request.block_hashes[3])

    def torn_is_nowhere(self):
        """A put of one rank is lost."""
        engine = self.engine(tp=self.N)
        self.stored_at_ranks(engine, "whole", 0)
        self.stored_at_ranks(engine, "torn", 5, without=5)
        again = self.request("whole again", 70)
        self.assertEqual(engine.load(again), 64)
        self.assertTrue(engine.holds(again, 0, 4))
        self.assertEqual(engine.load(self.request("torn again", 70, seed=5)), 0)

    def test_all_ranks_or_none(self):
        self.torn_is_nowhere()

    def test_all_ranks_or_none_can_fail(self):
        """A connector that does not tell ranks apart."""
        facts = kvferry.vllm.engine_facts
        real = facts.read
        self.addCleanup(setattr, facts, "read", real)
        facts.read = lambda *what: dataclasses.replace(real(*what), shard=0, shard_count=1)
        with self.assertRaises(AssertionError):
            self.torn_is_nowhere()

    def test_evicted_by_one_rank(self):
        """What one rank drops is gone for all: before a lookup, and between it and the load."""
        engine = self.engine(tp=self.N)
        key = self.stored_at_ranks(engine, "first", 0)
        clients = list(self.rank_clients(engine))
        self.assertEqual([client.get([key])[0].status for client in clients],
                         [kvferry.Status.OK] * self.N)
        for client in clients:
            client.close()
        fifth = list(self.rank_clients(engine))[5]
        self.assertEqual(fifth.evict([key]), 1)
        self.assertEqual(engine.load(self.request("again", 70)), 0)
        self.assertEqual([client.get([key], 1)[0].status for client in self.rank_clients(engine)],
                         [kvferry.Status.MISS] * self.N)

    def test_evicted_before_the_load(self):
        engine = self.engine(tp=self.N)
        key = self.stored_at_ranks(engine, "first", 0)
        request = self.request("again", 70)
        self.assertEqual(engine.ask(request)[0], 64)
        engine.allocate(request, 64)
        next(self.rank_clients(engine)).evict([key])
        engine.wait_load(request)  # whatever has come of it, it ends on all ranks
        if not engine.bad:
            self.assertTrue(engine.holds(request, 0, 4))
        engine.finish(request)

    def test_one_rank_does_not_load(self):
        engine = self.engine(tp=self.N)
        self.stored_at_ranks(engine, "first", 0)
        engine.workers[3]._worker._load = lambda job, done: worker.fail(done, job.chunks)
        request = self.request("again", 70)
        self.assertEqual(engine.load(request), 64)
        self.assertEqual(engine.bad, set(engine.table["again"][:4]))
        self.assertEqual(engine.ask(request)[0], 0)  # and is a miss for it from now on
        self.assertEqual(engine.finish(request)["kvferry.hit_tokens"], 0)


class Identity(Case):
    def setUp(self):
        super().setUp()
        self.start("allow_uncalibrated=true")

    def test_other_weights_are_a_miss(self):
        self.stored(200)
        self.assertEqual(self.engine(weights_digest="22" * 32).load(self.request("r", 230)), 0)
        self.assertEqual(self.engine(namespace="other").load(self.request("r", 230)), 0)
        self.assertEqual(self.engine().load(self.request("r", 230)), 192)

    def swapped_weights(self):
        """Two models, one after the other in one folder."""
        model = Path(self.folder) / "model"
        model.mkdir(exist_ok=True)
        weights = model / "model.safetensors"
        weights.write_bytes(b"weights of one model")
        at = {"model": str(model)}

        def asks(name):
            engine = self.engine(changes=at, weights_digest="")
            request = self.request(name, 200)
            hit = engine.load(request)
            engine.prefill(request, hit)
            engine.finish(request)
            return hit

        self.assertEqual([asks("first"), asks("again")], [0, 192])
        weights.write_bytes(b"weights of another")
        self.assertEqual([asks("swapped"), asks("swapped again")], [0, 192])

    def test_weights_swapped_under_one_name(self):
        self.swapped_weights()

    def test_weights_swapped_can_fail(self):
        """A digest of the folder's name."""
        real = identity.folder_digest
        self.addCleanup(setattr, identity, "folder_digest", real)
        identity.folder_digest = lambda folder: str(folder).encode()[-32:].rjust(32)
        with self.assertRaises(AssertionError):
            self.swapped_weights()

    def test_folder_without_weights(self):
        engine = self.engine(changes={"model": str(Path(self.folder) / "none")}, weights_digest="")
        self.assertEqual(engine.load(self.request("r", 200)), 0)
        self.assertTrue(any("weights_digest" in line for line in self.warnings))

    def test_other_rotation_or_precision_under_the_same_weights(self):
        model = Path(self.folder) / "model"
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights")
        config = model / "config.json"

        def asks(factor, name="yarn", **changes):
            said = {"rope_parameters": {"rope_theta": 1e4, name: factor}, "dtype": "bfloat16"}
            config.write_text(json.dumps({**said, "transformers_version": str(time.time_ns())}))
            changes = {"model": str(model), **changes}
            engine = self.engine(changes=changes, weights_digest="")
            hit = engine.load(self.request("again", 230))
            if hit == 0:
                request = self.request("first", 200)
                engine.prefill(request)
            engine.close()
            return hit

        self.assertEqual([asks(4.0), asks(4.0), asks(8.0), asks(8.0)], [0, 192, 0, 192])
        for changes in ({"hf_overrides": {"rope_theta": 2e4}}, {"quantization": "fp8"}):
            self.assertEqual([asks(4.0, **changes) for _ in "ab"], [0, 192], changes)
        self.assertEqual(asks(4.0, max_model_len=8192), 192)
        long = [asks([1.0], "long_factor", max_model_len=n) for n in (4096, 8192, 8192)]
        self.assertEqual(long, [0, 0, 192])
        self.assertEqual([asks(4.0, hf_overrides=lambda config: config) for _ in "ab"], [0, 0])
        self.assertTrue(any("hf_overrides is a function" in line for line in self.warnings))

    def test_both_sides_come_to_one_name(self):
        """Models write into hf_config while they are loaded, in the workers only."""
        engine = self.engine()
        config, cache = engine.config(self.settings(), 1, {})
        labels = {engine.scheduler._facts.label}
        config.model_config.hf_text_config.rope_parameters = {"rope_type": "deepseek_yarn"}
        worker_side = KvferryConnector(config, sys.modules[standin.PREFIX].KVConnectorRole.WORKER,
                                       cache)
        self.assertEqual(labels, {worker_side._facts.label})

    def test_adapters(self):
        folder = Path(self.folder) / "adapter"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"one")
        engine = self.engine()

        def lora(name, n, number=1, **more):
            return self.request(name, n, lora_request=SimpleNamespace(
                lora_path=str(folder), lora_int_id=number, **more))

        first = lora("first", 200)
        self.assertEqual(engine.load(first), 0)
        engine.prefill(first)
        self.assertEqual(engine.load(lora("again", 230)), 192)
        self.assertEqual(engine.load(self.request("without", 230)), 0)
        (folder / "adapter_model.safetensors").write_bytes(b"two, under the same name")
        self.assertEqual(engine.load(lora("swapped", 230, 2)), 0)
        (folder / "adapter_model.safetensors").write_bytes(b"one")
        self.assertEqual(engine.load(lora("back", 230, 3)), 192)
        (folder / "adapter_config.json").write_text('{"lora_alpha": 32}')
        self.assertEqual(engine.load(lora("stronger", 230, 4)), 0)
        folder = Path("a/hub/name")
        nowhere = lora("nowhere", 230, 5)
        self.assertEqual(engine.load(nowhere), 0)
        self.assertEqual(engine.step({nowhere: (0, 230)}).stores, [])
        self.assertTrue(any("not on this machine" in line for line in self.warnings))

    def test_adapter_whose_files_change_under_the_engine(self):
        """vLLM goes on with what it has read: its KV is not the new files'."""
        folder = Path(self.folder) / "adapter"
        folder.mkdir()
        weights = folder / "adapter_model.safetensors"
        weights.write_bytes(b"old")

        def lora(name, n, **more):
            return self.request(name, n, lora_request=SimpleNamespace(
                lora_path=str(folder), lora_int_id=1, **more))

        old = self.engine()
        first = lora("first", 200)
        self.assertEqual(old.load(first), 0)
        old.prefill(first)
        weights.write_bytes(b"newer")
        for content in b"newer", b"old":  # which of them vLLM has nobody knows any more
            weights.write_bytes(content)
            request = lora(f"changed to {content}", 230)
            self.assertEqual(old.load(request), 0)
            self.assertEqual(old.step({request: (0, 230)}).stores, [])
        self.assertTrue(any("restart vLLM" in line for line in self.warnings))

        weights.write_bytes(b"old")
        between = self.engine()
        request = lora("exchanged between lookup and step", 230)
        self.assertEqual(between.load(request), 192)
        weights.write_bytes(b"newer")
        self.assertEqual(between.step({request: (192, 38)}).stores, [])
        weights.write_bytes(b"old")
        self.assertEqual(old.load(lora("loaded again", 230, load_inplace=True)), 192)
        weights.write_bytes(b"newer")
        self.assertEqual(self.engine().load(lora("another engine", 230)), 0)

    def test_other_hash_seed_is_said(self):
        self.stored(200)
        hashes = sys.modules["vllm.v1.core.kv_cache_utils"]
        self.addCleanup(setattr, hashes, "NONE_HASH", hashes.NONE_HASH)
        self.assertFalse(any("PYTHONHASHSEED" in line for line in self.warnings))
        hashes.NONE_HASH = bytes([1] * 32)
        self.engine().ask(self.request("r", 230))
        self.assertTrue(any("PYTHONHASHSEED" in line for line in self.warnings))

    def test_worker_under_another_profile_than_the_scheduler(self):
        """Handles attach in their own time: nothing is stored or loaded meanwhile."""
        engine = self.stored(200)
        scheduler = engine.scheduler._scheduler
        request = self.request("again", 230)
        self.assertEqual(engine.ask(request)[0], 192)
        scheduler._lossless = False
        engine.allocate(request, 192)
        engine.wait_load(request)
        self.assertEqual(engine.bad, set(engine.table["again"][:12]))
        counters = engine.workers[0]._worker.counters
        handed, other = counters.handed, self.request("other", 230, seed=1)
        engine.allocate(other)
        self.assertEqual(len(engine.step({other: (0, 230)}).stores), 3)
        self.assertEqual((counters.handed, counters.skipped), (handed, 3))

    def test_lossy_profile_of_a_daemon_that_comes_back(self):
        self.kill()
        self.start("allow_uncalibrated=false")
        engine = self.engine(profile="balanced", allow_uncalibrated=True)
        request = self.request("first", 200)
        engine.prefill(request)
        self.assertEqual(engine.load(self.request("again", 230)), 192)
        self.kill()
        self.start("allow_uncalibrated=true")
        scheduler, at = engine.scheduler._scheduler, engine.workers[0]._worker
        end, n = time.monotonic() + 120, 0
        while scheduler._session.is_open or at._store_session.is_open:
            self.assertLess(time.monotonic(), end)
            n += 1
            other = self.request(f"other {n}", 100, seed=n)
            self.assertEqual(engine.load(other), 0)
            engine.allocate(other)
            engine.step({other: (0, 100)}, compute=[(other, 0, 6)])
            engine.finish(other)
            time.sleep(0.001)
        self.assertEqual(at.counters.stored, 3)
        self.assertTrue(any("tokens cannot be told apart" in line for line in self.warnings))

    def test_lossy_profile_on_pages_of_the_cpu(self):
        engine = self.engine(profile="balanced", allow_uncalibrated=True)
        request = self.request("r", 200)
        self.assertEqual(engine.load(request), 0)
        engine.prefill(request)
        self.assertTrue(any("tokens cannot be told apart" in line for line in self.warnings),
                        self.warnings)
        self.assertEqual(engine.load(self.request("s", 230)), 0)


class SetUp(Case):
    def refused(self, kind, words, changes=None, **settings):
        with self.assertRaises(kind) as caught:
            self.engine(changes=changes, **settings)
        self.assertIn(words, str(caught.exception))

    def test_settings_that_make_no_sense(self):
        self.refused(ValueError, "'sockets' is not known", sockets="x")
        self.refused(ValueError, "load_budget_ms is '5'", load_budget_ms="5")
        self.refused(ValueError, "lookup_budget_ms is -1", lookup_budget_ms=-1)
        self.refused(ValueError, "load_budget_ms is 4294967296, not from 0 to 3600000",
                     load_budget_ms=1 << 32)
        self.refused(ValueError, "staging_bytes is 100000000000", staging_bytes=10 ** 11)
        self.refused(ValueError, "store is 'some'", store="some")
        self.refused(ValueError, "64 hexadecimal digits", weights_digest="xyz")
        self.refused(ValueError, "chunk_tokens is 40", chunk_tokens=40)
        self.refused(ValueError, "namespace is longer", namespace="n" * 64)
        self.refused(ValueError, 'set it to "recompute"', {"policy": "fail"})

    def test_untested_version(self):
        vllm = sys.modules["vllm"]
        self.addCleanup(setattr, vllm, "__version__", TESTED)
        vllm.__version__ = "0.99.0"
        self.refused(RuntimeError, '"allow_untested": true')
        self.engine(allow_untested=True)
        self.assertTrue(any("this is 0.99.0" in line for line in self.warnings))
        vllm.__version__ = TESTED + "+cpu"
        self.engine()

    def test_engines_that_are_not_served_run_on(self):
        groups = Engine.groups(Engine, "dense", "auto")
        window = SimpleNamespace(layer_names=["layers.0.attn"],
                                 kv_cache_spec=SimpleNamespace(block_size=16))
        padded = FullAttentionSpec(**{**vars(groups[0].kv_cache_spec), "page_size_padded": 1 << 20})
        for changes, words in (({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
                               ({"dcp": 2}, "decode_context_parallel_size is 2"),
                               ({"speculative_config": "draft"}, "speculative"),
                               ({"prefix": False}, "prefix caching is off"),
                               ({"groups": groups * 2}, "2 KV cache groups"),
                               ({"groups": [window]}, "layers have SimpleNamespace"),
                               ({"groups": [SimpleNamespace(layer_names=["layers.0.attn"],
                                                            kv_cache_spec=padded)]}, "padded")):
            self.warnings.clear()
            engine = self.engine(changes=changes)
            request = self.request("r", 200)
            self.assertEqual(engine.load(request), 0)
            engine.prefill(request)
            self.assertIsNone(engine.finish(request))
            said = [line for line in self.warnings if words in line]
            self.assertTrue(said, (words, self.warnings))

    def test_interface(self):
        """Every method that the connector has of the base class takes what that one takes."""
        methods = json.loads(Path(HERE, "vllm_interface.json").read_text())["methods"]
        for name in ("KVConnectorBase_V1", "SupportsHMA"):
            for method, facts in methods[name].items():
                ours = KvferryConnector.__dict__.get(method)
                if facts["abstract"]:
                    self.assertIsNotNone(ours, method)
                if ours is None or facts["kind"] != "method":
                    continue
                parameters = inspect.signature(ours).parameters.values()
                plain = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
                self.assertEqual(plain, facts["parameters"], method)
                self.assertEqual(any(p.kind == p.VAR_KEYWORD for p in parameters),
                                 facts["keywords"], method)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
