# SPDX-License-Identifier: Apache-2.0
"""The codecs of libkvferry, as an engine has them: by the public functions of kvferry.h, on a
daemon's staging memory. Standard library only: arrays are given by address.

A block holds all layers of a chunk, but a layer's K and V depend on what the layers below gave
back, so one layer at a time has to go through the codec. Layers are coded apart from one another;
what may differ is the width near the ends of the model. LayerCodec therefore looks up how each
layer of a whole block is stored, finds a geometry with layers stored alike, and codes with that: a
layer of as many windows as it has such layers at once, since a call from Python costs more than
what it calls.
"""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue

CHUNK_TOKENS = 256
RECORD_PAGE_BYTES = 4096
DTYPE_BF16 = 1
KIND_KV = 1
KIND_X = 4
KIND_XG = 5
ONE_DIGEST = b"\1" * 32
ROPE_NONE = 0
ROPE_PRE = 1
ROPE_POST = 2
ALLOW_UNCALIBRATED = 1
ITEM_BYTES = 2
LAYER_BITS_OFFSET = 384  # of the record page, see docs/block-format.md
STAGING_GRAIN = 1 << 20
CONNECT_MS = 60000  # machines may be busy


class CodecError(Exception):
    """The library refused something."""


@dataclass(frozen=True)
class Shape:
    """What a block holds."""

    n_layers: int
    n_heads: int
    dim: int
    rope_state: int = ROPE_POST
    kind: int = KIND_KV
    width: int = 0  # of kinds without V: values a token and layer


class Geometry(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_uint32), ("kind", ctypes.c_uint8),
                ("dtype", ctypes.c_uint8), ("rope_state", ctypes.c_uint8),
                ("layout_tag", ctypes.c_uint8), ("n_layers", ctypes.c_uint16),
                ("n_heads", ctypes.c_uint16), ("dim_k", ctypes.c_uint16),
                ("dim_v", ctypes.c_uint16), ("chunk_tokens", ctypes.c_uint16),
                ("sink_tokens", ctypes.c_uint16)]


class TensorView(ctypes.Structure):
    _fields_ = [("layers", ctypes.POINTER(ctypes.c_void_p)),
                ("page_stride_bytes", ctypes.c_size_t), ("token_stride_bytes", ctypes.c_size_t),
                ("head_stride_bytes", ctypes.c_size_t)]


class KvView(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_uint32), ("tokens_a_page", ctypes.c_uint32),
                ("page_table", ctypes.c_void_p), ("k", TensorView), ("v", TensorView)]


class Options(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                ("socket_path", ctypes.c_char_p), ("client_name", ctypes.c_char_p),
                ("profile", ctypes.c_char_p), ("geometry", ctypes.POINTER(Geometry)),
                ("weights_digest", ctypes.c_uint8 * 32), ("adapter_digest", ctypes.c_uint8 * 32),
                ("namespace_label", ctypes.c_char_p), ("shard", ctypes.c_uint16),
                ("shard_count", ctypes.c_uint16), ("ring_entries", ctypes.c_uint32),
                ("staging_bytes", ctypes.c_uint64), ("connect_timeout_ms", ctypes.c_uint32),
                ("reserved", ctypes.c_uint32), ("log", ctypes.c_void_p),
                ("log_arg", ctypes.c_void_p), ("factors_digest", ctypes.c_uint8 * 32)]


class Info(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_uint32), ("protocol_version", ctypes.c_uint16),
                ("connected", ctypes.c_uint8), ("lossless", ctypes.c_uint8),
                ("profile", ctypes.c_char * 16), ("incarnation", ctypes.c_uint64),
                ("namespace_id", ctypes.c_uint64), ("connection_id", ctypes.c_uint64),
                ("arena_bytes", ctypes.c_uint64), ("staging_bytes", ctypes.c_uint64),
                ("credits", ctypes.c_uint32), ("reconnects", ctypes.c_uint32),
                ("record_bytes_max", ctypes.c_uint64)]


class Stage(ctypes.Structure):
    _fields_ = [("stage", ctypes.c_uint64), ("record", ctypes.c_void_p),
                ("payload", ctypes.c_void_p), ("payload_bytes", ctypes.c_size_t)]


class Library:
    """libkvferry of a build, and the socket of a daemon of the same build."""

    def __init__(self, build: str, socket: str) -> None:
        self.path = os.path.join(build, "client", "libkvferry.so")
        self.socket = socket
        self.lib = ctypes.CDLL(self.path)
        self.lib.kvf_status_text.restype = ctypes.c_char_p
        self.lib.kvf_close.restype = ctypes.c_void_p
        self.lib.kvf_close.argtypes = [ctypes.c_void_p]

    def check(self, status: int, what: str) -> None:
        if status != 0:
            text = self.lib.kvf_status_text(status).decode()
            raise CodecError(f"{what}: {text} ({status})")


@dataclass(frozen=True)
class Tensor:
    """bf16 values [layer][head][token][dim] in memory; layers may share one address. With
    token_bytes tokens are so far apart, not dim values."""

    layers: tuple[int, ...]
    head_stride_bytes: int
    dim: int
    token_bytes: int = 0

    def repeated(self, n_layers: int) -> Tensor:
        """One layer's memory as that of several."""
        return replace(self, layers=self.layers * n_layers)

    def moved_to(self, address: int) -> Tensor:
        """Other memory of the same form, one layer of it."""
        return replace(self, layers=(address,))

    def spread(self, n_layers: int, first: int, others: list[Tensor]) -> Tensor:
        """The memory of n_layers: from layer first on that of others, one layer each, elsewhere
        this one's."""
        table = list(self.layers * n_layers)
        for i, other in enumerate(others):
            table[first + i] = other.layers[0]
        return replace(self, layers=tuple(table))

    def view(self, token: int) -> tuple[TensorView, ctypes.Array]:
        """From a token on, and what has to stay alive with it."""
        token_bytes = self.token_bytes or self.dim * ITEM_BYTES
        at = [address + token * token_bytes for address in self.layers]
        table = (ctypes.c_void_p * len(at))(*at)
        view = TensorView(ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p)),
                          CHUNK_TOKENS * token_bytes, token_bytes, self.head_stride_bytes)
        return view, table


class Handle:
    """One client with a profile and a geometry, and one slot; for one thread at a time."""

    def __init__(self, library: Library, profile: str, shape: Shape,
                 weights_digest: bytes = bytes(32)) -> None:
        self.library = library
        self.shape = shape
        self.client = ctypes.c_void_p()
        geometry = Geometry(ctypes.sizeof(Geometry), shape.kind, DTYPE_BF16,
                            shape.rope_state, 0,
                            shape.n_layers, shape.n_heads, shape.dim, shape.dim, CHUNK_TOKENS, 0)
        if shape.kind != KIND_KV:
            library.check(library.lib.kvf_x_geometry(shape.kind, shape.width,
                                                     ctypes.byref(geometry)),
                          f"kvf_x_geometry, width {shape.width}")
        self.group = geometry.dim_k
        values = 2 * shape.n_heads * shape.dim if shape.kind == KIND_KV else shape.width
        raw = values * shape.n_layers * CHUNK_TOKENS * ITEM_BYTES
        options = Options()
        library.lib.kvf_options_init(ctypes.byref(options))
        options.struct_bytes = ctypes.sizeof(Options)
        options.flags = ALLOW_UNCALIBRATED
        options.socket_path = library.socket.encode()
        options.profile = profile.encode()
        options.weights_digest[:] = weights_digest
        if shape.kind != KIND_KV:
            # X is refused without; nobody else reads what is made here
            options.weights_digest[:] = ONE_DIGEST
        if shape.kind == KIND_XG:
            options.factors_digest[:] = ONE_DIGEST
        options.geometry = ctypes.pointer(geometry)
        options.connect_timeout_ms = CONNECT_MS
        options.staging_bytes = (raw * 5 // 4 // STAGING_GRAIN + 2) * STAGING_GRAIN
        options.ring_entries = 64
        library.check(library.lib.kvf_open(ctypes.byref(options), ctypes.byref(self.client)),
                      f"kvf_open, profile {profile}")
        try:
            self._acquire(profile)
        except CodecError:
            self.close()
            raise

    def _acquire(self, profile: str) -> None:
        lib = self.library.lib
        info = Info(ctypes.sizeof(Info))
        self.library.check(lib.kvf_client_info(self.client, ctypes.byref(info)), "kvf_client_info")
        if info.profile.decode() != profile:
            raise CodecError(f"the daemon gave {info.profile.decode()} instead of {profile}")
        self.is_lossless = info.lossless != 0
        self.stage = Stage()
        room = ctypes.c_size_t(info.record_bytes_max - RECORD_PAGE_BYTES)
        self.library.check(lib.kvf_stage_acquire(self.client, room, ctypes.byref(self.stage)),
                           "kvf_stage_acquire")

    def close(self) -> None:
        self.library.lib.kvf_close(self.client)
        self.client = ctypes.c_void_p()

    def encode(self, k: Tensor, v: Tensor, token: int) -> int:
        """Encode the chunk that begins with a token; bytes of the record, which is in the slot."""
        k_view, k_table = k.view(token)
        v_view, v_table = v.view(token)
        view = KvView(ctypes.sizeof(KvView), CHUNK_TOKENS, None, k_view, v_view)
        size = ctypes.c_size_t()
        status = self.library.lib.kvf_encode(self.client, ctypes.byref(self.stage), token,
                                             CHUNK_TOKENS, ctypes.byref(view), ctypes.byref(size))
        del k_table, v_table
        self.library.check(status, "kvf_encode")
        return size.value

    def decode(self, record_bytes: int, layer: int, k: Tensor, v: Tensor, token: int,
               n_layers: int = 1) -> None:
        """Decode layers of the slot's record."""
        k_view, k_table = k.view(token)
        v_view, v_table = v.view(token)
        view = KvView(ctypes.sizeof(KvView), CHUNK_TOKENS, None, k_view, v_view)
        status = self.library.lib.kvf_decode(self.client, ctypes.c_void_p(self.stage.record),
                                             ctypes.c_size_t(record_bytes), layer, n_layers, 0,
                                             0, ctypes.byref(view))
        del k_table, v_table
        self.library.check(status, "kvf_decode")

    def record_part(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.stage.record + offset, size)

    def digest(self) -> str:
        """Of what becomes of one block, bytes and values: other builds that do the same give the
        same."""
        shape = self.shape
        data, source = hard_tensor(shape)
        one = [array.array("H", bytes(len(data) * ITEM_BYTES)) for _ in range(2)]
        targets = [source.moved_to(bits.buffer_info()[0]).repeated(shape.n_layers) for bits in one]
        size = self.encode(source, source, 0)
        digest = hashlib.sha256(self.record_part(RECORD_PAGE_BYTES, size - RECORD_PAGE_BYTES))
        for layer in range(shape.n_layers):
            self.decode(size, layer, *targets, 0)
            for bits in one:
                digest.update(bits.tobytes())
        return digest.hexdigest()


@functools.lru_cache(maxsize=4)
def gauss_values(n: int, seed: int) -> array.array:
    """Gaussian bf16 values."""
    generator = random.Random(seed)
    values = struct.pack(f"<{n}f", *(generator.gauss(0, 1) for _ in range(n)))
    return array.array("H", struct.unpack(f"<{2 * n}H", values)[1::2])


def gauss_tensor(shape: Shape, seed: int) -> tuple[array.array, Tensor]:
    """A layer's worth of Gaussian bf16 values, all layers alike: nothing in it is an exception."""
    data = gauss_values(shape.n_heads * CHUNK_TOKENS * shape.dim, seed)
    address = data.buffer_info()[0]
    return data, Tensor((address,) * shape.n_layers, CHUNK_TOKENS * shape.dim * ITEM_BYTES,
                        shape.dim)


@functools.cache
def hard_values(n: int, dim: int) -> array.array:
    """Gaussian bf16 values with a bias in some channels and outliers in others."""
    generator = random.Random(n)
    values = [generator.gauss(3.0 if i % dim % 5 == 1 else 0.0, 8.0 if i % dim % 29 == 2 else 1.0)
              for i in range(n)]
    packed = struct.pack(f"<{n}f", *values)
    return array.array("H", struct.unpack(f"<{2 * n}H", packed)[1::2])


def hard_tensor(shape: Shape) -> tuple[array.array, Tensor]:
    """A layer's worth of them, all layers alike."""
    data = hard_values(shape.n_heads * CHUNK_TOKENS * shape.dim, shape.dim)
    address = data.buffer_info()[0]
    return data, Tensor((address,) * shape.n_layers, CHUNK_TOKENS * shape.dim * ITEM_BYTES,
                        shape.dim)


@dataclass(frozen=True)
class Place:
    """Layers of a geometry that are stored as a layer of the model is."""

    n_layers: int  # of the geometry
    first: int
    count: int


def runs_of(kinds: bytes, most: int) -> dict[int, Place]:
    """The longest run of each kind, cut to the most that is of use."""
    found: dict[int, Place] = {}
    first = 0
    for at in range(1, len(kinds) + 1):
        if at < len(kinds) and kinds[at] == kinds[first]:
            continue
        run = Place(len(kinds), first, min(at - first, most))
        if kinds[first] not in found or found[kinds[first]].count < run.count:
            found[kinds[first]] = run
        first = at
    return found


class LayerCodec:
    """One layer at a time through a profile, n_together windows in one call and many calls at once.
    A profile made for a model has settings for each of its layers: weights_digest says which model,
    and whole blocks are coded then."""

    def __init__(self, library: Library, profile: str, shape: Shape, n_workers: int,
                 weights_digest: bytes | None = None, n_together: int = 1) -> None:
        self.library = library
        self.profile = profile
        self.shape = shape
        self.weights_digest = weights_digest
        self.pool = ThreadPoolExecutor(n_workers)
        self.n_workers = n_workers
        self.handles: dict[int, SimpleQueue] = {}
        self.opened: list[Handle] = []
        try:
            self.whole = self._open(shape)
            self.is_lossless = self.whole.is_lossless
            self.places = (self._find_places(n_together) if weights_digest is None
                           else [Place(shape.n_layers, layer, 1)
                                 for layer in range(shape.n_layers)])
            for n in {place.n_layers for place in self.places}:
                self.handles[n] = SimpleQueue()
                for _ in range(n_workers):
                    self.handles[n].put(self._open(replace(shape, n_layers=n)))
        except CodecError:
            self.close()
            raise

    def _open(self, shape: Shape) -> Handle:
        handle = Handle(self.library, self.profile, shape, self.weights_digest or bytes(32))
        self.opened.append(handle)
        return handle

    def _kinds(self, handle: Handle, layer: array.array) -> bytes:
        shape = handle.shape
        tensor = Tensor((layer.buffer_info()[0],) * shape.n_layers,
                        CHUNK_TOKENS * shape.dim * ITEM_BYTES, shape.dim)
        handle.encode(tensor, tensor, 0)
        return handle.record_part(LAYER_BITS_OFFSET, shape.n_layers)

    def _find_places(self, n_together: int) -> list[Place]:
        """For each layer the place for most windows; of several the smallest geometry."""
        data, _ = gauss_tensor(self.shape, 1)
        wanted = self._kinds(self.whole, data)
        edges = len(wanted) - max(wanted.count(kind) for kind in set(wanted))
        best: dict[int, Place] = {}
        for n in (*range(1, len(wanted) + 1), n_together, n_together + edges):
            if set(wanted) <= set(best) and n < n_together:
                continue
            handle = self._open(replace(self.shape, n_layers=n))
            for kind, place in runs_of(self._kinds(handle, data), n_together).items():
                if kind not in best or best[kind].count < place.count:
                    best[kind] = place
            self.opened.remove(handle)
            handle.close()
        return [best[kind] for kind in wanted]

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for handle in self.opened:
            handle.close()
        self.opened = []

    def _chunk(self, place: Place, jobs: list[tuple], token: int) -> None:
        """A chunk of some windows."""
        handle = self.handles[place.n_layers].get()
        try:
            tables = [[windows[0].spread(place.n_layers, place.first, list(windows))
                       for windows in zip(*pairs)] for pairs in zip(*jobs)]
            size = handle.encode(*tables[0], token)
            handle.decode(size, place.first, *tables[1], token, len(jobs))
        finally:
            self.handles[place.n_layers].put(handle)

    def pass_through(self, layer: int, jobs: list[tuple], n_tokens: int) -> None:
        """Every full chunk of every (source K and V, target K and V) of a layer. What is behind the
        last full chunk is the caller's: an engine has not handed it over yet."""
        place = self.places[layer]
        chunks = range(0, n_tokens - CHUNK_TOKENS + 1, CHUNK_TOKENS)
        work = [self.pool.submit(self._chunk, place, jobs[at : at + place.count], token)
                for at in range(0, len(jobs), place.count) for token in chunks]
        for item in work:
            item.result()

    def block_bytes(self, k: Tensor, v: Tensor, token: int) -> int:
        """Bytes of the record of a chunk of all layers, record page included."""
        return self.whole.encode(k, v, token)
