# SPDX-License-Identifier: Apache-2.0
"""What the connector needs to know of a vLLM engine: the only place that reads its configuration.

Scheduler and workers read the same and must come to the same: namespace and chunks follow from it.
"""
from dataclasses import dataclass
from typing import Any, List, Optional

from kvferry import identity, vllm_model
from kvferry.buffers import Pages, Strides, address, strides_bytes
from kvferry.client import CHUNK_TOKENS_MAX, Geometry
from kvferry.vllm.settings import Settings
from kvferry.vllm_model import Unsupported

DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}
ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1}
PAYLOAD_BYTES_MAX = 62 << 20  # of the 64 MiB of a block; the rest is for what codecs add
LABEL_BYTES_MAX = 63


@dataclass(frozen=True)
class Facts:
    """An engine as seen by the connector."""

    layers: List[str]
    block_tokens: int
    geometry: Geometry
    label: str
    shard: int
    shard_count: int
    stores: bool  # False: another rank has the same KV and writes it
    opaque: bool  # tokens cannot be told apart inside a page: lossless profiles only
    device: str


def layer_number(name: str) -> List[Any]:
    """Sorts "model.layers.10.attn" behind "model.layers.9.attn"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _unsupported(config: Any) -> Optional[str]:
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size is {parallel.pipeline_parallel_size}"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}"
    if config.speculative_config is not None:
        return "speculative decoding is on"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off, so that requests have no block hashes"
    return None


def _spec(cache_config: Any) -> Any:
    """The one kind of attention that all layers have."""
    groups = cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(f"the model has {len(groups)} KV cache groups (of hybrid layers)")
    spec = groups[0].kv_cache_spec
    if hasattr(spec, "kv_cache_specs"):
        specs = list(spec.kv_cache_specs.values())
        if any(other != specs[0] for other in specs):
            raise Unsupported("layers have KV of different shapes")
        spec = specs[0]
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise Unsupported(f"layers have {kind}")
    if getattr(spec, "page_size_padded", None) not in (None, spec.page_size_bytes):
        raise Unsupported("pages are padded")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise Unsupported("pages do not have one row a token")
    return spec


def _dtype(spec: Any) -> str:
    mode = getattr(spec, "kv_quant_mode", None)
    if mode is not None and getattr(mode, "value", 0) not in (0, "none"):
        return "u8"  # quantized by the engine: never twice
    return DTYPES.get(str(spec.dtype), "u8")


def token_bytes(facts: Facts) -> int:
    """Of KV of a token, on one rank."""
    g = facts.geometry
    return g.n_layers * g.n_heads * (g.dim_k + g.dim_v) * ITEM_BYTES[g.dtype]


def chunk_tokens(settings: Settings, block: int, token_bytes: int) -> int:
    """Tokens of a chunk: a multiple of the block whose KV fits into one block of ours."""
    most = min(CHUNK_TOKENS_MAX, PAYLOAD_BYTES_MAX // token_bytes)
    if settings.chunk_tokens == 0:
        if most < block:
            raise Unsupported(f"a block of {block} tokens is more than a chunk can hold ({most})")
        return most - most % block
    if settings.chunk_tokens % block != 0 or settings.chunk_tokens > most:
        raise ValueError(f"kv_connector_extra_config: chunk_tokens is {settings.chunk_tokens}, not "
                         f"a multiple of the engine's block of {block} and at most {most}")
    return settings.chunk_tokens


def variant(model: Any, pages_are: List[str]) -> str:
    """A name for what changes KV, or its bytes, under the same weights."""
    return identity.variant([*vllm_model.parts(model), pages_are])


def read(config: Any, cache_config: Any, settings: Settings, device: str, rank: int,
         cpu_layout: str = "") -> Facts:
    """Facts of an engine; rank is the tensor-parallel one (0 in the scheduler). device is "cuda" or
    "cpu", and cpu_layout names how the CPU's kernels arrange a page. Unsupported says why not."""
    reason = _unsupported(config)
    if reason is not None:
        raise Unsupported(reason)
    spec = _spec(cache_config)
    dtype = _dtype(spec)
    layers = sorted(cache_config.kv_cache_groups[0].layer_names, key=layer_number)
    block = int(spec.block_size)
    heads, dim_k, dim_v = int(spec.num_kv_heads), int(spec.head_size), int(spec.head_size_v)
    kind, tp, replicated = "kv", int(config.parallel_config.tensor_parallel_size), False
    if type(spec).__name__ == "MLAAttentionSpec":
        latent = getattr(config.model_config.hf_text_config, "kv_lora_rank", None)
        if dtype == "u8" or latent is None or device == "cpu":
            raise Unsupported("this kind of MLA cache has no layout that is known")
        kind, heads, dim_k, dim_v, replicated = "mla", 1, latent, dim_k - latent, True
    elif tp > 1 and heads * tp > config.model_config.get_total_num_kv_heads():
        raise Unsupported("KV heads are replicated over tensor-parallel ranks")
    token_bytes = len(layers) * heads * (dim_k + dim_v) * ITEM_BYTES[dtype]
    geometry = Geometry(len(layers), heads, dim_k, dim_v,
                        chunk_tokens(settings, block, token_bytes), dtype=dtype, kind=kind)
    # Bytes of one kind of quantization, or of one arrangement, are nothing to another one.
    how = [f"{cpu_layout}-{block}" if device == "cpu" else "",
           str(config.cache_config.cache_dtype) if dtype == "u8" else ""]
    label = f"vllm:{settings.namespace}:{variant(config.model_config, how)}"
    if len(label.encode()) > LABEL_BYTES_MAX:
        raise ValueError(f"kv_connector_extra_config: namespace is longer than "
                         f"{LABEL_BYTES_MAX - len(label) + len(settings.namespace)} bytes")
    return Facts(layers, block, geometry, label, 0 if replicated else rank,
                 1 if replicated else tp, not replicated or rank == 0, device == "cpu", device)


def pages(facts: Facts, tensors: Any) -> Pages:
    """Where K and V of each layer are in the engine's tensors, logically (block, head, token,
    K and V), or (block, token, latent) for MLA. Unsupported: not as this says."""
    g = facts.geometry
    item = ITEM_BYTES[g.dtype]
    row = (g.dim_k + g.dim_v) * item
    shapes = {tuple(tensors[name].shape) + strides_bytes(tensors[name]) for name in facts.layers}
    if len(shapes) != 1:
        raise Unsupported("tensors of layers differ in shape or strides")
    first = tensors[facts.layers[0]]
    shape, strides = tuple(first.shape), strides_bytes(first)
    if len(shape) == 3:
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
    if shape[1:] != (g.n_heads, facts.block_tokens, g.dim_k + g.dim_v) or strides[3] != item:
        raise Unsupported(f"pages have shape {shape[1:]}, strides {strides}")
    bases = [address(tensors[name]) for name in facts.layers]
    page, head, token, _ = strides
    offset_v = g.dim_k * item
    if facts.opaque:
        # The CPU's kernels keep K of a head in the first half of its part of a page and V in the
        # second, arranged in their own ways. Rows are not tokens, but all bytes are in them.
        if token != row or g.dim_k != g.dim_v:
            raise Unsupported("pages of the CPU backend are not dense")
        token, offset_v = g.dim_k * item, facts.block_tokens * g.dim_k * item
    made = Pages(facts.block_tokens, Strides(tuple(bases), page, token, head),
                 Strides(tuple(base + offset_v for base in bases), page, token, head))
    made.owners = [tensors[name] for name in facts.layers]
    return made
