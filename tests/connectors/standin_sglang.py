# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang: HiCacheStorage made from sglang_interface.json, and host pools in plain
memory in the layouts of SGLang's, whose pages can be filled and compared."""
import enum
import hashlib
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace

from standin import Array, _class

HERE = Path(__file__).resolve().parent
FACTS = json.loads((HERE / "sglang_interface.json").read_text(encoding="utf-8"))
CACHE = "sglang.srt.mem_cache"


def _module(name, **what):
    path = name.split(".")
    for i in range(1, len(path)):
        sys.modules.setdefault(".".join(path[:i]), types.ModuleType(".".join(path[:i])))
    module = types.ModuleType(name)
    module.__dict__.update(what)
    sys.modules[name] = module
    setattr(sys.modules[".".join(path[:-1])], path[-1], module)


def _storage():
    base = _class("HiCacheStorage", FACTS["methods"]["HiCacheStorage"])
    base.register_mem_pool_host = lambda self, pool: setattr(self, "mem_pool_host", pool)
    base.register_mem_host_pool_v2 = lambda self, pool, name: None
    return base


class PoolName(str, enum.Enum):
    KV, SWA, MAMBA, INDEXER, DRAFT = "kv", "swa", "mamba", "indexer", "draft"


PoolHitPolicy = enum.Enum("PoolHitPolicy", FACTS["fields"]["PoolHitPolicy"])


class PoolTransferResult(SimpleNamespace):
    def __init__(self, kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages=None):
        super().__init__(kv_hit_pages=kv_hit_pages, extra_pool_hit_pages=extra_pool_hit_pages,
                         restorable_prefix_pages=restorable_prefix_pages)


def seed(extra_key, cache_salt):
    """What the keys of a request with these begin with."""
    if extra_key is None and cache_salt is None:
        return None
    return hashlib.sha256(repr((extra_key, cache_salt)).encode()).hexdigest()


def server_args(**changes):
    """The arguments of an engine, as they have been resolved."""
    return SimpleNamespace(**{**dict(
        model_path="none", lora_paths=None, speculative_algorithm=None, kv_cache_dtype="auto",
        dtype="auto", quantization=None, json_model_override_args="{}", context_length=None),
        **changes})


def install(version):
    """Put the stand-in where `import sglang` finds it."""
    _module(CACHE + ".utils", storage_namespace_seed=seed)
    _module(CACHE + ".hicache_storage", HiCacheStorage=_storage(), PoolName=PoolName,
            PoolHitPolicy=PoolHitPolicy, PoolTransferResult=PoolTransferResult)
    _module("sglang.srt.runtime_context", get_server_args=lambda: install.args)
    _module("sglang.srt.arg_groups.overrides",
            resolution_result=lambda args, field, default=None: getattr(args, field))
    sys.modules["sglang"].__version__ = version


install.args = server_args()


def config(extra, tp_rank=0, tp_size=1, **changes):
    """HiCacheStorageConfig."""
    return SimpleNamespace(**{**dict(
        tp_rank=tp_rank, tp_size=tp_size, pp_size=1, attn_cp_size=1, dcp_size=1,
        is_mla_model=False, extra_config=extra), **changes})


def transfer(name, keys, indices, policy="ALL_PAGES"):
    """PoolTransfer."""
    return SimpleNamespace(name=PoolName(name), keys=keys, host_indices=indices,
                           hit_policy=PoolHitPolicy[policy])


class Dtype:
    def __init__(self, name, itemsize):
        self.name, self.itemsize = name, itemsize

    def __str__(self):
        return "torch." + self.name


BF16, F16, F8 = Dtype("bfloat16", 2), Dtype("float16", 2), Dtype("float8_e4m3fn", 1)


class Indices(list):
    """A tensor of slots."""

    def tolist(self):
        return list(self)


class Pool:
    """Facts and memory of a host pool. A page is filled and read layer by layer, token by token."""

    storage_format_tag, stores_page_envelope = None, False
    DIMENSIONS = {"layer_first": "lsh", "page_first": "slh", "page_first_direct": "plth",
                  "page_head": "phtl"}

    def __init__(self, layout="page_first", dtype=BF16, pages=12, layers=3, heads=2, dim=16,
                 page_size=16):
        self.layout, self.dtype, self.page_size, self.pages = layout, dtype, page_size, pages
        self.layer_num = self.target_layer_num = layers
        self.head_num, self.head_dim, self.v_head_dim = heads, dim, dim

    def array(self, heads, width):
        sizes = {"l": self.layer_num, "s": self.pages * self.page_size, "h": heads,
                 "p": self.pages, "t": self.page_size}
        names = self.DIMENSIONS.get(self.layout, "slh")
        return Array([sizes[name] for name in names] + [width], self.dtype.itemsize)

    def _rows(self, array, page, heads):
        """Where a page's vectors are in an array, in one order for all layouts."""
        strides = dict(zip(self.DIMENSIONS[self.layout], array.strides))
        row = array.shape[-1] * self.dtype.itemsize
        for layer in range(self.layer_num):
            for token in range(self.page_size):
                for head in range(heads):
                    at = page * self.page_size + token
                    where = (at * strides["s"] if "s" in strides else
                             page * strides["p"] + token * strides["t"])
                    start = where + layer * strides["l"] + head * strides["h"]
                    yield memoryview(array.memory)[start:start + row]

    def page(self, page):
        """The bytes of a page."""
        return b"".join(bytes(row) for array, heads in self.arrays()
                        for row in self._rows(array, page, heads))

    def fill(self, page, what):
        made = hashlib.shake_128(str(what).encode())
        rows = [row for array, heads in self.arrays() for row in self._rows(array, page, heads)]
        data = made.digest(sum(len(row) for row in rows))
        for number, row in enumerate(rows):
            row[:] = data[number * len(row):(number + 1) * len(row)]

    def slots(self, *pages):
        return Indices(page * self.page_size + i for page in pages for i in range(self.page_size))


class MHATokenToKVPoolHost(Pool):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.k_buffer = self.array(self.head_num, self.head_dim)
        self.v_buffer = self.array(self.head_num, self.v_head_dim)

    def arrays(self):
        return [(self.k_buffer, self.head_num), (self.v_buffer, self.head_num)]


class MLATokenToKVPoolHost(Pool):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim = 32, 8, 40
        self.kv_buffer = self.array(1, 40)

    def arrays(self):
        return [(self.kv_buffer, 1)]


class FlatPage:
    """A page of states: a tensor of bytes."""

    def __init__(self, data):
        import kvferry
        self.data, self.nbytes = data, len(data)
        self.start = kvferry.buffers.address(data)

    def data_ptr(self):
        return self.start

    def contiguous(self):
        return self


class MambaPoolHost:
    """States: pages of one slot, read and written as bytes in the pool's own order."""

    layout, dtype, page_size, BYTES = "page_first", BF16, 1, 1000

    def __init__(self, pages=8):
        self.states = [bytes(self.BYTES)] * pages

    def get_data_page(self, index, flat=True):
        return FlatPage(bytearray(self.states[index]))

    def get_dummy_flat_data_page(self):
        return FlatPage(bytearray(self.BYTES))

    def set_from_flat_data_page(self, index, page):
        self.states[index] = bytes(page.data)

    @staticmethod
    def slots(*pages):
        return Indices(pages)
