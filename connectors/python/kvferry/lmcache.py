# SPDX-License-Identifier: Apache-2.0
"""The native plug-in for LMCache's server: chunks of its L1 go to kvferryd and come back.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{"type": "native_plugin",
        "module_path": "kvferry.lmcache", "class_name": "KvferryConnector", "adapter_params": {}}'

LMCache wraps the object in its NativeConnectorL2Adapter: submit_... calls return a number at once
and a descriptor becomes readable when drain_completions() has answers. Keys are LMCache's own
strings (model, rank, group, hash of the chunk, salt); a key of kvferry is the SHA-256 of one. The
bytes are LMCache's, whose layout is not known here: they are stored as they are.
"""
import ctypes
import hashlib
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from kvferry import hostio, identity, settings
from kvferry.buffers import address
from kvferry.client import RECORD_PAGE_BYTES, Client, Hit, Put
from kvferry.errors import KvferryError
from kvferry.session import Session

WHERE = "adapter_params"
IDLE_S = 1.0
logger = logging.getLogger("lmcache.kvferry")

Completion = Tuple[int, bool, str, Optional[List[bool]]]


@dataclass(frozen=True)
class Settings:
    """adapter_params."""

    socket: Optional[str] = None  # else $KVFERRY_SOCKET, else the library's
    namespace: str = ""  # separates applications, and models of one name
    weights_digest: str = ""  # of the model; engines with other weights find nothing then
    lookup_budget_ms: int = 1000
    load_budget_ms: int = 5000
    store_budget_ms: int = 10_000
    staging_bytes: int = 0  # for puts; 0: the daemon's default
    allow_untested: bool = False  # versions of LMCache that are not in tested_versions.json


@dataclass
class Counters:
    """What the connector has done, in chunks."""

    stored: int = 0
    not_stored: int = 0  # no room, or no daemon
    loaded: int = 0
    failed: int = 0  # asked for, and not there, or of another size


def key_bytes(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class _Worker:
    """A thread that does one thing after another, a handle belonging to one thread, and calls idle
    now and then where there is nothing."""

    def __init__(self, name: str, idle: Callable[[], None]):
        self._idle = idle
        self._tasks: "queue.SimpleQueue[Optional[Callable[[], None]]]" = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        """What has been added before is done first."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=IDLE_S)
            except queue.Empty:
                self._idle()
                continue
            if task is None:
                return
            task()


class KvferryConnector:
    """The object that LMCache's native_plugin adapter makes and calls, from any thread. Without a
    daemon nothing is found and nothing is stored."""

    def __init__(self, **adapter_params: Any):
        self._settings = settings.read(Settings, adapter_params, WHERE)
        digest = settings.digest(self._settings.weights_digest, WHERE)
        warning = identity.check_version("lmcache", metadata.version("lmcache"),
                                         self._settings.allow_untested, WHERE)
        self._said: Set[str] = set()
        if warning is not None:
            self._warn_once(warning)
        self.counters = Counters()
        self._lock = threading.Lock()
        self._done: List[Completion] = []
        self._n_submitted = 0
        self._closed = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        options: Dict[str, Any] = {"socket_path": self._settings.socket, "name": "lmcache",
                                   "namespace_label": self._settings.namespace,
                                   "weights_digest": digest}
        few: Dict[str, Any] = {**options, "staging_bytes": hostio.LOAD_STAGING_BYTES}
        self._puts = Session(self._warn_once, self._connected,
                             staging_bytes=self._settings.staging_bytes, **options)
        self._gets = Session(self._warn_once, self._connected, **few)
        self._lookups = hostio.Lookups(Session(self._warn_once, self._connected, **few),
                                       self._settings.lookup_budget_ms)
        self._writer = _Worker("kvferry-store", lambda: _tick(self._puts))
        self._reader = _Worker("kvferry-load", self._reader_idle)

    # --- what LMCache calls -----------------------------------------------------------------------

    def event_fd(self) -> int:
        """Readable while drain_completions() has something."""
        return self._fd

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Store each buffer under its key. All of them, or the request has failed."""
        return self._submit(self._writer, lambda: self._store(keys, memoryviews))

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        """Fill each buffer whose key is stored with as many bytes: which ones."""
        return self._submit(self._reader, lambda: self._load(keys, memoryviews))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Which keys are stored. What a leading run of them has in memory stays there until it is
        loaded, for some seconds; the rest of the run begins to come."""
        return self._submit(self._reader, lambda: self._exists(keys), False)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Forget keys: which were there."""
        return self._submit(self._writer, lambda: self._delete(keys))

    def drain_completions(self) -> List[Completion]:
        """(number, whether all went well, why not, for each key whether it did) of what is done."""
        with self._lock:
            done, self._done = self._done, []
            if done:
                os.eventfd_read(self._fd)
        return done

    def close(self) -> None:
        """End what has been submitted, and let go of the daemon. A second time does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writer.close()
        self._reader.close()
        self._lookups.close()
        self._puts.close()
        self._gets.close()
        os.close(self._fd)

    # --- the threads ------------------------------------------------------------------------------

    def _submit(self, worker: _Worker, task: Callable[[], List[bool]],
                needs_all: bool = True) -> int:
        """needs_all: the request has failed where one key has. Of a lookup that did not succeed
        LMCache believes nothing."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the connector is closed")
            self._n_submitted += 1
            number = self._n_submitted
            # with the lock held: close() comes before or after
            worker.add(lambda: self._finish(number, task, needs_all))
        return number

    def _finish(self, number: int, task: Callable[[], List[bool]], needs_all: bool) -> None:
        try:
            each = task()
            completion: Completion = (number, all(each) or not needs_all, "", each)
        except Exception as error:  # LMCache waits for an answer, whatever has happened
            logger.exception("kvferry: a request failed")
            completion = (number, False, str(error), None)
        with self._lock:
            self._done.append(completion)
            os.eventfd_write(self._fd, 1)

    def _store(self, keys: Sequence[str], views: Sequence[memoryview]) -> List[bool]:
        client = self._puts.client()
        items = [Put(key_bytes(key), data=view) for key, view in zip(keys, views)]
        stored = [False] * len(items)
        if client is not None:
            stored = hostio.store(client, items, None, 0, self._settings.store_budget_ms)
        self.counters.stored += sum(stored)
        self.counters.not_stored += len(stored) - sum(stored)
        return stored

    def _exists(self, keys: Sequence[str]) -> List[bool]:
        names = [key_bytes(key) for key in keys]
        run = self._lookups.run(names)
        rest = names[run + 1:]  # the one behind a run is not there
        return ([True] * run + [False] * (run < len(names)) +
                (self._lookups.each(rest) if rest else []))

    def _load(self, keys: Sequence[str], views: Sequence[memoryview]) -> List[bool]:
        client = self._gets.client()
        names = [key_bytes(key) for key in keys]
        loaded: List[bool] = []
        deadline = time.monotonic() + self._settings.load_budget_ms / 1000
        while client is not None and len(loaded) < len(names):
            left, first = hostio.left_ms(deadline), len(loaded)
            if left == 0:
                break
            good = hostio.fetch(client, names[first:], left,
                                lambda index, hit: _copy(hit, views[first + index]))
            loaded += [True] * good
            if len(loaded) < len(names):
                loaded.append(False)
        self._lookups.fetched(names)
        loaded += [False] * (len(names) - len(loaded))
        self.counters.loaded += sum(loaded)
        self.counters.failed += len(loaded) - sum(loaded)
        return loaded

    def _delete(self, keys: Sequence[str]) -> List[bool]:
        client = self._puts.client()
        deleted = []
        for key in keys:
            try:
                deleted.append(client is not None and client.evict([key_bytes(key)]) == 1)
            except KvferryError:
                deleted.append(False)
        return deleted

    def _reader_idle(self) -> None:
        _tick(self._gets)
        self._lookups.tick()

    # --- sessions ---------------------------------------------------------------------------------

    def _warn_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.warning("kvferry: %s", line)

    @staticmethod
    def _connected(_client: Client) -> None:
        """Opaque bytes need no more than a namespace, which is agreed on by attaching."""


def _tick(session: Session) -> None:
    hostio.tick(session.client() if session.is_open else None)


def _copy(hit: Hit, view: memoryview) -> bool:
    """A block into LMCache's buffer, with other threads of Python running meanwhile. Not one of
    another size, as of another layout."""
    size = hit.record_bytes - RECORD_PAGE_BYTES
    if size != view.nbytes:
        return False
    ctypes.memmove(address(view), hit.record + RECORD_PAGE_BYTES, size)
    return True
