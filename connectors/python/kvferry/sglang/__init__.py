# SPDX-License-Identifier: Apache-2.0
"""The HiCache storage backend for SGLang: pages of its host pool go to kvferryd and come back.

    sglang serve ... --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvferry",
        "module_path": "kvferry.sglang", "class_name": "KvferryStorage", "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": true}'

SGLang makes one object in each rank's process. Keys are SGLang's hashes of pages, which have
tokens, salt, extra key and adapter's id in them, and nothing of the model: that is the namespace's
part.
"""
import logging
import threading
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Set

import sglang
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.mem_cache import utils as sglang_utils
from sglang.srt.mem_cache.hicache_storage import (HiCacheStorage, PoolHitPolicy, PoolName,
                                                  PoolTransferResult)
from sglang.srt.runtime_context import get_server_args

from kvferry import Client, KvferryError, Status, identity
from kvferry.hostio import TICK_S
from kvferry.session import Session
from kvferry.sglang import facts as engine_facts
from kvferry.sglang.pool import Pool
from kvferry.sglang.settings import WHERE, Settings
from kvferry.warning import WarnOnce

logger = logging.getLogger("sglang.kvferry")


@dataclass
class Counters:
    """What a rank's backend has done, in pages."""

    stored: int = 0
    not_stored: int = 0  # no room, no daemon, or refused
    loaded: int = 0
    failed: int = 0  # promised, and not there when they were wanted
    excluded: int = 0  # of an engine or a pool that is not served


def keys_have_namespaces() -> bool:
    """Whether this SGLang's keys differ between salts and extra keys."""
    seed = getattr(sglang_utils, "storage_namespace_seed", None)
    return seed is not None and len({None, seed("a", None), seed(None, "a"), seed("b", None)}) == 4


class ServerArgs:
    """The engine's arguments, as they have been resolved."""

    def __init__(self, args: Any):
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return resolution_result(self._args, name)


def _bytes(keys: Optional[Sequence[str]]) -> List[bytes]:
    return [bytes.fromhex(key) for key in keys or []]


class KvferryStorage(HiCacheStorage):
    """HiCacheStorage over kvferryd. With an engine that is not served (one warning says why)
    nothing is found and nothing is stored, and the engine runs on."""

    def __init__(self, storage_config: Any, kwargs: Optional[Dict[str, Any]] = None):
        self._config = storage_config
        self._settings = Settings.read(storage_config.extra_config or {})
        self._warn_once = WarnOnce(logger)
        self._pools: Dict[str, Pool] = {}
        self._args = ServerArgs(get_server_args())
        self._digest = b""
        self._disabled = False
        self.counters = Counters()
        self._closing = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="kvferry-tick", daemon=True)
        warning = identity.check_version("sglang", sglang.__version__,
                                         self._settings.allow_untested, WHERE)
        if warning is not None:
            self._warn_once(warning)
        try:
            engine_facts.check_engine(storage_config, self._args, keys_have_namespaces())
            self._digest = engine_facts.weights_digest(self._settings.digest(), self._args)
        except engine_facts.Unsupported as why:
            self._disable(why)
        self._ticker.start()

    # --- set-up -----------------------------------------------------------------------------------

    def _disable(self, why: engine_facts.Unsupported) -> None:
        """Hybrid models need all of their pools: without one of them the others are of no use."""
        self._disabled = True
        self._warn_once(f"this engine's KV is neither stored nor loaded: {why}")

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._add(mem_pool_host, PoolName.KV.value)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(host_pool, PoolName(host_pool_name).value)

    def _add(self, host_pool: Any, name: str) -> None:
        if self._disabled or name in self._pools:
            return
        read = engine_facts.read_flat
        if name == PoolName.KV.value or type(host_pool).__name__ in engine_facts.KV_POOLS:
            read = engine_facts.read_kv
        try:
            facts = read(self._config, self._args, host_pool, name, self._settings.namespace)
        except engine_facts.Unsupported as why:
            self._disable(why)
            return

        def session(staging_bytes: int = self._settings.staging_bytes) -> Session:
            profile = self._settings.profile if facts.geometry is not None else None
            return Session(self._warn_once, self._connected, socket_path=self._settings.socket,
                           profile=profile, geometry=facts.geometry, name="sglang",
                           namespace_label=facts.label, weights_digest=self._digest,
                           shard=facts.shard, shard_count=facts.shard_count,
                           staging_bytes=staging_bytes)

        self._pools[name] = Pool(host_pool, facts, self._settings, session, self._warn_once)

    def _connected(self, client: Client) -> None:
        """The daemon has taken the handle. What has lost bits is computed on from, and the result
        is stored as if it had not been: so no such profile."""
        info = client.info()
        if not info.lossless:
            raise KvferryError(Status["ERR_UNSUPPORTED"],
                               f'profile {info.profile} loses bits: set profile to "exact"')

    def _pool(self, name: Any, keys: Sequence[Any]) -> Optional[Pool]:
        """A pool that is served; where it is not, its pages are counted."""
        pool = None if self._disabled else self._pools.get(PoolName(name).value)
        if pool is None:
            self.counters.excluded += len(keys)
        return pool

    # --- what is there ----------------------------------------------------------------------------

    def batch_exists(self, keys: List[str], extra_info: Any = None) -> int:
        """How many leading pages are stored, on all ranks."""
        pool = self._pool(PoolName.KV, keys)
        return pool.lookups.run(_bytes(keys)) if pool is not None else 0

    def batch_exists_v2(self, keys: List[str], pool_transfers: Optional[List[Any]] = None,
                        extra_info: Any = None) -> PoolTransferResult:
        """Lengths of the prefix that have what each pool wants of it."""
        run = self.batch_exists(keys, extra_info)
        hits: Dict[str, int] = {PoolName.KV: run} if run else {}
        lengths = list(range(1, run + 1))
        for transfer in pool_transfers or []:
            if not lengths:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of the same pages, which is never asked for
            good = self._lengths(transfer, _bytes(keys[:run]))
            if good:
                hits[transfer.name] = max(good)
            lengths = [length for length in lengths if length in good]
        return PoolTransferResult(max(lengths, default=0), hits, lengths)

    def _lengths(self, transfer: Any, keys: List[bytes]) -> Set[int]:
        """Lengths of the prefix for which a side pool has its pages."""
        pool = self._pool(transfer.name, keys)
        if pool is None:
            return set()
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, pool.lookups.run(keys) + 1))
        trailing = max(1, len(transfer.keys or []))
        there = pool.lookups.each(keys)
        return {length for length in range(1, len(keys) + 1)
                if all(there[max(0, length - trailing):length])}

    # --- loads and stores -------------------------------------------------------------------------

    def _load(self, name: Any, keys: Sequence[str], indices: Any) -> List[bool]:
        pool = self._pool(name, keys)
        if pool is None:
            return [False] * len(keys)
        good = pool.load(_bytes(keys), indices)
        self.counters.loaded += good
        self.counters.failed += len(keys) - good
        return [number < good for number in range(len(keys))]

    def _store(self, name: Any, keys: Sequence[str], indices: Any, extra_info: Any) -> List[bool]:
        pool = self._pool(name, keys) if self._settings.store else None
        if pool is None:
            return [False] * len(keys)
        before = _bytes(getattr(extra_info, "prefix_keys", None))
        stored = pool.store(_bytes(keys), indices, before)
        self.counters.stored += sum(stored)
        self.counters.not_stored += len(stored) - sum(stored)
        return stored

    def batch_get_v1(self, keys: List[str], host_indices: Any,
                     extra_info: Any = None) -> List[bool]:
        return self._load(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: List[str], host_indices: Any,
                     extra_info: Any = None) -> List[bool]:
        return self._store(PoolName.KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[str, List[bool]]:
        return {transfer.name: self._load(transfer.name, transfer.keys or [],
                                          transfer.host_indices) for transfer in transfers}

    def batch_set_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[str, List[bool]]:
        return {transfer.name: self._store(transfer.name, transfer.keys or [],
                                           transfer.host_indices, extra_info)
                for transfer in transfers}

    # --- the interface before v1, which SGLang uses without interface_v1: refused at start --------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: List[str], target_locations: Any = None,
                  target_sizes: Any = None) -> List[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None,
            target_sizes: Any = None) -> bool:
        return False

    def batch_set(self, keys: List[str], values: Any = None, target_locations: Any = None,
                  target_sizes: Any = None) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- the end ----------------------------------------------------------------------------------

    def clear(self) -> bool:
        """What is stored may be of other engines too, and stays."""
        self._warn_once("the daemon's blocks are kept: `kvferry purge` forgets a namespace")
        return False

    def _tick(self) -> None:
        """The thread that looks after handles that rest."""
        while not self._closing.wait(TICK_S):
            for pool in list(self._pools.values()):
                pool.tick()

    def close(self) -> None:
        """The engine lets go of the backend."""
        self._closing.set()
        self._ticker.join()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        logger.info("kvferry: pages: %s", self.counters)
