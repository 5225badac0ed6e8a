# SPDX-License-Identifier: Apache-2.0
"""The client handle: kvf_open and what hangs on it.

One handle, one thread at a time, as in C. Calls that may sleep say "Blocks" and let other threads
of Python run meanwhile. What a call is given is borrowed until it returns.
"""
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from kvferry._abi import ffi, lib, text
from kvferry.buffers import Pages, View, address
from kvferry.errors import Status, check, error

Key = Union[bytes, bytearray, memoryview]
RECORD_PAGE_BYTES: int = lib.KVF_RECORD_PAGE_BYTES
REQUEST_KEYS_MAX: int = lib.KVF_REQUEST_KEYS_MAX
TAIL_KEYS_MAX: int = lib.KVF_TAIL_KEYS_MAX
CHUNK_TOKENS_MAX: int = lib.KVF_CHUNK_TOKENS_MAX
SHARD_NONE: int = lib.KVF_SHARD_NONE
DTYPES = {"bf16": 1, "f16": 2, "f32": 3, "f8e4m3": 4, "f8e5m2": 5, "u8": 6}
KINDS = {"kv": 1, "mla": 2, "state": 3, "x": 4, "xg": 5}
ROPE = {"none": 0, "pre": 1, "post": 2, "pre-unbiased": 3}
REPORTS = {"load-failed": lib.KVF_REPORT_LOAD_FAILED,
           "taint-refused": lib.KVF_REPORT_TAINT_REFUSED,
           "tokens-computed": lib.KVF_REPORT_TOKENS_COMPUTED,
           "tokens-engine": lib.KVF_REPORT_TOKENS_ENGINE,
           "tokens-loaded": lib.KVF_REPORT_TOKENS_LOADED,
           "saved-us": lib.KVF_REPORT_SAVED_US,
           "spent-us": lib.KVF_REPORT_SPENT_US}
SEVERITY_WARNING = 1  # of the library's lines; what is more is for who looks into it
TIERS = {0: "", 1: "hbm", 2: "dram", 3: "nvme", 4: "remote"}


@dataclass(frozen=True)
class Geometry:
    """What a block holds, as struct kvf_geometry. All of it takes part in the namespace."""

    n_layers: int
    n_heads: int
    dim_k: int
    dim_v: int
    chunk_tokens: int
    dtype: str = "bf16"
    kind: str = "kv"
    rope: str = "post"
    layout_tag: int = 0
    sink_tokens: int = 0

    def _c(self) -> Any:
        c = ffi.new("struct kvf_geometry *")
        c.struct_bytes = ffi.sizeof("struct kvf_geometry")
        c.kind, c.dtype, c.rope_state = KINDS[self.kind], DTYPES[self.dtype], ROPE[self.rope]
        c.layout_tag, c.n_layers, c.n_heads = self.layout_tag, self.n_layers, self.n_heads
        c.dim_k, c.dim_v = self.dim_k, self.dim_v
        c.chunk_tokens, c.sink_tokens = self.chunk_tokens, self.sink_tokens
        return c


@dataclass(frozen=True)
class Info:
    """Facts about the connection, as struct kvf_info."""

    connected: bool
    lossless: bool
    profile: str
    profile_text: str
    incarnation: int
    namespace_id: int
    credits: int
    reconnects: int
    staging_bytes: int
    record_bytes_max: int


@dataclass(frozen=True)
class Lookup:
    """A leading run of keys, as struct kvf_lookup_result. lease 0: none."""

    status: Status
    run_chunks: int
    ready_chunks: int
    coming_chunks: int
    tail_index: int
    lease: int


@dataclass(frozen=True)
class Hit:
    """One block of a get. Where status is OK, payload is the daemon's memory itself, read-only, to
    be believed only once release() of its lease has said OK, after the last read."""

    status: Status
    tier: str = ""
    record: int = 0
    record_bytes: int = 0
    lease: int = 0

    @property
    def payload(self) -> memoryview:
        """The payload, not copied."""
        start = ffi.cast("const char *", self.record + RECORD_PAGE_BYTES)
        return memoryview(ffi.buffer(start, self.record_bytes - RECORD_PAGE_BYTES)).toreadonly()


@dataclass(frozen=True)
class Event:
    """A completion. index: of a block, its place in the request; of a request, blocks done."""

    request: int
    user: int
    is_request: bool
    index: int
    hit: Hit
    lookup: Optional[Lookup]


@dataclass(frozen=True)
class Put:
    """A block to put: pages (page_ids of a Pages), or data, any buffer of bytes."""

    key: Key
    pages: Optional[Pages] = None
    page_ids: Sequence[int] = ()
    token_start: int = 0
    n_tokens: int = 0
    data: Any = None
    supersedes: Optional[Key] = None


class _Keys:
    """An array of struct kvf_key and the bytes that it points to."""

    def __init__(self, keys: Sequence[Key]):
        self._held = [ffi.from_buffer(key) for key in keys]
        self.c = ffi.new("struct kvf_key[]", [(held, len(held)) for held in self._held])
        self.n = len(self._held)


def _hit(c: Any) -> Hit:
    if c.status != 0:
        return Hit(Status(c.status))
    record = int(ffi.cast("uintptr_t", c.record))
    return Hit(Status.OK, TIERS.get(c.tier, ""), record, int(c.record_bytes), int(c.lease))


def _lookup(status: int, c: Any) -> Lookup:
    return Lookup(Status(status), c.run_chunks, c.ready_chunks, c.coming_chunks, c.tail_index,
                  int(c.lease))


class Client:
    """A connection to kvferryd, closed by close() or at the end of a with block."""

    def __init__(self, socket_path: Optional[str] = None, *, profile: Optional[str] = None,
                 geometry: Optional[Geometry] = None, name: Optional[str] = None,
                 namespace_label: str = "", weights_digest: bytes = b"",
                 adapter_digest: bytes = b"", shard: int = 0, shard_count: int = 1,
                 staging_bytes: int = 0, ring_entries: int = 0, connect_timeout_ms: int = 0,
                 allow_uncalibrated: bool = False,
                 log: Optional[Callable[[int, str], None]] = None):
        """Connect. Blocks up to connect_timeout_ms (0: 5000). shard SHARD_NONE: a scheduler's
        handle. log(severity, line) is called inside calls of this handle, 0 is an error. Its last
        error or warning is also in what this raises."""
        held: List[Any] = []

        def string(value: Optional[str]) -> Any:
            if value is None:
                return ffi.NULL
            held.append(ffi.new("char[]", value.encode()))
            return held[-1]

        options = ffi.new("struct kvf_options *")
        lib.kvf_options_init(options)
        options.socket_path, options.profile = string(socket_path), string(profile)
        options.client_name, options.namespace_label = string(name), string(namespace_label)
        if geometry is not None:
            held.append(geometry._c())
            options.geometry = held[-1]
        for field, digest in ((options.weights_digest, weights_digest),
                              (options.adapter_digest, adapter_digest)):
            if len(digest) not in (0, len(field)):
                raise ValueError(f"a digest has {len(field)} bytes, not {len(digest)}")
            ffi.memmove(field, digest, len(digest))
        options.shard, options.shard_count = shard, shard_count
        options.staging_bytes, options.ring_entries = staging_bytes, ring_entries
        options.connect_timeout_ms = connect_timeout_ms
        if allow_uncalibrated:
            options.flags |= lib.KVF_ATTACH_ALLOW_UNCALIBRATED
        said = _Said(log)
        try:
            held.append(ffi.callback("kvf_log_fn", said.hear))
            options.log = held[-1]
        except MemoryError:  # of a process that may make no memory executable
            said.log(SEVERITY_WARNING, "this process may make no memory executable, which a log "
                                       "from C takes: what the library has to say is not heard")
        out = ffi.new("struct kvf_client **")
        status = lib.kvf_open(options, out)
        if status < 0:
            raise error(status, "kvf_open", said.last)
        self._c: Any = out[0]
        self._events = ffi.new("struct kvf_event[64]")
        self._finalizer = weakref.finalize(self, _close, self._c, held)
        # At the end of the process another thread may be inside a call of this handle. The daemon
        # takes the end for a close.
        self._finalizer.atexit = False

    def close(self) -> None:
        """Give leases up and forget requests in flight. A second time does nothing."""
        self._finalizer()
        self._c = ffi.NULL

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    @property
    def c(self) -> Any:
        """The handle in C, for modules of this package; it stays this object's."""
        return self._c

    def fileno(self) -> int:
        """Readable when poll() has something to do; for select, poll and event loops."""
        return int(lib.kvf_fd(self._c))

    def _info(self) -> Any:
        c = ffi.new("struct kvf_info *")
        c.struct_bytes = ffi.sizeof("struct kvf_info")
        check(lib.kvf_client_info(self._c, c), "kvf_client_info")
        return c

    def link(self) -> Optional[int]:
        """How often the handle has attached again; None: it is not attached. Of info(), in a
        fraction of its time."""
        c = self._info()
        return int(c.reconnects) if c.connected else None

    def info(self) -> Info:
        """Facts about the connection."""
        c = self._info()
        return Info(bool(c.connected), bool(c.lossless), text(c.profile), text(c.profile_text),
                    c.incarnation, c.namespace_id, c.credits, c.reconnects, c.staging_bytes,
                    c.record_bytes_max)

    def ping(self, timeout_ms: int = 1000) -> int:
        """Nanoseconds of a round trip. Blocks up to timeout_ms."""
        out = ffi.new("uint64_t *")
        check(lib.kvf_ping(self._c, timeout_ms, out), "kvf_ping")
        return int(out[0])

    def stat(self) -> Dict[str, int]:
        """Counters of this client and its namespace, as struct kvf_stat. Blocks."""
        c = ffi.new("struct kvf_stat *")
        c.struct_bytes = ffi.sizeof("struct kvf_stat")
        check(lib.kvf_stat(self._c, c), "kvf_stat")
        names = [name for name, _ in ffi.typeof("struct kvf_stat").fields]
        return {name: int(getattr(c, name)) for name in names[2:]}

    def report(self, kind: str, amount: int) -> None:
        """Count what only an engine knows, for the daemon's metrics (kvferry_engine_*)."""
        if amount > 0:
            check(lib.kvf_report(self._c, REPORTS[kind], amount), "kvf_report")

    def drift(self, item: Put) -> Optional[float]:
        """Compare pages with what is stored under their key, both as the profile gives them back,
        and report it: the relative error, 0 the same. None: nothing is stored. Blocks, up to 100
        ms."""
        built, out = _Items([item]), ffi.new("double *")
        status = check(lib.kvf_drift(self._c, built.c, out), "kvf_drift")
        return float(out[0]) if status == Status["OK"] else None

    # --- blocking calls ---------------------------------------------------------------------------

    def put(self, items: Sequence[Put], *, parent: Optional[Key] = None, depth: int = 0,
            budget_ms: int = 0, durable: bool = False) -> List[Status]:
        """Put blocks in chain order, a status each (OK, EXISTS or a failure). Encodes on this
        thread. Blocks until all are stored, or budget_ms (0: 30000)."""
        built = _Items(items)
        options, _held = put_options(parent, depth, budget_ms, durable)
        statuses = ffi.new("int32_t[]", max(len(items), 1))
        status = lib.kvf_put(self._c, built.c, built.n, options, statuses)
        if status == Status["ERR_INVALID"]:
            raise error(status, "kvf_put")
        return [Status(statuses[i]) for i in range(len(items))]

    def get(self, keys: Sequence[Key], budget_ms: int = 0) -> List[Hit]:
        """Get blocks, keys in chain order; every hit's lease is the caller's to release. Blocks up
        to budget_ms (0: 10000)."""
        built = _Keys(keys)
        hits = ffi.new("struct kvf_hit[]", max(built.n, 1))
        status = lib.kvf_get(self._c, built.c, built.n, get_options(budget_ms), hits)
        if status == Status["ERR_INVALID"]:
            raise error(status, "kvf_get")
        return [_hit(hits[i]) for i in range(built.n)]

    def lookup(self, keys: Sequence[Key], *, lease: bool = False, prefetch: bool = False,
               budget_ms: int = 0, n_tails: int = 0) -> Lookup:
        """How long is the leading run of these keys? Blocks for a round trip and budget_ms."""
        built = _Keys(keys)
        out = ffi.new("struct kvf_lookup_result *")
        options = _lookup_options(lease, prefetch, budget_ms, n_tails)
        status = check(lib.kvf_lookup(self._c, built.c, built.n, options, out), "kvf_lookup")
        return _lookup(status, out)

    def evict(self, keys: Sequence[Key]) -> int:
        """Forget whole sets; how many were there. Blocks for a round trip."""
        built, out = _Keys(keys), ffi.new("uint32_t *")
        check(lib.kvf_evict(self._c, built.c, built.n, out), "kvf_evict")
        return int(out[0])

    def release(self, lease: int) -> bool:
        """Give a lease back. True: every byte that was read under it was the block's."""
        return bool(lib.kvf_lease_release(self._c, lease) == 0)

    def holds(self, lease: int) -> bool:
        """Whether a lease is good at this moment."""
        return bool(lib.kvf_lease_check(self._c, lease) == 0)

    def decode(self, hit: Hit, pages: Pages, page_ids: Sequence[int], token_first: int = 0,
               n_tokens: int = 0) -> None:
        """Write tokens of a hit into pages: token token_first of the block is the first one of
        page_ids[0]. Runs on this thread; other threads of Python run meanwhile."""
        view = View(pages, page_ids)
        check(lib.kvf_decode(self._c, ffi.cast("const void *", hit.record), hit.record_bytes, 0, 0,
                             token_first, n_tokens, view.c), "kvf_decode")

    # --- asynchronous calls -----------------------------------------------------------------------

    def submit_put(self, items: Sequence[Put], *, parent: Optional[Key] = None, depth: int = 0,
                   budget_ms: int = 0, durable: bool = False, user: int = 0) -> int:
        """Encode into staging and queue; the pages are the caller's again when this returns. The id
        of the request. BusyError: staging or credits are used up, nothing was queued."""
        built = _Items(items)
        options, _held = put_options(parent, depth, budget_ms, durable)
        out = ffi.new("uint64_t *")
        check(lib.kvf_submit_put(self._c, built.c, built.n, options, user, out), "kvf_submit_put")
        return int(out[0])

    def submit_get(self, keys: Sequence[Key], budget_ms: int = 0, user: int = 0) -> int:
        """Queue a get. The id of the request."""
        built, out = _Keys(keys), ffi.new("uint64_t *")
        check(lib.kvf_submit_get(self._c, built.c, built.n, get_options(budget_ms), user, out),
              "kvf_submit_get")
        return int(out[0])

    def submit_lookup(self, keys: Sequence[Key], *, lease: bool = False, prefetch: bool = False,
                      budget_ms: int = 0, n_tails: int = 0, user: int = 0) -> int:
        """Queue a lookup. The id of the request."""
        built, out = _Keys(keys), ffi.new("uint64_t *")
        options = _lookup_options(lease, prefetch, budget_ms, n_tails)
        check(lib.kvf_submit_lookup(self._c, built.c, built.n, options, user, out),
              "kvf_submit_lookup")
        return int(out[0])

    def poll(self, timeout_ms: int = 0) -> List[Event]:
        """Completions. Blocks up to timeout_ms for the first. A broken connection raises nothing:
        its requests complete with ERR_DISCONNECTED, here or in the next call."""
        out = ffi.new("uint32_t *")
        status = lib.kvf_poll(self._c, self._events, 64, timeout_ms, out)
        if status < 0 and status != Status["ERR_DISCONNECTED"]:
            raise error(status, "kvf_poll")
        return [self._event(self._events[i]) for i in range(out[0])]

    @staticmethod
    def _event(c: Any) -> Event:
        is_request = c.kind == lib.KVF_EVENT_REQUEST
        lookup = _lookup(c.hit.status, c.lookup) if is_request else None
        return Event(int(c.request), int(c.user), is_request, int(c.index), _hit(c.hit), lookup)

    def cancel(self, request: int) -> bool:
        """Ask to end a request early; its events still come. False: it was not in flight."""
        return bool(lib.kvf_cancel(self._c, request) == 0)


class _Said:
    """What the library says of a handle."""

    def __init__(self, log: Optional[Callable[[int, str], None]]):
        self.log: Callable[[int, str], None] = log or (lambda severity, line: None)
        self.last = ""

    def hear(self, _arg: Any, severity: int, line: Any) -> None:
        """A line from C."""
        if severity <= SEVERITY_WARNING:
            self.last = text(line)
        self.log(severity, text(line))


def _close(c: Any, _held: List[Any]) -> None:
    """Close the handle while what it may call is still there."""
    lib.kvf_close(c)


class _Items:
    """An array of struct kvf_put_item and all that it points to."""

    def __init__(self, items: Sequence[Put]):
        self._held: List[Any] = []
        self.n = len(items)
        self.c = ffi.new("struct kvf_put_item[]", max(self.n, 1))
        for c, item in zip(self.c, items):
            c.struct_bytes = ffi.sizeof("struct kvf_put_item")
            c.key = self._key(item.key)
            if item.supersedes is not None:
                c.supersedes = self._key(item.supersedes)
            c.token_start, c.n_tokens = item.token_start, item.n_tokens
            if item.pages is not None:
                view = View(item.pages, item.page_ids)
                self._held.append(view)
                c.source, c.kv = lib.KVF_SOURCE_VIEW, view.c
            else:
                self._held.append(item.data)
                c.source = lib.KVF_SOURCE_BYTES
                c.data = ffi.cast("const void *", address(item.data))
                c.data_bytes = getattr(item.data, "nbytes", None) or len(item.data)

    def _key(self, key: Key) -> Tuple[Any, int]:
        self._held.append(ffi.from_buffer(key))
        return self._held[-1], len(key)


def put_options(parent: Optional[Key], depth: int, budget_ms: int,
                durable: bool) -> Tuple[Any, Any]:
    """A kvf_put_options, and what it points to."""
    options = ffi.new("struct kvf_put_options *")
    options.struct_bytes = ffi.sizeof("struct kvf_put_options")
    options.flags = lib.KVF_PUT_DURABLE if durable else 0
    options.depth, options.budget_ms = depth, budget_ms
    held = None
    if parent is not None:
        held = ffi.from_buffer(parent)
        options.parent = (held, len(parent))
    return options, held


def get_options(budget_ms: int) -> Any:
    """A kvf_get_options."""
    options = ffi.new("struct kvf_get_options *")
    options.struct_bytes = ffi.sizeof("struct kvf_get_options")
    options.budget_ms = budget_ms
    return options


def _lookup_options(lease: bool, prefetch: bool, budget_ms: int, n_tails: int) -> Any:
    options = ffi.new("struct kvf_lookup_options *")
    options.struct_bytes = ffi.sizeof("struct kvf_lookup_options")
    options.flags = ((lib.KVF_LOOKUP_LEASE if lease else 0)
                     | (lib.KVF_LOOKUP_PREFETCH if prefetch else 0))
    options.budget_ms, options.n_tail_keys = budget_ms, n_tails
    return options
