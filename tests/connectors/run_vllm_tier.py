#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's real tiering manager and CPU tier, with kvferryd as the secondary tier.

usage: run_vllm_tier.py --daemon KVFERRYD --model DIR [--out FILE] [--corrupt]

Run it with a Python that has vllm (a version of tested_versions.json), and the package where it
finds it (PYTHONPATH to build/release/connectors/python). vLLM's classes are its own: the spec, the
shared region, the CPU tier with its evictions, the manager and the factory that loads the tier by
its module. The part of the workers, copies between a GPU and the CPU tier, is played here.

  restored  Chunks that the CPU tier has evicted come back from the daemon, byte for byte; a second
            engine, with an empty CPU tier, has them too.
  names     Other weights, groups, dtypes, applications, overrides or quantization find nothing.
  seen      vLLM's own connector makes the tier, and ours in its place: that one lets the tier see
            the engine's configuration, without which, and without a namespace, nothing is served.
  failures  The daemon is killed while it is wanted and restarted on its store; it stands still:
            every lookup and job ends; none brings a wrong byte.

--corrupt flips one byte of each row that was loaded, behind all checks: the run must fail then.
"""
import argparse
import hashlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (LookupResult, ReqContext, ScheduleEndContext,
                                     make_offload_key)
from vllm.v1.kv_offload.config import (OffloadingCacheConfig, OffloadingConfig,
                                       OffloadingGroupConfig, OffloadingModelConfig,
                                       OffloadingParallelConfig)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from node import Daemon, Run

from kvferry.vllm_tier import engine_config

BLOCK, BLOCKS, RANKS = 16, 4, 2  # tokens of a block, blocks of a chunk
BLOCK_BYTES = 24_000  # of a rank
CHUNKS, ROOM = 20, 8  # of a prompt, and of the CPU tier
WAIT_S = 120
DIGEST = "11" * 32


def vllm_config(model, transfer=None, **arguments):
    """What vLLM makes of its arguments."""
    return EngineArgs(model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024,
                      enforce_eager=True, kv_transfer_config=transfer,
                      **arguments).create_engine_config()


class Engine:
    """The scheduler's side of vLLM's offloading, and the workers' copies."""

    def __init__(self, socket, config, room=ROOM, dtype="bfloat16",
                 layers=("layers.0", "layers.1"), **tier):
        entry = {"type": "KvferryTier", "module_path": "kvferry.vllm_tier", "socket": socket,
                 "weights_digest": DIGEST, "lookup_budget_ms": 20000, "load_budget_ms": 20000,
                 "store_budget_ms": 20000, **tier}
        row = -(-BLOCK_BYTES * BLOCKS * RANKS // 4096) * 4096
        self.spec = TieringOffloadingSpec(OffloadingConfig(
            groups=(OffloadingGroupConfig(BLOCK, tuple(layers), 0),),
            worker_kv_bytes_per_block=BLOCK_BYTES, enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": room * row, "secondary_tiers": [entry]},
            engine_id=f"kvferry-{uuid.uuid4().hex}",
            model=OffloadingModelConfig("none", dtype), cache=OffloadingCacheConfig(BLOCK, BLOCKS),
            parallel=OffloadingParallelConfig(0, RANKS, RANKS, 1, 1, 1, 0, 1, None, False)))
        seen = engine_config.set(config)
        self.manager = self.spec.get_manager()
        engine_config.reset(seen)
        self.tier = self.manager.secondary_tiers[0]
        self.region = self.spec._scheduler_mmap.base_tensor.view(room, row)

    def request(self, name, seed=0):
        """A request's context and keys."""
        context = ReqContext(name)
        keys = [make_offload_key(hashlib.sha256(f"{seed} {i}".encode()).digest(), 0)
                for i in range(CHUNKS)]
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * BLOCK * BLOCKS)
        self.manager.on_new_request(context)
        return context, keys

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self):
        """Step until no job is left."""
        end = time.monotonic() + WAIT_S
        while self.manager.has_pending_work() and time.monotonic() < end:
            self.step()
            time.sleep(0.002)

    def row(self, key, seed):
        made = torch.Generator().manual_seed(seed + int.from_bytes(key[:6], "big"))
        return torch.randint(-128, 127, (self.region.shape[1],), generator=made, dtype=torch.int8)

    def store(self, context, keys, seed=0):
        """Compute chunks and copy them to the CPU tier, a few at a time."""
        for first in range(0, len(keys), 4):
            part = keys[first:first + 4]
            output = self.manager.prepare_store(part, context)
            for key, slot in zip(output.keys_to_store, output.store_spec.chunk_ids.tolist()):
                self.region[slot] = self.row(key, seed)
            self.manager.complete_store(output.keys_to_store, context)
            self.settle()

    def lookup(self, context, key):
        """A lookup, asked until it is answered, and loaded if it is there."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            result = self.manager.lookup(key, context)
            if result in (LookupResult.HIT, LookupResult.MISS):
                return result is LookupResult.HIT
            self.step()
            time.sleep(0.002)
        raise RuntimeError("a lookup that does not end")

    def load(self, context, keys, seed=0, corrupt=False):
        """Leading chunks that can be had, and how many of them are not what they should be."""
        good, bad = 0, 0
        for key in keys:
            if not self.lookup(context, key):
                break
            slot = self.manager.prepare_load([key], context).chunk_ids.tolist()[0]
            if corrupt:
                self.region[slot][99] ^= 1
            bad += not torch.equal(self.region[slot], self.row(key, seed))
            good += 1
            self.manager.complete_load([key], context)
        return good, bad

    def finish(self, context):
        self.manager.on_request_finished(context)
        self.settle()

    def close(self):
        del self.region
        self.manager.shutdown()


class Phases(Run):
    def __init__(self, daemon, corrupt, model):
        super().__init__(daemon, corrupt)
        self.model, self.config = model, vllm_config(model)

    def engine(self, **how):
        return Engine(self.daemon.socket, **{"config": self.config, **how})

    def again(self, engine, name, seed=0):
        context, keys = engine.request(name, seed)
        found = engine.load(context, keys, seed, self.corrupt)
        engine.finish(context)
        return found

    def restored(self):
        engine = self.engine()
        context, keys = engine.request("first")
        engine.store(context, keys)
        engine.finish(context)
        stored = engine.tier.counters.stored
        pages, bad = self.again(engine, "again")
        self.say("evicted chunks come back", stored == CHUNKS and pages == CHUNKS and bad == 0,
                 stored=stored, room_of_the_cpu_tier=ROOM, restored=pages, differing=bad,
                 loaded=engine.tier.counters.loaded)
        engine.close()
        engine = self.engine()
        pages, bad = self.again(engine, "other")
        self.say("another engine has them", pages == CHUNKS and bad == 0, restored=pages,
                 differing=bad)
        engine.close()

    def names(self):
        found = {}
        for name, how in (("other weights", {"weights_digest": "22" * 32}),
                          ("another namespace", {"namespace": "other"}),
                          ("another dtype", {"dtype": "float16"}),
                          ("overrides", {"config": vllm_config(
                              self.model, hf_overrides={"rope_theta": 5000.0})}),
                          ("quantization", {"config": vllm_config(self.model,
                                                                  quantization="fp8")}),
                          ("other layers", {"layers": ("layers.0",)})):
            engine = self.engine(**how)
            found[name] = self.again(engine, "other")[0]
            engine.close()
        self.say("names", not any(found.values()), found=found)

    def seen(self):
        """Whether the tier serves an engine, by the connector that has made it."""
        served = {}
        for name, connector in (("ours", {
                "kv_connector": "KvferryOffloadingConnector",
                "kv_connector_module_path": "kvferry.vllm_tier"}),
                                ("vLLM's", {"kv_connector": "OffloadingConnector"}),
                                ("vLLM's, with a namespace", {
                                    "kv_connector": "OffloadingConnector"})):
            tier = {"type": "KvferryTier", "module_path": "kvferry.vllm_tier",
                    "socket": self.daemon.socket}
            if "namespace" in name:
                tier["namespace"] = "alike"
            config = vllm_config(self.model, KVTransferConfig(
                kv_role="kv_both", kv_connector_extra_config={
                    "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64 << 20,
                    "secondary_tiers": [tier]}, **connector), block_size=32)
            spec = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=128,
                                     dtype=torch.bfloat16)
            cache = KVCacheConfig(64, [], [KVCacheGroupSpec(["layers.0"], spec)])
            kind = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
            made = kind(config, KVConnectorRole.SCHEDULER, cache)
            served[name] = bool(made.scheduler.manager.secondary_tiers[0]._lanes)
            made.shutdown()
        self.say("seen", served == {"ours": True, "vLLM's": False,
                                    "vLLM's, with a namespace": True}, served=served)

    def failures(self):
        budget = {"lookup_budget_ms": 2000, "load_budget_ms": 2000, "store_budget_ms": 2000}
        engine = self.engine(**budget)
        context, keys = engine.request("killed", 7)
        engine.store(context, keys, 7)
        engine.finish(context)
        time.sleep(3)  # what is stored is on the drive by then
        self.daemon.kill()
        there, bad = self.again(engine, "gone", 7)
        context, keys = engine.request("stored while gone", 8)
        before = engine.tier.counters.stored
        engine.store(context, keys, 8)
        engine.finish(context)
        self.daemon.start()
        pages, end = 0, time.monotonic() + WAIT_S
        while pages < CHUNKS and time.monotonic() < end:
            pages, differ = self.again(engine, f"back {time.monotonic()}", 7)
            bad += differ
        self.say("killed and restarted", bad == 0 and pages == CHUNKS
                 and engine.tier.counters.stored == before, restored_while_gone=there,
                 restored_after=pages, differing=bad)
        os.kill(self.daemon.process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        pages, bad = self.again(engine, "stopped", 7)
        took = time.monotonic() - begin
        os.kill(self.daemon.process.pid, signal.SIGCONT)
        self.say("stopped", bad == 0 and took < WAIT_S, restored=pages, differing=bad)
        engine.close()


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out")
    parser.add_argument("--corrupt", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-tier-") as folder:
        daemon = Daemon(args.daemon, folder, "dram.bytes=256MiB", "nvme.0.bytes=1GiB")
        daemon.start()
        try:
            run = Phases(daemon, args.corrupt, args.model)
            run.restored()
            run.names()
            run.seen()
            run.failures()
        finally:
            daemon.kill()
    result = {"vllm": vllm.__version__, "torch": torch.__version__, "machine": platform.machine(),
              "chunk_tokens": BLOCK * BLOCKS, "ranks": RANKS, "chunks": CHUNKS,
              "tier_exact_identical": int(not run.bad), "runs": run.results}
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if run.bad else 0


if __name__ == "__main__":
    sys.exit(main())
