# SPDX-License-Identifier: Apache-2.0
"""What the backend needs to know of an SGLang engine: the only place that reads its configuration,
and its host pools.

Pages of attention are described to the library as they lie, so that they are encoded out of the
host pool and decoded into it. Pages of other pools (states) are bytes in SGLang's own order.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from kvferry import identity
from kvferry.buffers import Pages, Strides, address, strides_bytes
from kvferry.client import CHUNK_TOKENS_MAX, Geometry

DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}
PAYLOAD_BYTES_MAX = 62 << 20  # of the 64 MiB of a block; the rest is for what codecs add
PAGE_TOKENS_MIN = 16  # each block has a page of 4 KiB in front of it
LABEL_BYTES_MAX = 63
# Dimensions of a pool's K, by layout: where page (or slot), layer, token and head are.
LAYOUTS: Dict[str, str] = {"layer_first": "lsh", "page_first": "slh", "page_first_direct": "plth",
                           "page_head": "phtl"}
KV_POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost")
SIDE_POOLS = ("swa", "mamba", "indexer")


class Unsupported(Exception):
    """This engine's KV is not stored: why, in one line. The engine runs on without."""


@dataclass(frozen=True)
class PoolFacts:
    """A host pool as seen by the backend."""

    page_tokens: int
    geometry: Optional[Geometry]  # None: its pages are bytes
    pages: Optional[Pages]
    label: str
    shard: int
    shard_count: int


def _adapters(args: Any) -> List[Tuple[str, str, str]]:
    """Name, path and digest of every adapter that the engine starts with. Its id, which is in the
    keys of its requests, is made of name and path alone, and files can be exchanged. (Adapters that
    are loaded later have an id that nothing else ever has.)"""
    given = args.lora_paths or []
    refs = list(given.items()) if isinstance(given, dict) else list(given)
    made = []
    for ref in refs:
        if isinstance(ref, str):
            ref = tuple(ref.split("=", 1)) if "=" in ref else (ref, ref)
        elif isinstance(ref, dict):
            ref = (ref["lora_name"], ref["lora_path"])
        elif not isinstance(ref, tuple):
            ref = (ref.lora_name, ref.lora_path)
        folder = Path(str(ref[1]))
        digest = identity.adapter_digest(folder) if folder.is_dir() else None
        if digest is None:
            raise Unsupported(f"the LoRA adapter {ref[1]} is no local folder with weights that can "
                              "be read")
        made.append((str(ref[0]), str(ref[1]), digest.hex()))
    return made


def variant(args: Any, pool: str, dtype: str) -> str:
    """A name for what changes KV under the same weights."""
    files, overrides = identity.configs(Path(str(args.model_path))), args.json_model_override_args
    is_long = identity.has_long_factors(files) or "long_factor" in str(overrides)
    return identity.variant([pool, dtype, str(args.kv_cache_dtype), str(args.dtype),
                             str(args.quantization), str(overrides), _adapters(args), files,
                             str(args.context_length) if is_long else ""])


def check_engine(config: Any, args: Any, keys_have_namespaces: bool) -> None:
    """Unsupported says what of this engine is not served."""
    for name in ("pp_size", "attn_cp_size", "dcp_size"):
        if getattr(config, name, 1) > 1:
            raise Unsupported(f"{name} is {getattr(config, name)}")
    if args.speculative_algorithm is not None:
        raise Unsupported("speculative decoding is on")
    if not keys_have_namespaces:
        raise Unsupported("this SGLang's keys of pages have nothing of cache_salt, extra_key and "
                          "LoRA in them, so that one's KV would be another's: use 0.5.23")


def weights_digest(given: bytes, args: Any) -> bytes:
    """The digest given, or that of the model's files."""
    folder = Path(str(args.model_path))
    digest = given or (identity.folder_digest(folder) if folder.is_dir() else None)
    if not digest:
        raise Unsupported("the model is no local folder with weights that can be read; set "
                          "weights_digest to something that changes with the weights")
    return digest


def label(namespace: str, what: str) -> str:
    """The namespace of a pool. ValueError: the user's part is too long."""
    made = f"sglang:{namespace}:{what}"
    if len(made.encode()) > LABEL_BYTES_MAX:
        most = LABEL_BYTES_MAX - len(f"sglang::{what}")
        raise ValueError(f"namespace is longer than {most} bytes")
    return made


def _kind(pool: Any) -> str:
    name = type(pool).__name__
    if name not in KV_POOLS:
        raise Unsupported(f"the host pool is a {name}")
    if pool.layer_num != pool.target_layer_num:
        raise Unsupported("a draft model's layers are in the host pool")
    if pool.storage_format_tag is not None or pool.stores_page_envelope:
        raise Unsupported("pages of the host pool have a format of their own")
    if pool.layout not in LAYOUTS:
        raise Unsupported(f"the host pool's layout is {pool.layout}; use page_first")
    return "mla" if name.startswith("MLA") else "kv"


def _strides(array: Any, layout: str, page_tokens: int, layers: int, offset: int = 0) -> Strides:
    """Where the layers of one of K and V lie in a buffer of the pool."""
    by = dict(zip(LAYOUTS[layout], strides_bytes(array)))
    token = by["t"] if "t" in by else by["s"]
    page = by["p"] if "p" in by else page_tokens * token
    base = address(array) + offset
    return Strides(tuple(base + i * by["l"] for i in range(layers)), page, token, by["h"])


def _shape(array: Any, pool: Any, width: int, heads: int) -> None:
    """Whether a buffer is as its pool says."""
    sizes = dict(zip(LAYOUTS[pool.layout], array.shape))
    good = (len(array.shape) == len(LAYOUTS[pool.layout]) + 1 and sizes["l"] == pool.layer_num
            and sizes["h"] == heads and sizes.get("t", pool.page_size) == pool.page_size
            and array.shape[-1] == width and strides_bytes(array)[-1] == pool.dtype.itemsize)
    if not good:
        raise Unsupported(f"the host pool's buffer has shape {tuple(array.shape)}")


def read_kv(config: Any, args: Any, pool: Any, name: str, namespace: str) -> PoolFacts:
    """A pool of attention, whose pages are encoded and decoded where they lie."""
    kind = _kind(pool)
    dtype = DTYPES.get(str(pool.dtype), "u8")  # quantized by the engine: never twice
    if kind == "mla":
        heads, dim_k, dim_v = 1, pool.kv_lora_rank, pool.qk_rope_head_dim
        if pool.kv_cache_dim != dim_k + dim_v or dtype == "u8":
            raise Unsupported("this kind of MLA cache has no layout that is known")
        k = v = pool.kv_buffer
        _shape(k, pool, dim_k + dim_v, 1)
        offset = dim_k * pool.dtype.itemsize
    else:
        heads, dim_k, dim_v = pool.head_num, pool.head_dim, pool.v_head_dim
        k, v, offset = pool.k_buffer, pool.v_buffer, 0
        _shape(k, pool, dim_k, heads)
        _shape(v, pool, dim_v, heads)
    tokens, layers = pool.page_size, pool.layer_num
    page_bytes = tokens * layers * heads * (dim_k + dim_v) * pool.dtype.itemsize
    if not PAGE_TOKENS_MIN <= tokens <= CHUNK_TOKENS_MAX or page_bytes > PAYLOAD_BYTES_MAX:
        raise Unsupported(f"a page has {tokens} tokens and {page_bytes} bytes, and kept can be "
                          f"{PAGE_TOKENS_MIN} to {CHUNK_TOKENS_MAX} tokens of {PAYLOAD_BYTES_MAX} "
                          "bytes: set --page-size")
    pages = Pages(tokens, _strides(k, pool.layout, tokens, layers),
                  _strides(v, pool.layout, tokens, layers, offset))
    pages.owners = [k, v]
    replicated = config.is_mla_model
    return PoolFacts(tokens, Geometry(layers, heads, dim_k, dim_v, tokens, dtype=dtype, kind=kind),
                     pages, label(namespace, variant(args, name, str(pool.dtype))),
                     0 if replicated else config.tp_rank, 1 if replicated else config.tp_size)


def read_flat(config: Any, args: Any, pool: Any, name: str, namespace: str) -> PoolFacts:
    """A pool of states beside the KV, whose pages are bytes."""
    if name not in SIDE_POOLS:
        raise Unsupported(f"the pool {name} is not known")
    page = pool.get_dummy_flat_data_page()
    n_bytes = int(page.nbytes)
    if not 0 < n_bytes <= PAYLOAD_BYTES_MAX:
        raise Unsupported(f"a page of the pool {name} has {n_bytes} bytes")
    shape = f"{pool.dtype} {type(pool).__name__} {pool.layout} {pool.page_size} {n_bytes}"
    # States of recurrent layers are cut over ranks even where the KV is the same on all.
    replicated = config.is_mla_model and name != "mamba"
    return PoolFacts(int(pool.page_size), None, None,
                     label(namespace, variant(args, name, shape)),
                     0 if replicated else config.tp_rank, 1 if replicated else config.tp_size)
