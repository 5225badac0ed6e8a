# SPDX-License-Identifier: Apache-2.0
"""GPU calls: blocks between pages in device memory and the daemon (libkvferry_gpu).

Streams and events are numbers, as torch has them (stream.cuda_stream, event.cuda_event). No event
is 0. No stream is None: 0 is CUDA's default stream, as in torch.
A Gpu belongs to the thread of its client, has to be closed before it, and uses the context that is
current in the thread that makes it.
"""
import weakref
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

from kvferry._abi import ffi, gpu_lib, lib
from kvferry.buffers import Pages, Strides
from kvferry.client import TIERS, Client, Key, get_options, put_options
from kvferry.errors import Status, check, error

EVENTS = 64
DEFAULT_STREAM = 1  # CU_STREAM_LEGACY


@dataclass(frozen=True)
class GpuPut:
    """A block to put: pages by their ids, tokens of the chunk in their order."""

    key: Key
    pages: Sequence[int]
    token_start: int = 0
    n_tokens: int = 0
    supersedes: Optional[Key] = None


@dataclass(frozen=True)
class GpuGet:
    """A block to get: its token token_first goes to the first token of pages[0]."""

    key: Key
    pages: Sequence[int]
    token_first: int = 0
    n_tokens: int = 0


@dataclass(frozen=True)
class GpuEvent:
    """A completion. kind: "pages-free", "block" or "request", the last one of its request."""

    request: int
    user: int
    kind: str
    tier: str
    status: Status
    index: int


KINDS = {1: "pages-free", 2: "block", 3: "request"}


def _close(library: Any, c: Any, _client: Client) -> None:
    library.kvf_gpu_close(c)


class Gpu:
    """A GPU handle, with the pages that it moves."""

    def __init__(self, client: Client, pages: Pages, n_pages: int, *, burst_bytes: int = 0,
                 ring_bytes: int = 0, load_window_bytes: int = 0, pins_early: bool = False):
        """Find the GPU, load kernels, allocate (for 0, as kvf_gpu_options says), make pages known
        (device addresses; only they are kept, not the tensors). pins_early: each poll pins a piece
        of the daemon's arena, and not the first hit in it. Blocks while the driver starts.
        KvferryError ERR_UNSUPPORTED: no driver, no GPU, or no kernels in this build; the client's
        log says which."""
        self._lib = gpu_lib()
        self._client = client  # kept open for as long as this object is
        options = ffi.new("struct kvf_gpu_options *")
        options.struct_bytes = ffi.sizeof("struct kvf_gpu_options")
        options.burst_bytes, options.ring_bytes = burst_bytes, ring_bytes
        options.load_window_bytes = load_window_bytes
        options.pinning = lib.KVF_GPU_PIN_EAGER if pins_early else lib.KVF_GPU_PIN_LAZY
        out = ffi.new("struct kvf_gpu **")
        check(self._lib.kvf_gpu_open(client.c, options, out), "kvf_gpu_open")
        self._c: Any = out[0]
        # It holds the client: of a cycle of both that nobody has closed, this is closed first.
        self._finalizer = weakref.finalize(self, _close, self._lib, self._c, client)
        self._finalizer.atexit = False  # as the client's
        self._events = ffi.new("struct kvf_gpu_event[]", EVENTS)
        try:
            self._region = self._register(pages, n_pages)
        except Exception:
            self.close()
            raise

    def _register(self, pages: Pages, n_pages: int) -> Any:
        options = ffi.new("struct kvf_gpu_region_options *")
        options.struct_bytes = ffi.sizeof("struct kvf_gpu_region_options")
        options.n_pages, options.tokens_a_page = n_pages, pages.tokens_a_page
        held = [self._tensor(options.k, pages.k)]
        if pages.v is not None:
            held.append(self._tensor(options.v, pages.v))
        out = ffi.new("struct kvf_gpu_region **")
        check(self._lib.kvf_gpu_register(self._c, options, out), "kvf_gpu_register")
        return out[0]

    @staticmethod
    def _tensor(tensor: Any, strides: Strides) -> Any:
        layers = ffi.new("void *[]", [ffi.cast("void *", a) for a in strides.layers])
        tensor.layers = layers
        tensor.page_stride_bytes = strides.page
        tensor.token_stride_bytes = strides.token
        tensor.head_stride_bytes = strides.head
        return layers

    def close(self) -> None:
        """Wait for copies in flight and forget requests. A second time does nothing."""
        self._finalizer()
        self._c = ffi.NULL

    def put(self, items: Sequence[GpuPut], *, parent: Optional[Key] = None, depth: int = 0,
            stream: Optional[int] = None, wait_event: int = 0,
            user: int = 0) -> Tuple[int, int]:
        """Queue the encoding of blocks, in chain order, on a stream behind an event: (request,
        leading items taken). Pages may be rewritten by what is queued on that stream afterwards.
        BusyError: no room for one."""
        held: List[Any] = []
        c = ffi.new("struct kvf_gpu_put_item[]", max(len(items), 1))
        for one, item in zip(c, items):
            one.struct_bytes = ffi.sizeof("struct kvf_gpu_put_item")
            one.token_start, one.n_tokens = item.token_start, item.n_tokens
            _fill(one, item.key, item.pages, held)
            if item.supersedes is not None:
                held.append(ffi.from_buffer(item.supersedes))
                one.supersedes = (held[-1], len(item.supersedes))
        options, _parent = put_options(parent, depth, 0, False)
        taken, request = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        check(self._lib.kvf_gpu_put(self._c, self._region, c, len(items), options,
                                    ffi.cast("void *", wait_event), stream_pointer(stream),
                                    user, taken, request), "kvf_gpu_put")
        return int(request[0]), int(taken[0])

    def get(self, items: Sequence[GpuGet], *, budget_ms: int = 0, stream: Optional[int] = None,
            wait_event: int = 0, user: int = 0) -> int:
        """Queue blocks into pages, behind an event: the last step that read these pages. The id of
        the request. A block's event says OK when all of it is written."""
        held: List[Any] = []
        c = ffi.new("struct kvf_gpu_get_item[]", max(len(items), 1))
        for one, item in zip(c, items):
            one.struct_bytes = ffi.sizeof("struct kvf_gpu_get_item")
            one.token_first, one.n_tokens = item.token_first, item.n_tokens
            _fill(one, item.key, item.pages, held)
        request = ffi.new("uint64_t *")
        check(self._lib.kvf_gpu_get(self._c, self._region, c, len(items), get_options(budget_ms),
                                    ffi.cast("void *", wait_event), stream_pointer(stream),
                                    user, request), "kvf_gpu_get")
        return int(request[0])

    def poll(self, timeout_ms: int = 0) -> List[GpuEvent]:
        """Move requests along and take completions. Blocks up to timeout_ms for the first."""
        out = ffi.new("uint32_t *")
        status = self._lib.kvf_gpu_poll(self._c, self._events, EVENTS, timeout_ms, out)
        if status < 0 and out[0] == 0:
            raise error(status, "kvf_gpu_poll")
        return [GpuEvent(int(e.request), int(e.user), KINDS[e.kind], TIERS.get(e.tier, ""),
                         Status(e.status), int(e.index)) for e in self._events[0:out[0]]]

    def cancel(self, request: int) -> bool:
        """Ask to end a request early; its events still come. False: it was not in flight."""
        return bool(self._lib.kvf_gpu_cancel(self._c, request) == lib.KVF_OK)


def stream_pointer(stream: Optional[int]) -> Any:
    """As the driver has it, to which 0 is no stream, behind which nothing would be queued."""
    return ffi.NULL if stream is None else ffi.cast("void *", stream or DEFAULT_STREAM)


def _fill(c: Any, key: Key, pages: Sequence[int], held: List[Any]) -> None:
    held += [ffi.from_buffer(key), ffi.new("uint32_t[]", list(pages))]
    c.key = (held[-2], len(key))
    c.pages, c.n_pages = held[-1], len(pages)
