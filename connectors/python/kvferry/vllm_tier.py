# SPDX-License-Identifier: Apache-2.0
"""kvferryd as a secondary tier of vLLM's own CPU offloading.

    vllm serve MODEL_FOLDER --kv-transfer-config '{"kv_connector": "KvferryOffloadingConnector",
        "kv_connector_module_path": "kvferry.vllm_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10737418240, "secondary_tiers": [
                {"type": "KvferryTier", "module_path": "kvferry.vllm_tier"}]}}'

vLLM tells a tier its model's name and dtype, not how it overrides the model's configuration, nor
how it quantizes. The connector above is vLLM's OffloadingConnector in all else, and lets the tier
see the whole configuration.
vLLM keeps chunks in its CPU tier and hands them on from there, all ranks' pages of a chunk in one
row; what has been evicted there comes back from here. A row is opaque: it is stored as the bytes
that it is. Everything is called from the scheduler's thread, and no call waits: threads of this
object do, within budgets.
"""
import ctypes
import hashlib
import logging
import queue
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvferry import identity, settings, vllm_model
from kvferry.buffers import address
from kvferry.client import Hit, Put
from kvferry.hostio import LOAD_STAGING_BYTES, TICK_S, Lookups, fetch, report, store, tick
from kvferry.session import Session
from kvferry.vllm_model import Unsupported
from kvferry.warning import WarnOnce

logger = logging.getLogger("vllm.kvferry")
WHERE = "secondary_tiers"
ROW_BYTES_MAX = 62 << 20  # of the 64 MiB of a block
LABEL_BYTES_MAX = 63
GROUP_BYTES = 4  # of a key: the KV cache group, behind the hash
UNSEEN = ("--hf-overrides, --quantization and draft models cannot be seen from here: name "
          "KvferryOffloadingConnector of the module kvferry.vllm_tier as kv_connector, or set a "
          "namespace for engines that have all of it alike")

# VllmConfig of the engine that is being made, where its connector is ours.
engine_config: "ContextVar[Any]" = ContextVar("kvferry_engine_config", default=None)


class KvferryOffloadingConnector(OffloadingConnector):
    """vLLM's own, made while the tier can see the engine's configuration."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        seen = engine_config.set(vllm_config)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            engine_config.reset(seen)


@dataclass(frozen=True)
class Settings:
    """What an entry of secondary_tiers may have, beside type and module_path."""

    socket: Optional[str] = None  # None: $KVFERRY_SOCKET, else the library's default
    namespace: str = ""  # separates applications
    lookup_budget_ms: int = 50  # what has not been answered by then is a miss
    load_budget_ms: int = 2000  # of a job
    store_budget_ms: int = 2000  # of a job too
    staging_bytes: int = 0  # 0: the daemon's default
    weights_digest: str = ""  # 64 hexadecimal digits; "": made from the model's files
    more_weights: str = ""  # folders of adapters and draft models, with a comma between two
    allow_untested: bool = False  # versions of vLLM that are not in tested_versions.json


@dataclass
class Counters:
    """What the tier has done, in chunks."""

    stored: int = 0
    not_stored: int = 0  # no room, no daemon, or refused
    loaded: int = 0
    failed: int = 0  # promised, and not there when they were wanted


@dataclass
class Asked:
    """A key that a request has looked up."""

    since: float
    found: Optional[bool] = None


@dataclass
class Request:
    """What is known of a request until it is over."""

    asked: Dict[bytes, Asked] = field(default_factory=dict)
    chain: Dict[Tuple[int, int], bytes] = field(default_factory=dict)  # by group and last token


class Lane:
    """A thread that does jobs one after the other, and rests in between."""

    def __init__(self, name: str, run: Callable[[Any], None], rest: Callable[[], None]):
        self._run = run
        self._rest = rest
        self._queue: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._left = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=f"kvferry-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Any) -> None:
        with self._idle:
            self._left += 1
        self._queue.put(job)

    def drain(self) -> None:
        """Wait until everything that was put is done."""
        with self._idle:
            self._idle.wait_for(lambda: self._left == 0)

    def close(self) -> None:
        """Do what was put, and end."""
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=TICK_S)
            except queue.Empty:
                self._rest()
                continue
            if job is None:
                return
            self._run(job)
            with self._idle:
                self._left -= 1
                self._idle.notify_all()


def weights(given: bytes, model: str, more: List[str]) -> bytes:
    """The digest of a model's weights, and of what else KV follows from."""
    def of(path: str) -> bytes:
        read = identity.folder_digest if path == model else identity.adapter_digest
        digest = read(Path(path)) if Path(path).is_dir() else None
        if digest is None:
            cure = ("set weights_digest to something that changes with the weights"
                    if path == model else "list in more_weights a folder that stands for it")
            raise Unsupported(f"{path} is no local folder with weights that can be read; {cure}")
        return digest

    digests = [given or of(model), *(of(path) for path in more)]
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def listed(paths: str) -> List[str]:
    """Paths with a comma between two."""
    return [path.strip() for path in paths.split(",") if path.strip()]


def draft_model(engine: Any) -> str:
    """The path or name of a draft model that is not the model itself; "" where there is none."""
    speculative = getattr(engine, "speculative_config", None)
    draft = getattr(getattr(speculative, "draft_model_config", None), "model", None)
    return str(draft) if draft and draft != engine.model_config.model else ""


def variant(config: Any, row_bytes: int, model: Any) -> str:
    """A name for what a row holds, under the same weights, and in which order: the pages of this
    version of vLLM, of these groups, as these ranks have them. model: vLLM's ModelConfig, or
    None."""
    parallel = config.parallel
    parts = [vllm.__version__.split("+")[0], row_bytes, str(config.model.dtype),
             config.cache.tokens_per_hash, config.cache.blocks_per_chunk,
             config.worker_kv_bytes_per_block, config.replicated_layout, config.canonical_layout,
             str(config.kv_cache_layout), parallel.world_size, parallel.tp_size, parallel.pp_size,
             parallel.pcp_size, parallel.dcp_size,
             [[group.group_id, group.tokens_per_block, list(group.layer_names)]
              for group in config.groups]]
    return identity.variant([*parts, *(vllm_model.parts(model) if model is not None else
                                       [identity.configs(Path(config.model.name))])])


class KvferryTier(SecondaryTierManager):
    """SecondaryTierManager over kvferryd. Where it cannot serve an engine (one warning says why)
    everything is a miss."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None, **given: Any):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = settings.read(Settings, given, WHERE)
        digest = settings.digest(self._settings.weights_digest, WHERE)
        self._warn_once = WarnOnce(logger)
        warning = identity.check_version("vllm", vllm.__version__, self._settings.allow_untested,
                                         WHERE)
        if warning is not None:
            self._warn_once(warning)
        self.counters = Counters()
        self._requests: Dict[str, Request] = {}
        self._batches: Dict[str, List[bytes]] = {}
        self._answers: "queue.SimpleQueue[Tuple[str, List[bytes], List[bool]]]" = (
            queue.SimpleQueue())
        self._done: "queue.SimpleQueue[Tuple[Any, JobResult, List[bytes]]]" = queue.SimpleQueue()
        config = offloading_spec.config
        self._tokens = {group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk
                        for group in config.groups}
        self._row_bytes = self.block_size_bytes
        self._rows = primary_kv_view.cast("B")
        self._lanes: List[Lane] = []
        try:
            self._open(config, digest)
        except Unsupported as why:
            self._warn_once(f"this engine's chunks are neither stored nor loaded: {why}")

    def _open(self, config: Any, digest: bytes) -> None:
        """Make the handles and the threads that use them."""
        own = self._settings
        if self._row_bytes > ROW_BYTES_MAX:
            raise Unsupported(f"a chunk has {self._row_bytes} bytes, and {ROW_BYTES_MAX} can be "
                              "kept: lower blocks_per_chunk")
        engine, more = engine_config.get(), listed(own.more_weights)
        if engine is None and not own.namespace:
            raise Unsupported(UNSEEN)
        if engine is not None:
            draft = draft_model(engine)
            if draft and (not more or Path(draft).is_dir()) and draft not in more:
                more = [*more, draft]  # by another name a folder of the list stands for it
            if not own.more_weights and getattr(engine, "lora_config", None) is not None:
                self._warn_once("LoRA is on: list the adapters' folders in more_weights, or "
                                "exchange none of them under its name")
        model = engine.model_config if engine is not None else None
        label = f"vllm-tier:{own.namespace}:{variant(config, self._row_bytes, model)}"
        if len(label.encode()) > LABEL_BYTES_MAX:
            most = LABEL_BYTES_MAX - len(label) + len(own.namespace)
            raise ValueError(f"{WHERE}: namespace is longer than {most} bytes")
        digest = weights(digest, config.model.name, more)

        def session(staging_bytes: int) -> Session:
            return Session(self._warn_once, lambda client: None, socket_path=own.socket,
                           name="vllm-tier", namespace_label=label, weights_digest=digest,
                           staging_bytes=staging_bytes)

        self._lookups = Lookups(session(LOAD_STAGING_BYTES), own.lookup_budget_ms)
        self._load_session, self._store_session = session(LOAD_STAGING_BYTES), session(
            own.staging_bytes)
        self._looking = Lane("lookup", self._look, self._lookups.tick)
        self._loading = Lane("load", lambda job: self._work(job, self._load),
                             lambda: self._rest(self._load_session))
        self._storing = Lane("store", lambda job: self._work(job[0], self._store, job[1]),
                             lambda: self._rest(self._store_session))
        self._lanes = [self._looking, self._loading, self._storing]

    @staticmethod
    def _rest(session: Session) -> None:
        """A handle has had nothing to do: has the daemon gone?"""
        tick(session.client() if session.is_open else None)

    # --- requests ---------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.pop(req_context.req_id, None)
        self._batches.pop(req_context.req_id, None)

    def _asks_for(self, req_context: Any, what: str) -> bool:
        """Whether a request has not said no to loads, or stores."""
        params = req_context.kv_transfer_params or {}
        return bool(self._lanes) and params.get(what) is not False

    def _note(self, key: bytes, req_context: Any) -> Request:
        """Remember where in its request a chunk is."""
        request = self._requests.setdefault(req_context.req_id, Request())
        position = req_context.get_offload_key_position(key)
        if position is not None:
            request.chain[self._group(key), position] = bytes(key)
        return request

    @staticmethod
    def _group(key: bytes) -> int:
        return int.from_bytes(key[-GROUP_BYTES:], "big")

    # --- lookups ----------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if not self._asks_for(req_context, "kvferry.load"):
            return LookupResult.MISS
        self._take_answers()
        request = self._note(key, req_context)
        asked = request.asked.get(key)
        if asked is None:
            asked = request.asked[bytes(key)] = Asked(time.monotonic())
            self._batches.setdefault(req_context.req_id, []).append(bytes(key))
        if asked.found is None:
            if (time.monotonic() - asked.since) * 1000 < self._settings.lookup_budget_ms:
                return LookupResult.RETRY
            asked.found = False  # late
        return LookupResult.HIT if asked.found else LookupResult.MISS

    def _take_answers(self) -> None:
        while not self._answers.empty():
            req_id, keys, found = self._answers.get()
            request = self._requests.get(req_id, Request())
            for key, there in zip(keys, found):
                asked = request.asked.get(key)
                if asked is not None and asked.found is None:
                    asked.found = there

    def on_schedule_end(self, context: Any) -> None:
        """Send off what has been asked in this step."""
        batches, self._batches = self._batches, {}
        for req_id, keys in batches.items():
            self._looking.put((req_id, keys))

    def _look(self, batch: Tuple[str, List[bytes]]) -> None:
        """On the thread of lookups. A prefix is one question; what is behind its end is asked
        for one by one, since windows and several groups do not begin at the start."""
        req_id, keys = batch
        found = [False] * len(keys)
        try:
            run = self._lookups.run(keys)
            found = [True] * run + [False] * (len(keys) - run)
            if 0 < len(keys) - run - 1:
                found[run + 1:] = self._lookups.each(keys[run + 1:])
        except Exception as error:  # whatever it is, the request must end
            self._warn_once(f"lookup: {error!r}")
        self._answers.put((req_id, keys, found))

    # --- jobs -------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        for key in job_metadata.keys:
            self._note(key, job_metadata.req_context)
        if self._asks_for(job_metadata.req_context, "kvferry.store"):
            chain = self._requests[job_metadata.req_context.req_id].chain
            self._storing.put((job_metadata, self._plan(job_metadata, chain)))
        else:
            self._fail(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        if self._lanes:
            self._loading.put(job_metadata)
        else:
            self._fail(job_metadata)

    def _fail(self, job: Any) -> None:
        self._done.put((job, JobResult(job.job_id, False), list(job.keys)))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that are over. A chunk that did not load is a miss for its request from then on."""
        results = []
        while not self._done.empty():
            job, result, failed = self._done.get()
            request = self._requests.get(job.req_context.req_id, Request())
            for key in failed:
                if key in request.asked:
                    request.asked[key].found = False
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        for lane in self._lanes[1:]:
            lane.drain()

    def _work(self, job: Any, run: Callable[..., List[bytes]], *how: Any) -> None:
        """On a thread: do a job, whatever happens tell of its end. run returns the keys that are
        good."""
        begin, keys = time.monotonic(), [bytes(key) for key in job.keys]
        good: List[bytes] = []
        try:
            good = run(job, keys, *how)
        except Exception as error:
            self._warn_once(f"job of {len(keys)} chunks: {error!r}")
        left = set(good)
        failed = [key for key in keys if key not in left]
        self._done.put((job, JobResult(
            job.job_id, not failed, successful_keys=tuple(good) if failed and good else None,
            transfer_time=time.monotonic() - begin,
            transfer_bytes=len(good) * self._row_bytes), failed))

    def _load(self, job: Any, keys: List[bytes]) -> List[bytes]:
        rows = job.chunk_ids.tolist()
        base = address(self._rows)

        def take(index: int, hit: Hit) -> bool:
            n_bytes = len(hit.payload)
            if n_bytes != self._row_bytes:
                self._warn_once(f"a chunk of {n_bytes} bytes is stored, not {self._row_bytes}")
                return False
            ctypes.memmove(base + rows[index] * self._row_bytes,
                           hit.record + hit.record_bytes - n_bytes, n_bytes)
            return True

        client = self._load_session.client()
        good = 0
        if client is not None:
            good = fetch(client, keys, self._settings.load_budget_ms, take)
            report(client, sum(self._tokens.get(self._group(key), 0) for key in keys[:good]),
                   len(keys) - good)
        self._lookups.fetched(keys)
        self.counters.loaded += good
        self.counters.failed += len(keys) - good
        return keys[:good]

    def _plan(self, job: Any, chain: Dict[Tuple[int, int], bytes]) -> List[List[Any]]:
        """A job's chunks as runs that follow one another: depth, parent, keys and rows."""
        runs: List[List[Any]] = []
        parts = []
        for key, row in zip(job.keys, job.chunk_ids.tolist()):
            position = job.req_context.get_offload_key_position(key)
            parts.append((self._group(key), position or 0, bytes(key), row))
        before: Optional[Tuple[int, int]] = None
        for group, position, key, row in sorted(parts):
            tokens = self._tokens.get(group, 0)
            if before is None or before != (group, position - tokens) or not tokens:
                depth = max(position // tokens - 1, 0) if tokens else 0
                runs.append([depth, chain.get((group, position - tokens)), [], []])
            runs[-1][2].append(key)
            runs[-1][3].append(row)
            before = group, position
        return runs

    def _store(self, job: Any, keys: List[bytes], runs: Sequence[Sequence[Any]]) -> List[bytes]:
        client = self._store_session.client()
        good: List[bytes] = []
        for depth, parent, of_run, rows in runs if client is not None else []:
            items = [Put(key, data=self._rows[row * self._row_bytes:(row + 1) * self._row_bytes])
                     for key, row in zip(of_run, rows)]
            stored = store(client, items, parent, depth, self._settings.store_budget_ms)
            good += [key for key, there in zip(of_run, stored) if there]
        self.counters.stored += len(good)
        self.counters.not_stored += len(keys) - len(good)
        return good

    # --- the end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the threads when what they were given is done, and let go of vLLM's memory."""
        for lane in self._lanes:
            lane.close()
        if self._lanes:
            self._lookups.close()
            self._load_session.close()
            self._store_session.close()
            self._lanes = []
        self._rows.release()
