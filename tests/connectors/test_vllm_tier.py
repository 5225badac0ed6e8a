#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The secondary tier of vLLM with a real daemon and a stand-in of vLLM's tiering manager.

usage: test_vllm_tier.py KVFERRYD PACKAGE_FOLDER [unittest arguments]

The base class is made from tier_interface.json; the tests call in the order of vLLM's manager.
"""
import array
import enum
import hashlib
import inspect
import json
import mmap
import os
import signal
import sys
import time
import types
import unittest
from pathlib import Path
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = sys.argv[2]
sys.path[:0] = [HERE, os.path.join(HERE, "..", "support"), PACKAGE]
TESTED = json.loads((Path(PACKAGE) / "kvferry/tested_versions.json").read_text())["vllm"][-1]
FACTS = json.loads((Path(HERE) / "tier_interface.json").read_text())

from logged import SMALL, DaemonCase  # noqa: E402
from standin import _class  # noqa: E402


def install():
    """Put the stand-in where `import vllm` finds it."""
    methods = dict(FACTS["methods"]["SecondaryTierManager"])
    del methods["__init_subclass__"]
    base = _class("SecondaryTierManager", methods)

    def init(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.tier_type = tier_type
        self.block_size = primary_kv_view.strides[0]

    base.__init__ = init
    base.block_size_bytes = property(lambda self: self.block_size)
    results = enum.Enum("LookupResult", FACTS["fields"]["LookupResult"])

    class JobResult(SimpleNamespace):
        def __init__(self, job_id, success, successful_keys=None, transfer_time=None,
                     transfer_bytes=None):
            super().__init__(job_id=job_id, success=success, successful_keys=successful_keys,
                             transfer_time=transfer_time, transfer_bytes=transfer_bytes)

    class OffloadingConnector:
        """Makes what its configuration says, as vLLM's makes the tiers of its."""

        def __init__(self, vllm_config, role, kv_cache_config):
            self.engine = vllm_config.make()

    path = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector".split(".")
    for i in range(2, len(path)):
        sys.modules[".".join(path[:i])] = types.ModuleType(".".join(path[:i]))
    for name, what in (("vllm", {"__version__": TESTED}), ("vllm.v1", {}),
                       (".".join(path), {"OffloadingConnector": OffloadingConnector}),
                       ("vllm.v1.kv_offload", {}),
                       ("vllm.v1.kv_offload.base", {"LookupResult": results,
                                                    "RequestOffloadingContext": SimpleNamespace}),
                       ("vllm.v1.kv_offload.tiering", {}),
                       ("vllm.v1.kv_offload.tiering.base", {"JobResult": JobResult,
                                                            "SecondaryTierManager": base})):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(what)


install()

from kvferry import session, vllm_tier  # noqa: E402
from kvferry.vllm_tier import (KvferryOffloadingConnector, KvferryTier,  # noqa: E402
                               LookupResult)

session.CONNECT_TIMEOUT_MS = 60_000  # time for a busy machine
session.RETRY_S = 0.05
vllm_tier.TICK_S = 0.05
DIGEST = "11" * 32
ROWS, ROW_BYTES, CHUNK_TOKENS = 16, 8192, 64
WAIT_S = 120
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def key(number, seed=0, group=0):
    """An OffloadKey: a block's hash and the group."""
    return hashlib.sha256(f"{seed} {number}".encode()).digest() + group.to_bytes(4, "big")


def spec(model="none", **changes):
    """OffloadingSpec, as far as it is read."""
    groups = tuple(SimpleNamespace(group_id=group, tokens_per_block=16, layer_names=("a", "b"))
                   for group in range(2))
    config = SimpleNamespace(**{**dict(
        groups=groups, worker_kv_bytes_per_block=1024, replicated_layout=False,
        canonical_layout=False, kv_cache_layout="NHD",
        model=SimpleNamespace(name=str(model), dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=4),
        parallel=SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)),
        **changes})
    return SimpleNamespace(config=config)


class Context:
    """ReqContext: a request, with the place of each chunk of it."""

    def __init__(self, name, n=8, params=None, seed=0):
        self.req_id, self.kv_transfer_params = name, params
        self.places = {key(i, seed, group): (i + 1) * CHUNK_TOKENS
                       for i in range(n) for group in range(2)}

    def get_offload_key_position(self, of):
        return self.places.get(of)


class Engine:
    """A tier over rows of memory, and what vLLM's manager does with it."""

    def __init__(self, settings, made=None, row_bytes=ROW_BYTES):
        self.memory = mmap.mmap(-1, ROWS * row_bytes)
        view = memoryview(self.memory).cast("B", (ROWS, row_bytes))
        self.tier = KvferryTier(made or spec(), view, "KvferryTier", **settings)
        self.jobs = 0

    def row(self, number):
        return bytes(self.memory[number * ROW_BYTES:(number + 1) * ROW_BYTES])

    def fill(self, number, what):
        made = hashlib.shake_128(str(what).encode()).digest(ROW_BYTES)
        self.memory[number * ROW_BYTES:(number + 1) * ROW_BYTES] = made
        return made

    def job(self, submit, context, keys, rows):
        """Submit a job and wait for its result."""
        self.jobs += 1
        submit(SimpleNamespace(job_id=self.jobs, keys=keys, chunk_ids=array.array("i", rows),
                               req_context=context))
        end = time.monotonic() + WAIT_S
        while not (results := list(self.tier.get_finished_jobs())):
            assert time.monotonic() < end
            time.sleep(0.001)
        assert [result.job_id for result in results] == [self.jobs]
        return results[0]

    def store(self, context, keys, rows):
        return self.job(self.tier.submit_store, context, keys, rows)

    def load(self, context, keys, rows):
        return self.job(self.tier.submit_load, context, keys, rows)

    def look(self, context, keys):
        """Look keys up, step by step, until all are answered."""
        end = time.monotonic() + WAIT_S
        while RETRY in (results := [self.tier.lookup(one, context) for one in keys]):
            assert time.monotonic() < end
            self.tier.on_schedule_end(None)
            time.sleep(0.001)
        return results


class Case(DaemonCase):
    FOLDER = "kvferry-tier-"
    SMALL = (*SMALL, "clients.max=64")

    def setUp(self):
        super().setUp()
        self.namespace = hashlib.sha256(self.id().encode()).hexdigest()[:8]
        self.hear("vllm.kvferry")

    def start(self):
        self.daemon = self.start_daemon(sys.argv[1])

    def share(self):
        self.share_daemon(sys.argv[1])

    def engine(self, made=None, row_bytes=ROW_BYTES, **changes):
        settings = {"socket": self.socket, "weights_digest": DIGEST, "namespace": self.namespace,
                    "lookup_budget_ms": 60_000, "load_budget_ms": 60_000,
                    "store_budget_ms": 60_000, **changes}
        engine = Engine(settings, made, row_bytes)
        self.addCleanup(engine.tier.shutdown)
        return engine

    def stored(self, n=6, **changes):
        """An engine that has stored the first chunks of a prompt."""
        engine, context = self.engine(**changes), Context("first")
        self.rows = [engine.fill(i, (self.namespace, i)) for i in range(n)]
        result = engine.store(context, [key(i) for i in range(n)], range(n))
        self.assertTrue(result.success)
        engine.tier.on_request_finished(context)
        return engine


class Chunks(Case):
    def test_chunks_come_back_into_other_rows(self):
        self.share()
        self.stored()
        engine, context = self.engine(), Context("second")
        keys = [key(i) for i in range(8)]
        self.assertEqual(engine.tier.lookup(keys[0], context), RETRY)
        self.assertEqual(engine.look(context, keys), [HIT] * 6 + [MISS] * 2)
        result = engine.load(context, keys[:6], (9, 3, 15, 0, 7, 8))
        self.assertEqual((result.success, result.transfer_bytes), (True, 6 * ROW_BYTES))
        for number, row in enumerate((9, 3, 15, 0, 7, 8)):
            self.assertEqual(engine.row(row), self.rows[number])
        self.assertEqual(engine.row(1), bytes(ROW_BYTES))
        self.assertEqual(engine.tier._lookups._held, {})

    def test_a_chunk_that_does_not_load_is_a_miss_from_then_on(self):
        self.share()
        engine = self.stored()
        context = Context("second")
        keys = [key(i) for i in range(6)]
        self.assertEqual(engine.look(context, keys), [HIT] * 6)
        wrong = [*keys[:2], key(99), keys[2]]
        result = engine.load(context, wrong, (6, 7, 8, 9))
        self.assertFalse(result.success)
        self.assertEqual(result.successful_keys, tuple(keys[:2]))
        self.assertEqual(engine.look(context, keys), [HIT, HIT, MISS, HIT, HIT, HIT])
        self.assertEqual(engine.look(Context("third"), keys), [HIT] * 6)

    def test_of_a_chunk_computed_twice_the_first_stands(self):
        self.share()
        engine, context = self.stored(), Context("second")
        engine.fill(1, "other bits")
        self.assertTrue(engine.store(context, [key(0), key(1)], [0, 1]).success)
        self.assertTrue(engine.load(context, [key(1)], [9]).success)
        self.assertEqual(engine.row(9), self.rows[1])

    def test_chunks_behind_a_gap_are_found(self):
        """Windows are looked up from their end, and groups one after the other."""
        self.share()
        engine, context = self.engine(), Context("first")
        for row, one in enumerate((key(1), key(2), key(4), key(3, group=1))):
            engine.fill(row, one)
            self.assertTrue(engine.store(context, [one], [row]).success)
        keys = [key(4), key(3), key(2), key(1), key(3, group=1), key(4, group=1)]
        self.assertEqual(engine.look(Context("second"), keys), [HIT, MISS, HIT, HIT, HIT, MISS])

    def test_stores_follow_the_chain(self):
        self.share()
        engine, context = self.engine(), Context("first")
        job = SimpleNamespace(keys=[key(5), key(1, group=1), key(2), key(1)],
                              chunk_ids=array.array("i", (5, 11, 2, 1)), req_context=context)
        engine.tier.lookup(key(4), context)
        chain = engine.tier._requests["first"].chain
        self.assertEqual(engine.tier._plan(job, chain),
                         [[1, None, [key(1), key(2)], [1, 2]], [5, key(4), [key(5)], [5]],
                          [1, None, [key(1, group=1)], [11]]])

    def test_a_request_may_say_no(self):
        self.share()
        engine = self.stored()
        no = Context("no", params={"kvferry.load": False, "kvferry.store": False})
        self.assertEqual(engine.look(no, [key(0)]), [MISS])
        self.assertFalse(engine.store(no, [key(7)], [7]).success)
        self.assertEqual(engine.look(Context("yes"), [key(0), key(7)]), [HIT, MISS])

    def test_draining_waits_for_jobs(self):
        self.share()
        engine, context = self.engine(), Context("first")
        for number in range(8):
            engine.tier.submit_store(SimpleNamespace(
                job_id=number, keys=[key(number)], chunk_ids=array.array("i", [number]),
                req_context=context))
        engine.tier.drain_jobs()
        self.assertEqual([(result.job_id, result.success)
                          for result in engine.tier.get_finished_jobs()],
                         [(number, True) for number in range(8)])

    def test_what_is_of_another_model_is_not_found(self):
        self.share()
        self.stored()
        found = lambda *how, **more: self.engine(*how, **more).look(  # noqa: E731
            Context("other"), [key(0)])
        self.assertEqual(found(), [HIT])
        other = spec()
        other.config.groups[0].layer_names = ("a",)
        ranks = spec(parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1,
                                              dcp_size=1))
        for made in (other, ranks, spec(kv_cache_layout="HND"), spec(canonical_layout=True)):
            self.assertEqual(found(made), [MISS])
        self.assertEqual(found(weights_digest="22" * 32), [MISS])
        self.assertEqual(found(namespace="other"), [MISS])
        self.assertEqual(found(row_bytes=2 * ROW_BYTES), [MISS])

    def test_weights_are_known_by_their_files(self):
        self.share()
        model, adapter = Path(self.folder) / "model", Path(self.folder) / "adapter"
        for folder in (model, adapter):
            folder.mkdir()
            (folder / "a.safetensors").write_bytes(b"first")
        how = {"made": spec(model), "weights_digest": "", "more_weights": str(adapter)}
        self.stored(**how)
        found = lambda: self.engine(**how).look(Context("other"), [key(0)])  # noqa: E731
        self.assertEqual(found(), [HIT])
        (adapter / "a.safetensors").write_bytes(b"another")
        self.assertEqual(found(), [MISS])
        (adapter / "a.safetensors").write_bytes(b"first")
        for config in (model / "config.json", adapter / "adapter_config.json"):
            config.write_text('{"rope_theta": 5, "lora_alpha": 5}')
            self.assertEqual(found(), [MISS], config)
            config.unlink()
            self.assertEqual(found(), [HIT], config)
        (model / "a.safetensors").write_bytes(b"others")
        self.assertEqual(found(), [MISS])


class Daemons(Case):
    def test_the_daemon_comes_late_dies_and_comes_back(self):
        engine, context = self.engine(), Context("first")
        self.assertEqual(engine.look(context, [key(0)]), [MISS])
        self.assertFalse(engine.store(context, [key(0)], [0]).success)
        self.start()
        time.sleep(2 * session.RETRY_S)
        row = engine.fill(0, "what")
        self.assertTrue(engine.store(context, [key(0)], [0]).success)
        self.assertEqual(engine.look(Context("second"), [key(0)]), [HIT])
        self.daemon.kill()
        self.daemon.wait()
        self.assertFalse(engine.load(context, [key(0)], [1]).success)
        self.assertEqual(engine.look(Context("third"), [key(0)]), [MISS])
        self.start()
        again = Context("again", seed=1)
        self.until(lambda: engine.store(again, [key(0, 1)], [0]).success)
        self.until(lambda: engine.look(Context(str(time.monotonic())), [key(0, 1)]) == [HIT])
        self.until(lambda: engine.load(again, [key(0, 1)], [2]).success)
        self.assertEqual(engine.row(2), row)

    def test_handles_that_rest_notice_that_the_daemon_has_gone(self):
        self.start()
        there, tick = {}, vllm_tier.tick

        def watch(client):
            """On the thread that the handle belongs to."""
            tick(client)
            there[id(client)] = client is not None and client.info().connected

        self.addCleanup(setattr, vllm_tier, "tick", tick)
        vllm_tier.tick = watch
        engine, context = self.engine(), Context("first")
        self.assertTrue(engine.store(context, [key(0)], [0]).success)
        self.assertTrue(engine.load(context, [key(0)], [1]).success)
        self.assertEqual(engine.look(context, [key(0)]), [HIT])
        self.until(lambda: sum(there.values()) == 2)
        self.daemon.kill()
        self.daemon.wait()
        self.until(lambda: not any(there.values()))
        lookups = engine.tier._lookups

        def looks():
            with lookups._lock:
                return lookups._session.client().info().connected

        self.until(lambda: not looks())

    def until(self, call):
        """Call until a handle has attached again."""
        end = time.monotonic() + WAIT_S
        while not call():
            self.assertLess(time.monotonic(), end)

    def test_a_daemon_that_stands_still_costs_the_budgets(self):
        self.start()
        engine = self.engine(lookup_budget_ms=50, load_budget_ms=100, store_budget_ms=100)
        context = Context("first")
        engine.store(context, [key(0)], [0])
        engine.load(context, [key(0)], [1])
        engine.look(context, [key(0)])
        os.kill(self.daemon.pid, signal.SIGSTOP)
        try:
            self.assertEqual(engine.look(Context("second"), [key(1), key(2)]), [MISS, MISS])
            self.assertFalse(engine.load(context, [key(0)], [1]).success)
            self.assertFalse(engine.store(context, [key(3)], [3]).success)
        finally:
            os.kill(self.daemon.pid, signal.SIGCONT)


class Refused(Case):
    """No daemon is needed to say no."""

    def test_engines_that_are_not_served(self):
        for how, said in (({"weights_digest": ""}, "none is no local folder with weights"),
                          ({"more_weights": "nowhere"}, "nowhere is no local folder"),
                          ({"row_bytes": 64 << 20}, "lower blocks_per_chunk")):
            with self.subTest(said=said):
                engine = self.engine(**how)
                self.assertEqual(engine.look(Context("first"), [key(0)]), [MISS])
                self.assertFalse(engine.store(Context("first"), [key(0)], [0]).success)
                self.assertFalse(engine.load(Context("first"), [key(0)], [0]).success)
                engine.tier.drain_jobs()
                self.assertIn(said, self.warnings[-1])

    def seen(self, made=None, speculative_config=None, lora_config=None, model=None, **more):
        """An engine whose configuration the tier can see."""
        model = SimpleNamespace(**{**dict(
            model="none", hf_overrides={}, dtype="torch.bfloat16", quantization=None,
            max_model_len=1024), **(model or {})})
        config = SimpleNamespace(
            model_config=model, speculative_config=speculative_config, lora_config=lora_config,
            make=lambda: self.engine(made, **{"namespace": "", **more}))
        return KvferryOffloadingConnector(config, None, None).engine

    def test_an_engine_that_cannot_be_seen(self):
        """What it overrides would be found by engines that do not."""
        self.share()
        engine = self.engine(namespace="")
        self.assertEqual(engine.look(Context("first"), [key(0)]), [MISS])
        self.assertIn("name KvferryOffloadingConnector", self.warnings[-1])
        self.assertFalse(engine.store(Context("first"), [key(0)], [0]).success)
        self.warnings.clear()
        self.seen()
        self.engine()  # has a namespace
        self.assertEqual(self.warnings, [])

    def test_what_is_overridden_is_another_model(self):
        self.share()
        digest = {"weights_digest": hashlib.sha256(self.id().encode()).hexdigest()}
        engine = self.seen(**digest)
        engine.fill(0, "row")
        self.assertTrue(engine.store(Context("first"), [key(0)], [0]).success)
        found = lambda **how: self.seen(**digest, **how).look(  # noqa: E731
            Context("other"), [key(0)])
        self.assertEqual(found(), [HIT])
        for model in ({"hf_overrides": {"rope_theta": 5}}, {"quantization": "fp8"},
                      {"dtype": "torch.float16"}, {"revision": "other"}):
            self.assertEqual(found(model=model), [MISS], model)
        self.assertEqual(found(model={"hf_overrides": lambda config: config}), [MISS])
        self.assertIn("hf_overrides is a function", self.warnings[-1])

    def test_draft_models_and_adapters(self):
        self.share()
        draft = Path(self.folder) / "draft"
        draft.mkdir()
        (draft / "a.safetensors").write_bytes(b"first")
        how = {"weights_digest": hashlib.sha256(self.id().encode()).hexdigest(),
               "speculative_config": SimpleNamespace(
                   draft_model_config=SimpleNamespace(model=str(draft)))}
        engine = self.seen(**how)
        engine.fill(0, "row")
        self.assertTrue(engine.store(Context("first"), [key(0)], [0]).success)
        found = lambda: self.seen(**how).look(Context("other"), [key(0)])  # noqa: E731
        self.assertEqual(found(), [HIT])
        (draft / "a.safetensors").write_bytes(b"other")
        self.assertEqual(found(), [MISS])
        how["speculative_config"].draft_model_config.model = "a name"
        self.assertEqual(found(), [MISS])
        self.assertIn("a name is no local folder with weights that can be read; list in "
                      "more_weights", self.warnings[-1])
        how["more_weights"] = str(draft)
        self.warnings.clear()
        self.assertEqual(found(), [MISS])
        self.assertEqual(self.warnings, [])
        del how["more_weights"], how["speculative_config"]
        self.seen(lora_config=SimpleNamespace(), **how)
        self.assertIn("list the adapters' folders in more_weights", self.warnings[-1])

    def test_settings_that_make_no_sense(self):
        for changes, said in (({"sockets": ""}, "'sockets' is not known"),
                              ({"load_budget_ms": "1"}, "not of type int"),
                              ({"weights_digest": "12"}, "not 64 hexadecimal digits"),
                              ({"namespace": "n" * 40}, "namespace is longer than 28 bytes")):
            with self.subTest(said=said), self.assertRaisesRegex(ValueError, said):
                self.engine(**changes)

    def test_versions(self):
        sys.modules["vllm"].__version__ = "0.0.1"
        try:
            with self.assertRaisesRegex(RuntimeError, "in secondary_tiers"):
                self.engine()
            self.engine(allow_untested=True)
            self.assertIn(f"tested with vllm {TESTED}", self.warnings[-1])
        finally:
            sys.modules["vllm"].__version__ = TESTED

    def test_methods_fit_the_interface(self):
        for name, facts in FACTS["methods"]["SecondaryTierManager"].items():
            own = KvferryTier.__dict__.get(name)
            if own is None:
                self.assertFalse(facts["abstract"], name)
            elif name != "__init__":
                self.assertEqual([*inspect.signature(own).parameters], facts["parameters"], name)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
