#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SGLang's real HiCache controllers and host pools on the CPU, with the backend and a real daemon.

usage: run_hicache.py --daemon KVFERRYD [--out FILE] [--corrupt]

Run it with a Python that has sglang (a version of tested_versions.json) and what importing it
needs, and the package where it finds it (PYTHONPATH to build/release/connectors/python). Nothing
of SGLang is replaced: the controllers' threads ask, load and store as in an engine; the pages of
the host pools are filled here in place of copies from a GPU, and the scheduler's part (a prefetch
is asked for, host slots are allocated for its hit, its acknowledgments are taken) is played here.

  layouts   HiCacheController, interface v1: for each layout of the host pool and each kind of
            cache, what was stored comes back to other slots, byte for byte, and a longer prompt
            has as much of it as is there. A pool of another layout reads it too.
  names     Another salt, extra key, model, application or dtype finds nothing.
  images    The same prompt around another image has what is before it, around the same one all.
  hybrid    HybridCacheController, interface v2: a window and a recurrent state beside the KV; the
            state is there at some lengths only, and the hit ends at one of these.
  ranks     Two processes with SGLang's collectives between them, of which one has stored less:
            both have as much as both have.
  failures  The daemon is killed while it is wanted, restarted on its store, and stopped: every
            prefetch ends; none brings a wrong byte.

--corrupt flips one byte of each page that was loaded, behind all checks: the run must fail then.
"""
import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from array import array
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sglang  # noqa: E402
import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.managers.mm_utils import pad_mm_tokens  # noqa: E402
from sglang.srt.managers.schedule_batch import (Modality, MultimodalDataItem,  # noqa: E402
                                                MultimodalInputs)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (PoolHitPolicy, PoolName,  # noqa: E402
                                                  PoolTransfer)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (  # noqa: E402
    HybridCacheController)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host import base as host_pool_base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

from node import Daemon, Run  # noqa: E402

PAGE, PAGES = 64, 24
SLOTS = 16384
RANKS = 2
WAIT_S = 120
DIGEST = "11" * 32


def config(socket, **more):
    """The JSON of --hicache-storage-backend-extra-config."""
    return {"backend_name": "kvferry", "module_path": "kvferry.sglang",
            "class_name": "KvferryStorage", "interface_v1": 1, "socket": socket,
            "weights_digest": DIGEST, "lookup_budget_ms": 20000, "load_budget_ms": 20000,
            "store_budget_ms": 20000, **more}


def pools(kind, layout, dtype):
    """A device pool, its allocator and its host pool, as the engine makes them."""
    if kind == "mla":
        device = MLATokenToKVPool(SLOTS // 2, PAGE, dtype, 64, 16, 4, "cpu", False)
        host = MLATokenToKVPoolHost(device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE,
                                    layout, pin_memory=False, device_capacity_tokens=device.size,
                                    start_layer=0, end_layer=4, target_layer_num=4)
    else:
        device = MHATokenToKVPool(SLOTS // 2, PAGE, dtype, 3, 32, 4, "cpu", False,
                                  enable_alt_stream=False)
        host = MHATokenToKVPoolHost(device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE,
                                    layout, pin_memory=False, device_capacity_tokens=device.size,
                                    start_layer=0, end_layer=4)
    allocator = PagedTokenToKVPoolAllocator(device.size, PAGE, dtype, "cpu", device, False)
    return device, allocator, host


def fill(host, indices, seed):
    """Fill pages of a host pool with what follows from their seeds."""
    size = host.page_size
    for number, slot in enumerate(indices[::size].tolist()):
        page = host.get_dummy_flat_data_page()
        made = torch.Generator().manual_seed(seed * 1000 + number)
        raw = torch.randint(0, 256, (page.nbytes,), generator=made, dtype=torch.uint8)
        host.set_from_flat_data_page(slot, raw.view(page.dtype).reshape(page.shape))


def raw(host, slot):
    return host.get_data_page(slot, flat=True).contiguous().view(torch.uint8).clone()


def differing(host, indices, other, theirs, n):
    """Of n pages, those of one pool that differ from another's."""
    size = host.page_size
    return sum(not torch.equal(raw(host, int(indices[i * size])),
                               raw(other, int(theirs[i * size]))) for i in range(n))


def rows(host, slot):
    """K and V of a page by layer and token, whatever the layout (of those by slot)."""
    return torch.stack([layer[slot:slot + PAGE].view(torch.uint8)
                        for layer in host.k_data_refs + host.v_data_refs])


def flip(host, slot):
    page = raw(host, slot)
    page[len(page) // 2] ^= 1
    host.set_from_flat_data_page(slot, page.view(host.dtype))


class Engine:
    """A controller, and the part of the scheduler that speaks to it."""

    def __init__(self, socket, kind="mha", layout="page_first", dtype=torch.bfloat16, **settings):
        self.device, allocator, self.host = pools(kind, layout, dtype)
        self.controller = self.make(allocator)
        self.attach(config(socket, **settings))

    GROUP = None  # of the ranks

    def make(self, allocator):
        return HiCacheController(allocator, self.host, PAGE, self.GROUP, None, io_backend="direct")

    def attach(self, settings):
        self.controller.attach_storage_backend("dynamic", PAGE, "model", settings)

    @property
    def backend(self):
        return self.controller.storage_backend

    def store(self, key, seed, transfers=None):
        """Fill host pages and have them stored; how many tokens were."""
        n = len(key) // PAGE
        indices = self.host.alloc(n * PAGE)
        fill(self.host, indices, seed)
        more = {} if transfers is None else {"extra_pools": transfers}
        self.controller.write_storage(indices, key, get_storage_hash_str(key, None, PAGE), [],
                                      **more)
        return indices, self.controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens

    def ask(self, key, transfers=None):
        """A prefetch, until it is known how much there is of it."""
        self.start(key, transfers)
        return self.controller.prefetch_hit_queue.get(timeout=WAIT_S)

    def start(self, key, transfers):
        self.controller.prefetch("request", key)

    def load(self, operation):
        """Host slots for a prefetch's hit, and the load; how many tokens are good."""
        indices = self.controller.alloc_prefetch_host_buffers(operation,
                                                              operation.storage_hit_count)
        operation.host_indices = indices
        self.controller.prefetch_buffer.put(operation)
        tokens, end = 0, time.monotonic() + WAIT_S
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=max(end - time.monotonic(), 0.1))
            tokens = ack.completed_tokens if ack.completed_tokens is not None else tokens
            operation.pool_hits = ack.pool_hits or getattr(operation, "pool_hits", None)
            if ack.completed_req:
                return indices, tokens

    def close(self):
        self.controller.detach_storage_backend()


class Hybrid(Engine):
    """KV, a window and a recurrent state: HybridCacheController, interface v2."""

    def make(self, allocator):
        self.window_device, _, self.window = pools("mha", "page_first", torch.bfloat16)
        state = MambaStateBufferInfo(temporal=torch.zeros(3, 64, 5, 7, dtype=torch.float32),
                                     conv=(torch.zeros(3, 64, 11, dtype=torch.bfloat16),))
        self.state = self.mamba(state)
        entries = [PoolEntry(PoolName.KV, self.host, self.device, lambda i: i, True),
                   PoolEntry(PoolName.SWA, self.window, self.window_device, lambda i: i),
                   PoolEntry(PoolName.MAMBA, self.state, None, lambda i: i)]
        return HybridCacheController(allocator, HostPoolGroup(entries), PAGE, None, None,
                                     io_backend="direct")

    @staticmethod
    def mamba(info):
        return MambaPoolHost(info, 2.0, 0, device_capacity=64, pin_memory=False,
                             layout="page_first")

    def attach(self, settings):
        self.controller.attach_storage_backend("dynamic", PAGE, "model", settings,
                                               host_pools=self.controller.mem_pool_host.entries)

    def start(self, key, transfers):
        self.controller.prefetch(CacheRequestHandle("request", 0), key, extra_pools=transfers)


def text(n, seed=0, **names):
    """A request's tokens, as SGLang's tree has them."""
    return RadixKey(array("q", (seed * 100_000 + i for i in range(n * PAGE))), **names)


def around_image(first, pages, shade):
    """A request with an image on some of its pages, whose tokens SGLang makes of the pixels."""
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.full((3, 28, 28), shade),
                              offsets=[(first * PAGE, (first + pages) * PAGE - 1)])
    item.set_pad_value()
    tokens = array("q", (4_000_000 + i for i in range(PAGES * PAGE)))
    return RadixKey(pad_mm_tokens(tokens, MultimodalInputs(mm_items=[item], im_token_id=7)))


def publish(rank=0, ranks=1):
    """SGLang's arguments and this process's place, as its launcher makes them known."""
    runtime_context.get_context().override_server_args(model_path="none", device="cpu",
                                                       tp_size=ranks).install()
    runtime_context.get_parallel().override_permanently(tp_rank=rank, pp_rank=0, attn_dcp_rank=0)
    host_pool_base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # these pools are small


def rank_main(rank, folder, socket, said):
    """One rank of an engine."""
    publish(rank, RANKS)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank,
                                         world_size=RANKS)
    Engine.GROUP = torch.distributed.group.WORLD
    engine = Engine(socket, namespace="ranks")
    key = text(PAGES, 50)
    indices = engine.host.alloc(PAGES * PAGE)
    fill(engine.host, indices, 50 + rank)
    n = PAGES - 8 * rank
    engine.controller.write_storage(indices[:n * PAGE], key,
                                    get_storage_hash_str(key, None, PAGE)[:n], [])
    engine.controller.ack_backup_queue.get(timeout=WAIT_S)
    torch.distributed.barrier()
    operation = engine.ask(key)
    theirs, tokens = engine.load(operation)
    said.put((rank, {"hit": operation.storage_hit_count // PAGE, "restored": tokens // PAGE,
                     "differing": differing(engine.host, indices, engine.host, theirs,
                                            tokens // PAGE)}))
    torch.distributed.barrier()
    engine.close()


class Phases(Run):
    def engine(self, cls=Engine, **how):
        return cls(self.daemon.socket, **how)

    def restored(self, source, indices, engine, key):
        """Load a key's pages; how many came, and how many differ from what was stored."""
        operation = engine.ask(key)
        if operation.storage_hit_count == 0:
            return 0, 0
        theirs, tokens = engine.load(operation)
        if self.corrupt:
            flip(engine.host, int(theirs[0]))
        bad = differing(source.host, indices, engine.host, theirs, tokens // PAGE)
        engine.host.free(theirs)
        return tokens // PAGE, bad

    # --- interface v1 -----------------------------------------------------------------------------

    def layouts(self):
        first = {}
        for seed, (kind, layout, dtype) in enumerate((
                ("mha", "layer_first", torch.bfloat16), ("mha", "page_first", torch.float16),
                ("mha", "page_first_direct", torch.float32), ("mha", "page_head", torch.bfloat16),
                ("mla", "layer_first", torch.bfloat16), ("mla", "page_first", torch.float16),
                ("mla", "page_first_direct", torch.float32)), 1):
            key = text(PAGES, seed)
            how = {"kind": kind, "layout": layout, "dtype": dtype}
            source = self.engine(**how)
            indices, stored = source.store(key, seed)
            target = self.engine(**how)
            target.host.alloc(3 * PAGE)  # so that slots are others
            pages, bad = self.restored(source, indices, target, key)
            longer = target.ask(text(PAGES + 4, seed)).storage_hit_count // PAGE
            name = f"{kind} {layout} {str(dtype)[6:]}"
            self.say(name, stored == PAGES * PAGE and pages == PAGES and bad == 0
                     and longer == PAGES, stored=stored // PAGE, restored=pages, differing=bad,
                     hit_of_a_longer_prompt=longer)
            first.setdefault(kind, (source, indices, key))
            source.close()
            target.close()
        source, indices, key = first["mha"]
        other = self.engine(kind="mha", layout="page_first", dtype=torch.bfloat16)
        theirs, tokens = other.load(other.ask(key))
        if self.corrupt:
            flip(other.host, int(theirs[0]))
        pages = tokens // PAGE
        bad = sum(not torch.equal(rows(source.host, int(indices[i * PAGE])),
                                  rows(other.host, int(theirs[i * PAGE]))) for i in range(pages))
        self.say("another layout reads it", pages == PAGES and bad == 0, restored=pages,
                 differing=bad)
        other.close()

    def names(self):
        source = self.engine()
        key = text(PAGES, 20, cache_salt="a")
        indices, stored = source.store(key, 20)
        pages, bad = self.restored(source, indices, source, key)
        found = {"the same salt": pages}
        for name, other in (("no salt", {}), ("another salt", {"cache_salt": "b"}),
                            ("an extra key of that name", {"extra_key": "a"})):
            found[name] = source.ask(text(PAGES, 20, **other)).storage_hit_count // PAGE
        for name, how in (("other weights", {"weights_digest": "22" * 32}),
                          ("another namespace", {"namespace": "other"}),
                          ("another dtype", {"dtype": torch.float16}),
                          ("another kind", {"kind": "mla"})):
            engine = self.engine(**how)
            found[name] = engine.ask(key).storage_hit_count // PAGE
            engine.close()
        good = found.pop("the same salt") == PAGES and bad == 0 and not any(found.values())
        self.say("names", good and stored == PAGES * PAGE, found=found)
        source.close()

    def images(self):
        source = self.engine()
        before, pages = 4, 6
        indices, stored = source.store(around_image(before, pages, 0.5), 40)
        restored, bad = self.restored(source, indices, source, around_image(before, pages, 0.5))
        other = source.ask(around_image(before, pages, 0.25)).storage_hit_count // PAGE
        self.say("images", stored == PAGES * PAGE and restored == PAGES and bad == 0
                 and other == before, stored=stored // PAGE, restored=restored, differing=bad,
                 pages_before_the_image=before, hit_around_another=other)
        source.close()

    # --- interface v2 -----------------------------------------------------------------------------

    def hybrid(self):
        engine = self.engine(Hybrid)
        key = text(PAGES, 30)
        hashes = get_storage_hash_str(key, None, PAGE)
        window = engine.window.alloc(4 * PAGE)
        fill(engine.window, window, 31)
        state = engine.state.alloc(engine.state.page_size)
        fill(engine.state, state, 32)
        at = PAGES - 6  # where the state was taken
        indices, stored = engine.store(key, 30, [
            PoolTransfer(PoolName.SWA, host_indices=window, keys=hashes[at - 4:at],
                         hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.MAMBA, host_indices=state, keys=hashes[at - 1:at],
                         hit_policy=PoolHitPolicy.TRAILING_PAGES)])
        other = self.engine(Hybrid)
        new_window, new_state = other.window.alloc(4 * PAGE), other.state.alloc(
            other.state.page_size)
        operation = other.ask(key, [
            PoolTransfer(PoolName.SWA, host_indices=new_window, keys=hashes[-4:],
                         hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.MAMBA, host_indices=new_state, keys=hashes[-1:],
                         hit_policy=PoolHitPolicy.TRAILING_PAGES)])
        hit = operation.storage_hit_count // PAGE
        theirs, tokens = other.load(operation)
        if self.corrupt:
            flip(other.host, int(theirs[0]))
        bad = differing(engine.host, indices, other.host, theirs, tokens // PAGE)
        bad += differing(engine.window, window, other.window, new_window, 4)
        bad += differing(engine.state, state, other.state, new_state, 1)
        self.say("hybrid", stored == PAGES * PAGE and hit == at and tokens == at * PAGE
                 and bad == 0, stored=stored // PAGE, state_at=at, hit=hit,
                 restored=tokens // PAGE, differing=bad,
                 pools={str(k): v for k, v in (operation.pool_hits or {}).items() if v})
        engine.close()
        other.close()

    # --- ranks ------------------------------------------------------------------------------------

    def ranks(self):
        """Two processes with SGLang's collectives between them: one stores less than the other."""
        with tempfile.TemporaryDirectory(prefix="kvferry-ranks-") as folder:
            context = torch.multiprocessing.get_context("spawn")
            said = context.Queue()
            processes = [context.Process(target=rank_main, args=(
                rank, folder, self.daemon.socket, said)) for rank in range(RANKS)]
            for process in processes:
                process.start()
            told = dict(said.get(timeout=20 * WAIT_S) for _ in processes)
            for process in processes:
                process.join(timeout=WAIT_S)
        wanted = {"hit": PAGES - 8, "restored": PAGES - 8, "differing": 0}
        self.say("two ranks", all(facts == wanted for facts in told.values()),
                 stored=[PAGES, PAGES - 8], **{f"rank {r}": told[r] for r in sorted(told)})

    # --- failures ---------------------------------------------------------------------------------

    def failures(self):
        engine = self.engine(load_budget_ms=2000, lookup_budget_ms=2000, store_budget_ms=2000)
        key = text(PAGES, 40)
        indices, _ = engine.store(key, 40)
        time.sleep(3)  # what is stored is on the drive by then
        operation = engine.ask(key)
        self.daemon.kill()
        theirs, tokens = engine.load(operation)
        bad = differing(engine.host, indices, engine.host, theirs, tokens // PAGE)
        gone = engine.ask(key).storage_hit_count
        _, stored = engine.store(text(PAGES, 41), 41)
        self.daemon.start()
        end, pages, differ = time.monotonic() + WAIT_S, 0, 0
        while pages < PAGES and not differ and time.monotonic() < end:
            time.sleep(0.1)  # until all handles have attached again
            pages, differ = self.restored(engine, indices, engine, key)
        self.say("killed and restarted", bad == 0 and gone == 0 and stored == 0
                 and pages == PAGES and differ == 0, restored_while_killed=tokens // PAGE,
                 hit_while_gone=gone, stored_while_gone=stored, restored_after=pages,
                 differing=bad + differ)
        operation = engine.ask(key)
        os.kill(self.daemon.process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        theirs, tokens = engine.load(operation)
        hit = engine.ask(key).storage_hit_count
        took = time.monotonic() - begin
        os.kill(self.daemon.process.pid, signal.SIGCONT)
        bad = differing(engine.host, indices, engine.host, theirs, tokens // PAGE)
        self.say("stopped", bad == 0 and took < WAIT_S, restored=tokens // PAGE,
                 hit=hit // PAGE, differing=bad)
        engine.close()


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--out")
    parser.add_argument("--corrupt", action="store_true")
    args = parser.parse_args()
    publish()
    with tempfile.TemporaryDirectory(prefix="kvferry-hicache-") as folder:
        daemon = Daemon(args.daemon, folder, "dram.bytes=512MiB", "nvme.0.bytes=1GiB")
        daemon.start()
        try:
            run = Phases(daemon, args.corrupt)
            run.layouts()
            run.names()
            run.images()
            run.hybrid()
            run.ranks()
            run.failures()
        finally:
            daemon.kill()
    result = {"sglang": sglang.__version__, "torch": torch.__version__,
              "machine": platform.machine(), "page_tokens": PAGE, "pages": PAGES,
              "hicache_exact_identical": int(not run.bad), "runs": run.results}
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if run.bad else 0


if __name__ == "__main__":
    sys.exit(main())
