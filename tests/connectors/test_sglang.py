#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The HiCache backend with a real daemon and a stand-in of SGLang (standin_sglang.py).

usage: test_sglang.py KVFERRYD PACKAGE_FOLDER [unittest arguments]
"""
import hashlib
import inspect
import json
import os
import signal
import sys
import time
import unittest
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = sys.argv[2]
sys.path[:0] = [HERE, os.path.join(HERE, "..", "support"), PACKAGE]
TESTED = json.loads((Path(PACKAGE) / "kvferry/tested_versions.json").read_text())["sglang"][-1]

import standin_sglang as sg  # noqa: E402

sg.install(TESTED)

from logged import SMALL, DaemonCase  # noqa: E402
from standin_sglang import MambaPoolHost, MHATokenToKVPoolHost, MLATokenToKVPoolHost  # noqa: E402

import kvferry  # noqa: E402
from kvferry import hostio, session  # noqa: E402
from kvferry import sglang as backends  # noqa: E402
from kvferry.sglang import KvferryStorage  # noqa: E402

session.CONNECT_TIMEOUT_MS = 60_000  # time for a busy machine
session.RETRY_S = 0.05
backends.TICK_S = 0.05
DIGEST = "11" * 32


def keys(n, seed=0):
    return [hashlib.sha256(f"{seed} {i}".encode()).hexdigest() for i in range(n)]


class Case(DaemonCase):
    FOLDER = "kvferry-sglang-"
    SMALL = (*SMALL, "clients.max=64")

    def setUp(self):
        super().setUp()
        self.namespace = hashlib.sha256(self.id().encode()).hexdigest()[:8]
        self.hear("sglang.kvferry")
        sg.install.args = sg.server_args()

    def start(self):
        self.daemon = self.start_daemon(sys.argv[1])

    def share(self):
        self.share_daemon(sys.argv[1])

    def extra(self, **changes):
        """--hicache-storage-backend-extra-config, with time for a busy machine."""
        return {"backend_name": "kvferry", "module_path": "kvferry.sglang",
                "class_name": "KvferryStorage", "interface_v1": 1, "socket": self.socket,
                "weights_digest": DIGEST, "lookup_budget_ms": 60_000, "load_budget_ms": 60_000,
                "store_budget_ms": 60_000, "namespace": self.namespace, **changes}

    def backend(self, pool=None, facts=None, **changes):
        """A rank's backend, attached to a pool of KV."""
        made = KvferryStorage(sg.config(self.extra(**changes), **(facts or {})), {})
        self.addCleanup(made.close)
        if pool is not None:
            made.register_mem_pool_host(pool)
        return made

    def stored(self, pool=None, n=6, **how):
        """A backend whose pool has stored n pages."""
        pool = pool or MHATokenToKVPoolHost()
        backend = self.backend(pool, **how)
        for page in range(n):
            pool.fill(page, page)
        self.assertEqual(backend.batch_set_v1(keys(n), pool.slots(*range(n))), [True] * n)
        return backend, pool


class Pages(Case):
    def test_pages_come_back_into_other_slots_and_layouts(self):
        self.share()
        for first, second, cls, facts in (
                ("layer_first", "page_first", MHATokenToKVPoolHost, {}),
                ("page_first_direct", "page_head", MHATokenToKVPoolHost, {}),
                ("page_first", "layer_first", MLATokenToKVPoolHost, {"is_mla_model": True})):
            with self.subTest(layout=first):
                _, pool = self.stored(cls(first), facts=facts)
                other = cls(second)
                backend = self.backend(other, facts)
                self.assertEqual(backend.batch_exists(keys(9)), 6)
                self.assertEqual(backend.batch_exists(keys(9, seed=1)), 0)
                got = backend.batch_get_v1(keys(7), other.slots(11, 3, 4, 5, 9, 0, 1))
                self.assertEqual(got, [True] * 6 + [False])
                for page, slot in enumerate((11, 3, 4, 5, 9, 0)):
                    self.assertEqual(other.page(slot), pool.page(page))
                self.assertNotEqual(other.page(2), pool.page(2))

    def test_of_a_page_computed_twice_the_first_stands(self):
        self.share()
        backend, pool = self.stored()
        first = pool.page(1)
        pool.fill(1, "other bits")
        self.assertEqual(backend.batch_set_v1(keys(2), pool.slots(0, 1)), [True, True])
        self.assertEqual(backend.batch_get_v1(keys(2), pool.slots(7, 8)), [True, True])
        self.assertEqual(pool.page(8), first)

    def test_slots_that_are_no_pages_are_refused(self):
        self.share()
        backend, pool = self.stored()
        odd = pool.slots(1)
        odd[0:] = [slot + 1 for slot in odd]
        self.assertEqual(backend.batch_get_v1(keys(1), odd), [False])
        self.assertEqual(backend.batch_set_v1(keys(2), pool.slots(1)), [False, False])
        self.assertEqual(len(self.warnings), 2)

    def test_a_hit_is_what_all_ranks_have(self):
        self.share()
        pools = [MHATokenToKVPoolHost() for _ in range(4)]
        ranks = [self.backend(pool, {"tp_rank": rank, "tp_size": 4})
                 for rank, pool in enumerate(pools)]
        for rank, (backend, pool) in enumerate(zip(ranks, pools)):
            for page in range(6):
                pool.fill(page, (rank, page))
            n = 4 if rank == 2 else 6
            backend.batch_set_v1(keys(n), pool.slots(*range(n)))
        self.assertEqual([backend.batch_exists(keys(6)) for backend in ranks], [4] * 4)
        for rank, (backend, pool) in enumerate(zip(ranks, pools)):
            self.assertEqual(backend.batch_get_v1(keys(4), pool.slots(6, 7, 8, 9)), [True] * 4)
            self.assertEqual([pool.page(6 + i) for i in range(4)],
                             [pool.page(i) for i in range(4)])
        alone = self.backend(MHATokenToKVPoolHost())
        self.assertEqual(alone.batch_exists(keys(6)), 0)

    def test_what_is_found_is_leased_until_it_is_fetched(self):
        self.share()
        backend, pool = self.stored()
        lookups = backend._pools["kv"].lookups

        def leased():
            with lookups._lock:
                return lookups._session.client().stat()["leased_bytes"]

        self.assertEqual(backend.batch_exists(keys(6)), 6)
        self.assertGreater(leased(), 0)
        backend.batch_get_v1(keys(6), pool.slots(6, 7, 8, 9, 10, 11))
        self.assertEqual(leased(), 0)
        kept, hostio.LEASE_S = hostio.LEASE_S, 0.01
        self.addCleanup(setattr, hostio, "LEASE_S", kept)
        self.assertEqual(backend.batch_exists(keys(6)), 6)
        end = time.monotonic() + 60
        while lookups._held:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)


class Names(Case):
    def test_what_is_of_another_model_is_not_found(self):
        self.share()
        self.stored()
        for changes in ({"weights_digest": "22" * 32}, {"namespace": "other"}):
            self.assertEqual(self.backend(MHATokenToKVPoolHost(), **changes)
                             .batch_exists(keys(6)), 0, changes)
        for pool in (MHATokenToKVPoolHost(dtype=sg.F16), MHATokenToKVPoolHost(heads=1),
                     MHATokenToKVPoolHost(page_size=32), MLATokenToKVPoolHost()):
            self.assertEqual(self.backend(pool).batch_exists(keys(6)), 0)
        for changes in ({"kv_cache_dtype": "fp8_e5m2"}, {"quantization": "fp8"},
                        {"json_model_override_args": '{"rope_scaling": 2}'}):
            sg.install.args = sg.server_args(**changes)
            self.assertEqual(self.backend(MHATokenToKVPoolHost()).batch_exists(keys(6)), 0, changes)
        sg.install.args = sg.server_args()
        self.assertEqual(self.backend(MHATokenToKVPoolHost()).batch_exists(keys(6)), 6)

    def test_weights_and_adapters_are_known_by_their_files(self):
        self.share()
        model, adapter = Path(self.folder) / "model", Path(self.folder) / "adapter"
        for folder in (model, adapter):
            folder.mkdir()
            (folder / "a.safetensors").write_bytes(b"first")
        sg.install.args = sg.server_args(model_path=str(model), lora_paths=[f"one={adapter}"])
        self.stored(weights_digest="")
        found = lambda: self.backend(MHATokenToKVPoolHost(),  # noqa: E731
                                     weights_digest="").batch_exists(keys(6))
        self.assertEqual(found(), 6)
        (adapter / "a.safetensors").write_bytes(b"another")
        self.assertEqual(found(), 0)
        (adapter / "a.safetensors").write_bytes(b"first")
        self.assertEqual(found(), 6)
        for config in (model / "config.json", adapter / "adapter_config.json"):
            config.write_text('{"rope_theta": 5, "lora_alpha": 5}')
            self.assertEqual(found(), 0, config)
            config.unlink()
            self.assertEqual(found(), 6, config)
        (model / "a.safetensors").write_bytes(b"others")
        self.assertEqual(found(), 0)

    def test_length_where_the_rotation_follows_from_it(self):
        self.share()
        for overrides, hits in (("{}", 6), ('{"rope_scaling": {"long_factor": [1]}}', 0)):
            args = {"json_model_override_args": overrides}
            sg.install.args = sg.server_args(**args)
            self.stored()
            sg.install.args = sg.server_args(context_length=8192, **args)
            self.assertEqual(self.backend(MHATokenToKVPoolHost()).batch_exists(keys(6)), hits)

    def test_quantized_kv_is_kept_as_it_is(self):
        self.share()
        backend, pool = self.stored(MHATokenToKVPoolHost(dtype=sg.F8))
        self.assertEqual(backend.batch_get_v1(keys(2), pool.slots(10, 11)), [True, True])
        self.assertEqual(pool.page(11), pool.page(1))


class SidePools(Case):
    """Interface v2."""

    def hybrid(self):
        kv, window, state = MHATokenToKVPoolHost(), MHATokenToKVPoolHost(layers=1), MambaPoolHost()
        backend = self.backend(kv)
        for name, pool in (("kv", kv), ("swa", window), ("mamba", state)):
            backend.register_mem_host_pool_v2(pool, sg.PoolName(name))
        return backend, kv, window, state

    def test_a_hit_ends_where_a_state_is(self):
        self.share()
        backend, kv, window, state = self.hybrid()
        for page in range(6):
            kv.fill(page, page)
            window.fill(page, (page, "window"))
        state.states[2] = os.urandom(state.BYTES)
        backend.batch_set_v1(keys(6), kv.slots(*range(6)))
        wanted = [sg.transfer("swa", keys(4)[2:], None, "TRAILING_PAGES"),
                  sg.transfer("mamba", keys(4)[3:], None, "TRAILING_PAGES")]
        found = backend.batch_exists_v2(keys(6), wanted)
        self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (0, []))
        put = backend.batch_set_v2([sg.transfer("swa", keys(4)[2:], window.slots(2, 3)),
                                    sg.transfer("mamba", keys(4)[3:], state.slots(2))])
        self.assertEqual(put, {"swa": [True, True], "mamba": [True]})
        found = backend.batch_exists_v2(keys(6), wanted)
        self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (4, [4]))
        self.assertEqual(found.extra_pool_hit_pages, {"kv": 6, "swa": 4, "mamba": 4})
        other, _, new_window, new_state = self.hybrid()
        got = other.batch_get_v2([sg.transfer("swa", keys(4)[2:], new_window.slots(7, 5)),
                                  sg.transfer("mamba", keys(5)[3:], new_state.slots(6, 5))])
        self.assertEqual(got, {"swa": [True, True], "mamba": [True, False]})
        self.assertEqual((new_window.page(7), new_window.page(5)),
                         (window.page(2), window.page(3)))
        self.assertEqual(new_state.states[6], state.states[2])

    def test_pages_that_all_must_be_there(self):
        self.share()
        backend, kv, window, _ = self.hybrid()
        backend.batch_set_v1(keys(6), kv.slots(*range(6)))
        backend.batch_set_v2([sg.transfer("swa", keys(3), window.slots(0, 1, 2))])
        found = backend.batch_exists_v2(keys(6), [sg.transfer("swa", keys(6), None)])
        self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (3, [1, 2, 3]))

    def test_a_pool_that_is_not_known_ends_all(self):
        self.share()
        backend, kv, _, state = self.hybrid()
        backend.register_mem_host_pool_v2(state, sg.PoolName.DRAFT)
        self.assertEqual(backend.batch_set_v1(keys(1), kv.slots(0)), [False])
        self.assertEqual(backend.batch_exists(keys(1)), 0)
        self.assertEqual(backend.counters.excluded, 2)
        self.assertIn("the pool draft is not known", self.warnings[0])


class Daemons(Case):
    def test_the_daemon_comes_late_dies_and_comes_back(self):
        pool = MHATokenToKVPoolHost()
        backend = self.backend(pool)
        self.assertEqual(backend.batch_exists(keys(6)), 0)
        self.assertEqual(backend.batch_set_v1(keys(2), pool.slots(0, 1)), [False, False])
        self.start()
        time.sleep(2 * session.RETRY_S)
        for page in range(6):
            pool.fill(page, page)
        self.assertEqual(backend.batch_set_v1(keys(6), pool.slots(*range(6))), [True] * 6)
        self.assertEqual(backend.batch_exists(keys(6)), 6)
        self.assertEqual(backend.batch_get_v1(keys(1), pool.slots(6)), [True])
        self.daemon.kill()
        self.daemon.wait()
        self.assertEqual(backend.batch_get_v1(keys(1), pool.slots(6)), [False])
        self.assertEqual(backend.batch_exists(keys(6)), 0)
        self.start()
        self.until([True] * 3, backend.batch_set_v1, keys(3, seed=1), pool.slots(0, 1, 2))
        self.until(3, backend.batch_exists, keys(3, seed=1))
        self.until([True], backend.batch_get_v1, keys(1, seed=1), pool.slots(7))
        self.assertEqual(pool.page(7), pool.page(0))

    def test_handles_that_rest_notice_that_the_daemon_has_gone(self):
        self.start()
        backend, pool = self.stored()
        backend.batch_exists(keys(1))
        backend.batch_get_v1(keys(1), pool.slots(7))
        self.daemon.kill()
        self.daemon.wait()
        kv = backend._pools["kv"]
        end = time.monotonic() + 120
        for lock, rests in ((kv._load_lock, kv._loads), (kv._store_lock, kv._stores),
                            (kv.lookups._lock, kv.lookups._session)):
            there = True
            while there:
                self.assertLess(time.monotonic(), end)
                with lock:
                    there = rests.client().info().connected
                time.sleep(0.01)

    def until(self, wanted, call, *how):
        """Call until a handle has attached again, and the answer is the wanted one."""
        end = time.monotonic() + 120
        while call(*how) != wanted:
            self.assertLess(time.monotonic(), end, call)

    def test_a_daemon_that_stands_still_costs_the_budgets(self):
        self.start()
        pool = MHATokenToKVPoolHost()
        backend = self.backend(pool, lookup_budget_ms=100, load_budget_ms=100,
                               store_budget_ms=100)
        backend.batch_exists(keys(1))
        backend.batch_get_v1(keys(1), pool.slots(0))
        backend.batch_set_v1(keys(1), pool.slots(0))
        os.kill(self.daemon.pid, signal.SIGSTOP)
        try:
            self.assertEqual(backend.batch_exists(keys(2, seed=1)), 0)
            self.assertEqual(backend.batch_get_v1(keys(2, seed=1), pool.slots(0, 1)),
                             [False, False])
            self.assertEqual(backend.batch_set_v1(keys(2, seed=1), pool.slots(0, 1)),
                             [False, False])
        finally:
            os.kill(self.daemon.pid, signal.SIGCONT)

    def ask_for_what_is_not_calibrated(self):
        kept = kvferry.sglang.Session
        self.addCleanup(setattr, kvferry.sglang, "Session", kept)
        kvferry.sglang.Session = lambda *how, **more: kept(*how, allow_uncalibrated=True, **more)

    def test_a_daemon_comes_back_with_a_profile_that_loses_bits(self):
        """Handles attach again by themselves, and are looked at as new ones are."""
        self.ask_for_what_is_not_calibrated()
        self.start()
        pool = MHATokenToKVPoolHost(dim=128)
        backend = self.backend(pool, profile="balanced")
        self.assertEqual(backend.batch_set_v1(keys(2), pool.slots(0, 1)), [True, True])
        self.assertEqual(backend.batch_exists(keys(2)), 2)
        self.assertEqual(backend.batch_get_v1(keys(2), pool.slots(2, 3)), [True, True])
        self.daemon.kill()
        self.daemon.wait()
        self.daemon = self.start_daemon(sys.argv[1], "allow_uncalibrated=true")
        facts = backend._pools["kv"]._facts
        with kvferry.Client(self.socket, profile="balanced", geometry=facts.geometry,
                            allow_uncalibrated=True, namespace_label=facts.label,
                            weights_digest=bytes.fromhex(DIGEST)) as other:
            self.assertFalse(other.info().lossless)
            other.put([kvferry.Put(key, pages=facts.pages, page_ids=[page])
                       for page, key in enumerate(map(bytes.fromhex, keys(2)))])
        kv, end = backend._pools["kv"], time.monotonic() + 120
        while kv._loads.is_open or kv._stores.is_open:
            self.assertLess(time.monotonic(), end)
            self.assertEqual(backend.batch_get_v1(keys(2), pool.slots(4, 5)), [False, False])
            self.assertEqual(backend.batch_set_v1(keys(2, seed=1), pool.slots(0, 1)),
                             [False, False])
        self.assertIn("profile balanced loses bits", self.warnings[-1])
        self.assertEqual(pool.page(4), bytes(len(pool.page(4))))

    def test_a_profile_that_loses_bits_is_not_taken(self):
        self.start_daemon(sys.argv[1], "allow_uncalibrated=true")
        self.ask_for_what_is_not_calibrated()
        pool = MHATokenToKVPoolHost(dim=128)
        backend = self.backend(pool, profile="balanced")
        self.assertEqual(backend.batch_set_v1(keys(1), pool.slots(0)), [False])
        self.assertEqual(backend.counters.not_stored, 1)
        self.assertIn("profile balanced loses bits", self.warnings[-1])


class Refused(Case):
    """No daemon is needed to say no."""

    def reason(self, pool=None, facts=None, args=None, **changes):
        sg.install.args = sg.server_args(**(args or {}))
        pool = pool or MHATokenToKVPoolHost()
        before = len(self.warnings)
        backend = self.backend(pool, facts, **changes)
        self.assertEqual(backend.batch_exists(keys(2)), 0)
        self.assertEqual(backend.batch_set_v1(keys(2), []), [False, False])
        self.assertEqual(backend.batch_get_v1(keys(2), []), [False, False])
        self.assertEqual(backend.counters.excluded, 6)
        self.assertEqual(len(self.warnings), before + 1)
        return self.warnings[-1]

    def test_engines_that_are_not_served(self):
        for what, said in (({"facts": {"pp_size": 2}}, "pp_size is 2"),
                           ({"facts": {"attn_cp_size": 2}}, "attn_cp_size is 2"),
                           ({"facts": {"dcp_size": 2}}, "dcp_size is 2"),
                           ({"args": {"speculative_algorithm": "EAGLE"}}, "speculative decoding"),
                           ({"args": {"lora_paths": ["a=nowhere"]}}, "LoRA adapter nowhere"),
                           ({"weights_digest": ""}, "no local folder with weights"),
                           ({"pool": MHATokenToKVPoolHost("page_unified")}, "use page_first"),
                           ({"pool": MHATokenToKVPoolHost(page_size=1)}, "set --page-size"),
                           ({"pool": MambaPoolHost()}, "the host pool is a MambaPoolHost")):
            with self.subTest(said=said):
                self.assertIn(said, self.reason(**what))
        drafted = MHATokenToKVPoolHost()
        drafted.target_layer_num -= 1
        self.assertIn("a draft model's layers", self.reason(drafted))
        tagged = MHATokenToKVPoolHost()
        tagged.storage_format_tag = "packed"
        self.assertIn("a format of their own", self.reason(tagged))

    def test_keys_without_salts_are_not_taken(self):
        utils = sys.modules[sg.CACHE + ".utils"]
        utils.storage_namespace_seed = lambda extra_key, cache_salt: None
        try:
            self.assertIn("cache_salt, extra_key and LoRA", self.reason())
            del utils.storage_namespace_seed
            self.assertIn("cache_salt, extra_key and LoRA", self.reason())
        finally:
            utils.storage_namespace_seed = sg.seed

    def test_settings_that_make_no_sense(self):
        for changes, said in (({"interface_v1": 0}, '"interface_v1": 1 is not there'),
                              ({"sockets": ""}, "'sockets' is not known"),
                              ({"load_budget_ms": "1"}, "not of type int"),
                              ({"load_budget_ms": -1}, "-1, not from 0 to"),
                              ({"weights_digest": "12"}, "not 64 hexadecimal digits"),
                              ({"namespace": "n" * 40}, "namespace is longer than")):
            with self.subTest(said=said), self.assertRaisesRegex(ValueError, said):
                self.backend(MHATokenToKVPoolHost(), **changes)

    def test_versions(self):
        module = sys.modules["sglang"]
        module.__version__ = "0.0.1"
        try:
            with self.assertRaisesRegex(RuntimeError, "hicache-storage-backend-extra-config"):
                self.backend()
            self.backend(allow_untested=True)
            self.assertIn(f"tested with sglang {TESTED}", self.warnings[-1])
        finally:
            module.__version__ = TESTED

    def test_methods_fit_the_interface(self):
        for name, facts in sg.FACTS["methods"]["HiCacheStorage"].items():
            own = KvferryStorage.__dict__.get(name)
            if own is None:
                self.assertFalse(facts["abstract"], name)
                continue
            self.assertEqual([*inspect.signature(own).parameters],
                             facts["parameters"], name)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
