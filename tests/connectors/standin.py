# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM: base classes made from vllm_interface.json, and an engine of a few lines.

The engine calls a connector in the order of vLLM's scheduler and model runner, over pages whose
bytes follow from tokens, so that every byte can be checked. It computes nothing.
"""
import abc
import enum
import hashlib
import json
import math
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
PREFIX = "vllm.distributed.kv_transfer.kv_connector.v1.base"
WAIT_STEPS = 60_000
WAIT_S = 120


def _method(name, facts):
    def body(self, *args, **kwargs):
        raise AssertionError(f"{name} of the base class was called")
    body.__isabstractmethod__ = facts["abstract"]
    if facts["kind"] == "method":
        return body
    return {"property": property, "classmethod": classmethod, "staticmethod": staticmethod}[
        facts["kind"]](body)


def _class(name, methods, base=abc.ABC):
    made = {m: _method(m, facts) for m, facts in methods.items() if m != "__init__"}
    return abc.ABCMeta(name, (base,), made)


def _connector_base(methods):
    base = _class("KVConnectorBase_V1", methods)

    def init(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._connector_metadata = None

    def bind(self, metadata):
        self._connector_metadata = metadata

    base.__init__ = init
    base.bind_connector_metadata = bind
    base.clear_connector_metadata = lambda self: bind(self, None)
    base.has_connector_metadata = lambda self: self._connector_metadata is not None
    base._get_connector_metadata = lambda self: self._connector_metadata
    base.handle_preemptions = lambda self, metadata: None
    return base


def _metrics(methods):
    """The base classes of statistics."""
    made = {name: _class(name, methods[name]) for name in ("KVConnectorStats",
                                                           "KVConnectorPromMetrics")}

    def init(self, data=None):
        self.data = data if data is not None else {}

    def init_metrics(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._counter_cls = metric_types["counter"]

    made["KVConnectorStats"].__init__ = init
    made["KVConnectorPromMetrics"].__init__ = init_metrics
    return made


def install(version):
    """Put the stand-in where `import vllm` finds it."""
    known = json.loads((HERE / "vllm_interface.json").read_text(encoding="utf-8"))
    methods = known["methods"]
    parts = PREFIX.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:i])] = types.ModuleType(".".join(parts[:i]))
    sys.modules["vllm"].__version__ = version
    base = sys.modules[PREFIX]
    base.KVConnectorBase_V1 = _connector_base(methods["KVConnectorBase_V1"])
    base.SupportsHMA = _class("SupportsHMA", methods["SupportsHMA"])
    base.KVConnectorMetadata = abc.ABCMeta("KVConnectorMetadata", (abc.ABC,), {})
    base.KVConnectorWorkerMetadata = _class("KVConnectorWorkerMetadata",
                                            methods["KVConnectorWorkerMetadata"])
    base.KVConnectorRole = enum.Enum("KVConnectorRole", {"SCHEDULER": 0, "WORKER": 1})
    events = {name: type(name, (SimpleNamespace,), {"__struct_fields__": known["fields"][name]})
              for name in ("BlockStored", "BlockRemoved")}
    for name, what in ((PREFIX.replace(".base", ".metrics"), _metrics(methods)),
                       ("vllm.distributed.kv_events", {**events, "MEDIUM_CPU": "CPU"}),
                       ("vllm.distributed.parallel_state",
                        {"get_tensor_model_parallel_rank": lambda: install.rank}),
                       ("vllm.v1.metrics.cache_hit_source",
                        {"CacheHitSource": enum.Enum("CacheHitSource", ("HOST", "DISK"))}),
                       ("vllm.v1.attention.backends.cpu_attn",
                        {"_get_attn_isa": lambda *facts: "vec"}),
                       ("vllm.v1.core.kv_cache_utils",
                        {"NONE_HASH": bytes(32), "maybe_convert_block_hash": lambda part: part})):
        module = types.ModuleType(name)
        module.__dict__.update(what)
        path = name.split(".")
        for i in range(1, len(path)):
            sys.modules.setdefault(".".join(path[:i]), types.ModuleType(".".join(path[:i])))
        sys.modules[name] = module
    sys.modules["vllm.v1.core"].kv_cache_utils = sys.modules["vllm.v1.core.kv_cache_utils"]
    sys.modules["vllm.distributed"].kv_events = sys.modules["vllm.distributed.kv_events"]


install.rank = 0


class FullAttentionSpec(SimpleNamespace):
    """Facts of layers, by the name that the connector knows."""


class MLAAttentionSpec(FullAttentionSpec):
    """Of a latent."""


class SlidingWindowSpec(FullAttentionSpec):
    """Of the last tokens only."""


class MambaSpec(FullAttentionSpec):
    """Of a state."""


class Array:
    """Pages in a bytearray: shape, strides and an address."""

    def __init__(self, shape, item):
        size = item
        strides = []
        for n in reversed(shape):
            strides.insert(0, size)
            size *= n
        import kvferry
        self.memory, self.shape, self.strides = bytearray(size), tuple(shape), tuple(strides)
        self.__array_interface__ = {"data": (kvferry.buffers.address(self.memory), False)}

    def page(self, i):
        return memoryview(self.memory)[i * self.strides[0]:(i + 1) * self.strides[0]]


class Request:
    """What a connector sees of a request; tokens are numbers that stand for content."""

    def __init__(self, name, tokens, block, prompt=None, **more):
        self.request_id, self.tokens, self.block = name, list(tokens), block
        self.num_prompt_tokens = len(self.tokens) if prompt is None else prompt
        self.mm_features, self.prompt_embeds, self.lora_request = [], None, None
        self.sampling_params, self.kv_transfer_params = None, None
        self.skip_reading_prefix_cache = False
        self.__dict__.update(more)

    @property
    def all_token_ids(self):
        return self.tokens

    @property
    def num_tokens(self):
        return len(self.tokens)

    @property
    def block_hashes(self):
        hashes, parent = [], b""
        for i in range(len(self.tokens) // self.block):
            text = repr(self.tokens[i * self.block:(i + 1) * self.block]).encode()
            parent = hashlib.sha256(parent + text).digest()
            hashes.append(parent)
        return hashes


class Engine:
    """One scheduler's connector and one worker's for each rank, and the order of calls."""

    BLOCK, HEADS, DIM, LAYERS, PAGES = 16, 2, 64, 2, 128
    LATENT, ROPE = 128, 64  # of models with MLA
    DEVICE = "cpu"

    def __init__(self, extra, tp=1, **changes):
        from kvferry.vllm import KvferryConnector
        role = sys.modules[PREFIX].KVConnectorRole
        self.tp, self.arrays, self.free = tp, [], list(range(self.PAGES))
        config, cache = self.config(extra, tp, changes)
        install.rank = 0
        self.scheduler = KvferryConnector(config, role.SCHEDULER, cache)
        self.workers = []
        for rank in range(tp):
            install.rank = rank
            worker = KvferryConnector(config, role.WORKER, cache)
            arrays = [self.make_array() for _ in range(self.LAYERS)]
            worker.register_kv_caches({f"layers.{i}.attn": a for i, a in enumerate(arrays)})
            self.workers.append(worker)
            self.arrays.append(arrays)
        self.bad, self.received, self.done, self.table = set(), {}, set(), {}

    def groups(self, kind, cache_dtype):
        """KV cache groups of a model of a kind."""
        layers = [f"layers.{i}.attn" for i in range(self.LAYERS)]
        facts = {"block_size": self.BLOCK, "num_kv_heads": self.HEADS, "head_size": self.DIM,
                 "head_size_v": self.DIM, "dtype": "torch.bfloat16", "kv_quant_mode": None,
                 "page_size_bytes": self.BLOCK * self.HEADS * self.DIM * 4,
                 "page_size_padded": None}
        if cache_dtype != "auto":
            facts.update(dtype="torch.uint8", kv_quant_mode=SimpleNamespace(value=1))
        specs = {"dense": FullAttentionSpec, "mla": MLAAttentionSpec,
                 "window": SlidingWindowSpec, "mamba": MambaSpec}
        if kind == "mla":
            facts.update(num_kv_heads=1, head_size=self.LATENT + self.ROPE, head_size_v=0,
                         page_size_bytes=self.BLOCK * (self.LATENT + self.ROPE) * 2)
        if kind == "hybrid":
            return [SimpleNamespace(layer_names=[name], kv_cache_spec=specs[one](**facts))
                    for name, one in zip(layers, ("dense", "window"))]
        return [SimpleNamespace(layer_names=layers, kv_cache_spec=specs[kind](**facts))]

    def config(self, extra, tp, changes):
        facts = {"pipeline_parallel_size": 1, "speculative_config": None,
                 "policy": "recompute", "prefix": True, "dcp": 1, "model": "nowhere",
                 "events": False, "kind": "dense", "cache_dtype": "auto",
                 "quantization": None, "hf_overrides": {}, "max_model_len": 4096, **changes}
        facts.setdefault("groups", self.groups(facts["kind"], facts["cache_dtype"]))
        self.shape, self.item = (self.HEADS, self.BLOCK, 2 * self.DIM), 2
        if facts["kind"] == "mla":
            self.shape = (self.BLOCK, self.LATENT + self.ROPE)
        self.is_replicated = facts["kind"] == "mla"
        if facts["cache_dtype"] != "auto":
            self.item = 1
        parallel = SimpleNamespace(pipeline_parallel_size=facts["pipeline_parallel_size"],
                                   tensor_parallel_size=tp, prefill_context_parallel_size=1,
                                   decode_context_parallel_size=facts["dcp"])
        model = SimpleNamespace(model=facts["model"], dtype="torch.bfloat16",
                                quantization=facts["quantization"],
                                hf_overrides=facts["hf_overrides"],
                                max_model_len=facts["max_model_len"],
                                hf_text_config=SimpleNamespace(kv_lora_rank=self.LATENT),
                                get_total_num_kv_heads=lambda: self.HEADS * tp)
        return SimpleNamespace(
            parallel_config=parallel, model_config=model,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
            speculative_config=facts["speculative_config"],
            kv_events_config=SimpleNamespace(enable_kv_cache_events=facts["events"]),
            cache_config=SimpleNamespace(enable_prefix_caching=facts["prefix"],
                                         cache_dtype=facts["cache_dtype"]),
            device_config=SimpleNamespace(device_type=self.DEVICE),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra,
                                               kv_load_failure_policy=facts["policy"])
        ), SimpleNamespace(kv_cache_groups=facts["groups"])

    # --- pages ------------------------------------------------------------------------------------

    def make_array(self):
        """The pages of one layer."""
        return Array((self.PAGES, *self.shape), self.item)

    def content(self, request, block, rank, layer):
        """The bytes of a page that the model would compute."""
        name = request.block_hashes[block] + bytes([0 if self.is_replicated else rank, layer])
        size = math.prod(self.shape) * self.item
        seed = hashlib.sha256(name).digest()
        return (seed * (size // 32 + 1))[:size]

    @staticmethod
    def numbers(content):
        """The same as bf16 numbers that are near one: bytes at random are no numbers at times."""
        return bytes(byte if i % 2 == 0 else 0x3f for i, byte in enumerate(content))

    def compute(self, request, first, end):
        """Fill the pages of blocks first..end - 1."""
        for rank, arrays in enumerate(self.arrays):
            for layer, array in enumerate(arrays):
                for block in range(first, end):
                    array.page(self.table[request.request_id][block])[:] = self.content(
                        request, block, rank, layer)

    def holds(self, request, first, end):
        """Whether the pages of blocks first..end - 1 are what the model would compute."""
        return all(array.page(self.table[request.request_id][block])
                   == self.content(request, block, rank, layer)
                   for rank, arrays in enumerate(self.arrays)
                   for layer, array in enumerate(arrays) for block in range(first, end))

    # --- the order of calls -----------------------------------------------------------------------

    def ask(self, request, computed=0):
        """get_num_new_matched_tokens until it says something; how often it said None."""
        for nones in range(WAIT_STEPS):
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
            if tokens is not None:
                assert is_async == (tokens > 0)
                return tokens, nones
            self.step({})
        raise AssertionError("None for ever")

    def allocate(self, request, external=0):
        blocks = -(-request.num_tokens // self.BLOCK)
        table = self.table.setdefault(request.request_id, [])
        while len(table) < blocks:
            table.append(self.free.pop())
        self.scheduler.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: (list(table),)), external)

    def step(self, new=None, cached=None, compute=()):
        """A step: new and cached are {request: (computed, scheduled)}."""
        new, cached = new or {}, cached or {}
        table = self.table
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id,
                                                block_ids=(list(table[r.request_id]),),
                                                num_computed_tokens=c)
                                for r, (c, _) in new.items()],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached],
                new_block_ids=[(list(table[r.request_id]),) for r in cached],
                resumed_req_ids={r.request_id for r in cached},
                num_computed_tokens=[c for c, _ in cached.values()]),
            num_scheduled_tokens={r.request_id: n for r, (_, n) in {**new, **cached}.items()})
        metadata = self.scheduler.build_connector_meta(output)
        for request, first, end in compute:
            self.compute(request, first, end)
        received, bad, reports = [], set(), []
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            sent, got = worker.get_finished(set())
            assert sent is None
            received += got or ()
            bad |= worker.get_block_ids_with_load_errors()
            reports.append(worker.build_connector_worker_meta())
            worker.clear_connector_metadata()
        self.bad |= bad
        self.scheduler.update_connector_output(
            SimpleNamespace(finished_recving=self.all_ranks(received), invalid_block_ids=bad,
                            kv_connector_worker_meta=self.merged(reports)))
        return metadata

    def all_ranks(self, received):
        """Requests that all ranks have received by now."""
        done = set()
        for name in received:
            self.received[name] = self.received.get(name, 0) + 1
            if self.received[name] == self.tp:
                del self.received[name]
                done.add(name)
        self.done |= done
        return done

    @staticmethod
    def merged(reports):
        made = None
        for report in reports:
            if report is not None:
                made = report if made is None else made.aggregate(report)
        return made

    def prefill(self, request, computed=0):
        """Compute a whole prompt in one step, the first `computed` tokens not."""
        self.allocate(request)
        whole = request.num_tokens // self.BLOCK
        self.step({request: (computed, request.num_tokens - computed)},
                  compute=[(request, computed // self.BLOCK, whole)])
        self.settle()

    def settle(self):
        """Wait until the daemon has answered all stores."""
        end = time.monotonic() + WAIT_S
        for worker in self.workers:
            while worker._worker is not None:
                worker._worker.idle()
                c = worker._worker.counters
                if c.stored + c.present + c.refused == c.handed:
                    break
                assert time.monotonic() < end, "stores do not end"
                time.sleep(0.001)

    def load(self, request, computed=0):
        """Ask, allocate, load, wait for the end: hit tokens."""
        tokens, _ = self.ask(request, computed)
        self.allocate(request, tokens)
        if tokens:
            self.wait_load(request)
        return tokens

    def wait_load(self, request):
        end = time.monotonic() + WAIT_S
        while request.request_id not in self.done:
            assert time.monotonic() < end, "a load does not end"
            self.step({})
            time.sleep(0.001)
        self.done.remove(request.request_id)

    def finish(self, request):
        """The request is over: what its response carries."""
        delay, params = self.scheduler.request_finished_all_groups(request, ([],))
        assert delay is False
        self.free += self.table.pop(request.request_id, [])
        return params

    def close(self):
        for connector in (self.scheduler, *self.workers):
            connector.shutdown()
