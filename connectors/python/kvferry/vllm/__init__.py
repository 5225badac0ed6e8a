# SPDX-License-Identifier: Apache-2.0
"""The connector for vLLM: KV of prefixes goes to kvferryd and comes back from there.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

vLLM makes one object in the scheduler's process and one in each worker's. This file is the shell
that vLLM sees; scheduler.py and worker.py do the work and know nothing of vLLM's classes.
"""
import logging
import os
import time
from typing import Any, Dict, Iterable, Optional, Set, Tuple, Union

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole,
                                                               KVConnectorWorkerMetadata,
                                                               SupportsHMA)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (KVConnectorPromMetrics,
                                                                  KVConnectorStats)

from kvferry import SHARD_NONE, Client, KvferryError, Put, Status, identity, vllm_model
from kvferry.session import RETRY_MAX_S, RETRY_S, Session
from kvferry.vllm import facts as engine_facts
from kvferry.vllm import stats
from kvferry.vllm.adapters import Adapters
from kvferry.vllm.drift import Drift, Fetch, fetch_host
from kvferry.vllm.events import Change
from kvferry.vllm.jobs import Report, Step
from kvferry.vllm.scheduler import Scheduler
from kvferry.vllm.settings import Settings
from kvferry.vllm.stats import Since
from kvferry.vllm.worker import LOAD_STAGING_BYTES, Worker, make_session
from kvferry.vllm.worker_gpu import GpuWorker, TorchDevice
from kvferry.warning import WarnOnce

logger = logging.getLogger("vllm.kvferry")
NONE_HASH_KEY = b"vllm first parent hash, of 1"
HASH_NAMESPACE_LABEL = "vllm-hash"
HASH_BUDGET_MS = 200  # of each call, once in an engine's life, and again where it fails
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # vLLM looks at the older name, PYTORCH_CUDA_ALLOC_CONF, alone


class KvferryMetadata(Step, KVConnectorMetadata):
    """A step, as vLLM carries it from the scheduler to the workers."""


class KvferryWorkerMetadata(KVConnectorWorkerMetadata):
    """A report, as vLLM carries it back."""

    def __init__(self, report: Report):
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvferryWorkerMetadata":
        assert isinstance(other, KvferryWorkerMetadata)
        self.report.merge(other.report)
        return self


class KvferryStats(KVConnectorStats):
    """Numbers of an interval, by the names of stats.py."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KvferryStats":
        stats.add(self.data, other.data)
        return self

    def reduce(self) -> Dict[str, Any]:
        return stats.reduce(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvferryPromMetrics(KVConnectorPromMetrics):
    """The same numbers as counters vllm:kvferry_... of each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any,
                 per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in stats.TEXTS.items():
            unit = name[:-2] + "_seconds" if name.endswith("_s") else name
            counter = self._counter_cls(name=stats.PREFIX + unit, documentation=text,
                                        labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values)
                                    for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: Dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)


def kv_event(change: Change) -> Any:
    """A change as vLLM tells it, with the fields that this version's events have."""
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    chunk = change.chunk
    kind = kv_events.BlockStored if change.is_stored else kv_events.BlockRemoved
    said = {"block_hashes": [maybe_convert_block_hash(part) for part in chunk.hashes],
            "medium": kv_events.MEDIUM_CPU, "group_idx": 0, "locality": "LOCAL",
            "ownership": "kvferry"}
    if change.is_stored:
        parent = chunk.parent
        said.update(parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=chunk.tokens, block_size=len(chunk.tokens) // len(chunk.hashes),
                    lora_id=chunk.lora_id, lora_name=chunk.lora_name)
    return kind(**{name: value for name, value in said.items()
                   if name in kind.__struct_fields__})


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """KVConnectorBase_V1 over kvferryd. With an engine that is not served (hybrid layers, pipeline
    parallelism, ...: one warning says which) it answers 0 to everything, and the engine runs on."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.read(transfer.kv_connector_extra_config or {})
        self._warn_once = WarnOnce(logger)
        warning = identity.check_version("vllm", vllm.__version__, self._settings.allow_untested)
        if warning is not None:
            self._warn_once(warning)
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError("kv_load_failure_policy is "
                             f"{transfer.kv_load_failure_policy!r}: a block may be gone when it is "
                             'to be loaded, and its request would fail; set it to "recompute"')
        self._scheduler: Optional[Scheduler] = None
        self._worker: Union[Worker, GpuWorker, None] = None
        self._drift: Optional[Drift] = None
        self._bad_pages: Set[int] = set()
        self._report = Report()
        self._none_hash_checked = False
        self._none_hash_next, self._none_hash_wait = 0.0, RETRY_S  # when to try again
        self._since = Since()
        events = getattr(vllm_config, "kv_events_config", None)
        self._tells = events is not None and bool(events.enable_kv_cache_events)
        self._facts: Optional[engine_facts.Facts] = None
        try:
            self._facts = self._read_facts(role == KVConnectorRole.WORKER)
            self._digest = self._weights_digest()
        except engine_facts.Unsupported as why:
            self._disable(why)
        if self._facts is not None and role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(self._facts, self._settings, self._session(SHARD_NONE)(),
                                        Adapters(self._warn_once).digest, self._warn_once,
                                        self._tells)

    def _profile(self) -> str:
        """The profile to ask for. What vLLM has quantized is never quantized twice."""
        assert self._facts is not None
        if self._facts.geometry.dtype == "u8" and self._settings.profile != "exact":
            dtype = self._vllm_config.cache_config.cache_dtype
            self._warn_once(f"vLLM quantizes KV itself ({dtype}): it is kept without loss, as "
                            f'"exact" and not as "{self._settings.profile}"')
            return "exact"
        return self._settings.profile

    # --- set-up -----------------------------------------------------------------------------------

    def _disable(self, why: engine_facts.Unsupported) -> None:
        self._facts = None
        self._warn_once(f"this engine's KV is neither stored nor loaded: {why}")

    def _read_facts(self, is_worker: bool) -> engine_facts.Facts:
        rank = 0
        if is_worker:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
            rank = get_tensor_model_parallel_rank()
        device = self._vllm_config.device_config.device_type
        if device not in ("cpu", "cuda"):
            raise engine_facts.Unsupported(f"device {device}")
        if device == "cuda" and "expandable_segments:True" in os.environ.get(ALLOCATOR, ""):
            self._warn_once(f"{ALLOCATOR} has expandable_segments:True, under which vLLM refuses "
                            "connectors (it knows the older name of the variable): unset it, or "
                            "start vLLM with --enable-cumem-allocator")
        layout = self._cpu_layout() if device == "cpu" else ""
        return engine_facts.read(self._vllm_config, self._kv_cache_config, self._settings, device,
                                 rank, layout)

    def _cpu_layout(self) -> str:
        """How this build's kernels arrange a page: version and instruction set."""
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
        group = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if not hasattr(group, "head_size"):
            return ""
        isa = _get_attn_isa(group.dtype, group.block_size, group.head_size,
                            self._vllm_config.cache_config.cache_dtype)
        return f"{vllm.__version__.split('+')[0]}-{isa}"

    def _weights_digest(self) -> bytes:
        if self._settings.weights_digest:
            return self._settings.digest()
        folder = vllm_model.folder(self._vllm_config.model_config)
        digest = identity.folder_digest(folder) if folder is not None else None
        if digest is None:
            raise engine_facts.Unsupported("the model is no local folder with weights that can be "
                                           "read; set weights_digest in kv_connector_extra_config "
                                           "to something that changes with the weights")
        return digest

    def _session(self, shard: int) -> Any:
        """What makes sessions of this engine."""
        facts, settings = self._facts, self._settings
        assert facts is not None
        return make_session(self._warn_once, socket_path=settings.socket, profile=self._profile(),
                            geometry=facts.geometry, name="vllm", namespace_label=facts.label,
                            weights_digest=self._digest, shard=shard,
                            shard_count=facts.shard_count,
                            staging_bytes=0 if shard == SHARD_NONE else settings.staging_bytes,
                            allow_uncalibrated=settings.allow_uncalibrated,
                            on_open=self._connected)

    def _connected(self, client: Client) -> None:
        """The daemon has taken the handle: what is in force."""
        info = client.info()
        if self._facts is not None and self._facts.opaque and not info.lossless:
            raise KvferryError(Status["ERR_UNSUPPORTED"],
                               f"profile {info.profile} with pages of the CPU backend, in which "
                               'tokens cannot be told apart: set profile to "exact"')
        if info.profile != self._profile():
            self._warn_once(f"profile {info.profile} in place of {self._settings.profile}: "
                            f"{info.profile_text}")
        if self._scheduler is not None:
            self._scheduler.connected(info.profile, info.lossless)

    # --- statistics and events --------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Optional[KvferryStats]:
        """What this side has counted since it was last asked."""
        side = self._worker or self._scheduler
        grown = self._since.take(side.counters) if side is not None else None
        return KvferryStats(data=grown) if grown is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[Dict[str, Any]] = None) -> KvferryStats:
        return KvferryStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any,
                           per_engine_labelvalues: Any) -> KvferryPromMetrics:
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        """What has been stored and what is gone, as vLLM's KV events, if it wants them."""
        ledger = self._scheduler.ledger if self._scheduler is not None else None
        return [kv_event(change) for change in ledger.take()] if ledger is not None else ()

    # --- what vLLM asks of the class --------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is dropped is a miss some day."""
        return False

    # --- the worker's side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        if self._facts is None:
            return
        try:
            pages = engine_facts.pages(self._facts, kv_caches)
        except (engine_facts.Unsupported, KeyError) as why:
            self._disable(engine_facts.Unsupported(str(why)))
            return
        facts, session = self._facts, self._session(self._facts.shard)
        if facts.device == "cuda":
            n_pages, device = int(next(iter(kv_caches.values())).shape[0]), TorchDevice()
            tokens = int(self._vllm_config.scheduler_config.max_num_batched_tokens)
            self._worker = GpuWorker(pages, n_pages, session, facts.stores, device,
                                     self._warn_once, tokens * engine_facts.token_bytes(facts),
                                     self._settings.gpu_ring_bytes)
            fetch: Fetch = device.fetch
        else:
            self._worker = Worker(pages, session, facts.stores, self._warn_once)
            fetch = fetch_host(pages)
        if facts.stores:
            self._drift = Drift(pages, facts.geometry,
                                engine_facts.ITEM_BYTES[facts.geometry.dtype], fetch,
                                lambda: session(staging_bytes=LOAD_STAGING_BYTES),
                                self._warn_once)

    def _step(self) -> Optional[Step]:
        if self._worker is None or not self.has_connector_metadata():
            return None
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        for job in step.loads if step is not None else []:
            assert self._worker is not None
            self._worker.load(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their request runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        """Stores begin when the whole step has run."""

    def wait_for_save(self) -> None:
        step = self._step()
        if step is None:
            return
        assert self._worker is not None
        began = time.monotonic()
        self._worker.store(step.stores, step.lossless)
        if step.again is not None and self._drift is not None:
            self._drift.look(step.again)
        if step.number:
            self._report.ran[step.number] = time.monotonic() - began

    def get_finished(self, finished_req_ids: Set[str]) -> Tuple[Optional[Set[str]],
                                                                Optional[Set[str]]]:
        if self._worker is None:
            return None, None
        self._worker.idle()
        assert self._facts is not None
        requests, bad, report = self._worker.finished()
        report.stored = {key: 1 << self._facts.shard for key in report.stored}
        self._bad_pages |= bad
        self._report.merge(report)
        return None, requests or None

    def get_block_ids_with_load_errors(self) -> Set[int]:
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def build_connector_worker_meta(self) -> Optional[KVConnectorWorkerMetadata]:
        if not self._tells:
            self._report.stored.clear()
        if not self._report.failed and not self._report.stored and not self._report.ran:
            return None
        report, self._report = self._report, Report()
        return KvferryWorkerMetadata(report)

    def shutdown(self) -> None:
        if self._drift is not None:
            self._drift.close()
            self._drift = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    # --- the scheduler's side ---------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        if self._scheduler is None:
            return 0, False
        answer = self._scheduler.matched_tokens(request, num_computed_tokens)
        self._check_none_hash(self._scheduler)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any,
                                 num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any,
                                       num_external_tokens: int) -> Dict[Any, int]:
        """The tier of a hit, for vLLM's metrics of its prefix cache."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
        if self._scheduler is None or num_external_tokens == 0:
            return {}
        is_from_drive = self._scheduler.is_from_drive(request.request_id)
        return {CacheHitSource.DISK if is_from_drive else CacheHitSource.HOST: num_external_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        made = KvferryMetadata()
        if self._scheduler is not None:
            vars(made).update(vars(self._scheduler.step(scheduler_output)))
        return made

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            meta = connector_output.kv_connector_worker_meta
            report = meta.report if isinstance(meta, KvferryWorkerMetadata) else None
            self._scheduler.loaded(set(connector_output.finished_recving or ()), report)

    def request_finished(self, request: Any,
                         block_ids: Any) -> Tuple[bool, Optional[Dict[str, Any]]]:
        """Nothing is read from the pages of a request that is over: they are free at once."""
        if self._scheduler is None:
            return False, None
        return False, dict(self._scheduler.finished(request)) or None

    def request_finished_all_groups(self, request: Any,
                                    block_ids: Any) -> Tuple[bool, Optional[Dict[str, Any]]]:
        return self.request_finished(request, block_ids)

    def reset_cache(self) -> Optional[bool]:
        """What is stored may be of other engines too, and stays."""
        self._warn_once("the daemon's blocks are kept: `kvferry purge` forgets a namespace")
        return False

    def _check_none_hash(self, scheduler: Scheduler) -> None:
        """When there is a daemon, compare the hash that all chains begin with to the one of the
        engines that have stored here before. Where they differ nothing will ever be found, and
        nothing else says so."""
        if self._none_hash_checked or not scheduler.is_attached():
            return
        now = time.monotonic()
        if now < self._none_hash_next:
            return
        self._none_hash_next = now + self._none_hash_wait
        self._none_hash_wait = min(2 * self._none_hash_wait, RETRY_MAX_S)
        self._none_hash_checked = True
        from vllm.v1.core import kv_cache_utils
        mine = bytes(kv_cache_utils.NONE_HASH)
        try:
            with Client(self._settings.socket, namespace_label=HASH_NAMESPACE_LABEL,
                        weights_digest=self._digest,
                        connect_timeout_ms=HASH_BUDGET_MS) as client:
                hit, = client.get([NONE_HASH_KEY], HASH_BUDGET_MS)
                if hit.status != 0:
                    client.put([Put(NONE_HASH_KEY, data=mine)], budget_ms=HASH_BUDGET_MS)
                    return
                theirs = bytes(hit.payload)
                if client.release(hit.lease) and theirs != mine:
                    self._warn_once("this engine's block hashes begin otherwise than those of what "
                                    "is stored for this model, which will not be found: use the "
                                    "same PYTHONHASHSEED and --prefix-caching-hash-algo everywhere")
        except KvferryError:
            self._none_hash_checked = False
