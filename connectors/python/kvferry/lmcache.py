# SPDX-License-Identifier: Apache-2.0
"""The native plug-in for LMCache's server: chunks of its L1 go to kvferryd and come back.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{"type": "native_plugin",
        "module_path": "kvferry.lmcache", "class_name": "KvferryConnector", "adapter_params": {}}'

LMCache wraps the object in its NativeConnectorL2Adapter: submit_... calls return a number at once
and a descriptor becomes readable when drain_completions() has answers. Keys are LMCache's own
strings (model, rank, group, hash of the chunk, salt), which say of the model only how it is called.
A key of kvferry is the SHA-256 of one, under the digest of the model's files where the name is the
folder of them. The bytes are LMCache's, whose layout is not known here: they are stored as they
are.
"""
import ctypes
import hashlib
import json
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from kvferry import hostio, identity, settings
from kvferry.buffers import address
from kvferry.client import RECORD_PAGE_BYTES, Client, Hit, Put
from kvferry.errors import KvferryError
from kvferry.session import Session
from kvferry.warning import WarnOnce

WHERE = "adapter_params"
KEY_SEPARATOR = "@"  # LMCache refuses names of models with it
IDLE_S = 1.0
LOOK_S = 1.0  # between two looks at whether a model's files have changed
logger = logging.getLogger("lmcache.kvferry")

Completion = Tuple[int, bool, str, Optional[List[bool]]]


@dataclass(frozen=True)
class Settings:
    """adapter_params."""

    socket: Optional[str] = None  # else $KVFERRY_SOCKET, else the library's
    namespace: str = ""  # separates applications, and models of one name
    weights_digest: str = ""  # of the model, where its name is not the folder of its files here
    lookup_budget_ms: int = 1000
    load_budget_ms: int = 5000
    store_budget_ms: int = 10_000
    staging_bytes: int = 0  # for puts; 0: the daemon's default
    allow_untested: bool = False  # versions of LMCache that are not in tested_versions.json


@dataclass
class Counters:
    """What the connector has done, in chunks."""

    stored: int = 0
    not_stored: int = 0  # no room, no daemon, or weights whose digest is still being made
    loaded: int = 0
    failed: int = 0  # asked for, and not there, or of another size


def key_bytes(key: str, model: Optional[bytes] = None) -> bytes:
    """The name of a chunk: LMCache's, under the digest of the model's files where that is known."""
    return identity.adapter_key(hashlib.sha256(key.encode()).digest(), model)


Stamp = Optional[Tuple[Tuple[str, int, int, int], ...]]


def stamp(folder: Path) -> Stamp:
    """What changes with the files of a folder; None: no folder that can be read."""
    made = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_there = os.path.exists(entry.path)  # else a link to nothing, as it lies there
                stat = entry.stat(follow_symlinks=is_there)
                made.append((entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    except OSError:
        return None
    return tuple(sorted(made))


class Models:
    """Digests of the models that keys name. A name is what vLLM was started with, so an absolute
    path is the folder of the files, where this machine has it; a name of a hub says nothing. Any
    thread; weights are read on one of its own, the first time for as long as that takes."""

    def __init__(self, has_digest: bool, is_apart: bool, warn: Callable[[str], None]):
        """has_digest: the weights are named by the settings. is_apart: some setting keeps models of
        one name apart."""
        self._has_digest = has_digest
        self._is_apart = is_apart
        self._warn = warn
        self._known: Dict[str, Optional[bytes]] = {}
        self._begun: Dict[str, Stamp] = {}  # of folders, when their files began to be read
        self._looked: Dict[str, float] = {}
        self._lock = threading.Lock()

    def keys(self, keys: Sequence[str]) -> Optional[List[bytes]]:
        """The names of chunks. None: not known yet, and nothing is to be stored or found."""
        names = [key.split(KEY_SEPARATOR, 1)[0] for key in keys]
        with self._lock:
            for name in set(names):
                self._look(name)
            if not self._known.keys() >= set(names):
                return None
            return [key_bytes(key, self._known[name]) for key, name in zip(keys, names)]

    def _look(self, name: str) -> None:
        """Read a folder the first time, and again when its files are others: engines come and go
        while this server runs. With the lock held."""
        now = time.monotonic()
        if name in self._begun and (self._begun[name] is None
                                    or now < self._looked[name] + LOOK_S):
            return
        folder = Path(name)
        seen = stamp(folder) if folder.is_absolute() else None
        self._looked[name] = now
        if name in self._begun and seen in (self._begun[name], None):
            return  # as before, or taken away under an engine that has them
        self._known.pop(name, None)
        self._begun[name] = seen
        if seen is None:
            self._known[name] = self._without(name)
        else:
            threading.Thread(target=self._read, args=(name, folder, seen), name="kvferry-weights",
                             daemon=True).start()

    def _read(self, name: str, folder: Path, seen: Stamp) -> None:
        digest: Optional[bytes] = None
        try:
            weights = b"" if self._has_digest else identity.folder_digest(folder)
            how = json.dumps(identity.configs(folder, True), sort_keys=True)
            if weights is not None:
                digest = hashlib.sha256(weights + how.encode()).digest()
        except OSError as error:
            self._warn(f"'{name}' cannot be read: {error}")
        if digest is None:
            self._without(name)
        with self._lock:
            if self._begun.get(name) == seen:
                self._known[name] = digest

    def _without(self, name: str) -> None:
        """Nothing is known of a model but its name."""
        if not self._is_apart:
            self._warn(f"the weights of '{name}' are not known here: engines with other ones under "
                       f"that name find each other's chunks. Set weights_digest or namespace in "
                       f"{WHERE}, or start the engine with the folder of the model, where this "
                       "server has it too")


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
        self._warn_once = WarnOnce(logger)
        self._models = Models(bool(digest), bool(digest or self._settings.namespace),
                              self._warn_once)
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
        client, names = self._puts.client(), self._models.keys(keys)
        stored = [False] * len(keys)
        if client is not None and names is not None:
            items = [Put(name, data=view) for name, view in zip(names, views)]
            stored = hostio.store(client, items, None, 0, self._settings.store_budget_ms)
        self.counters.stored += sum(stored)
        self.counters.not_stored += len(stored) - sum(stored)
        return stored

    def _exists(self, keys: Sequence[str]) -> List[bool]:
        names = self._models.keys(keys)
        if names is None:
            return [False] * len(keys)
        run = self._lookups.run(names)
        rest = names[run + 1:]  # the one behind a run is not there
        return ([True] * run + [False] * (run < len(names)) +
                (self._lookups.each(rest) if rest else []))

    def _load(self, keys: Sequence[str], views: Sequence[memoryview]) -> List[bool]:
        client, names = self._gets.client(), self._models.keys(keys) or []
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
        loaded += [False] * (len(keys) - len(loaded))
        self.counters.loaded += sum(loaded)
        self.counters.failed += len(loaded) - sum(loaded)
        return loaded

    def _delete(self, keys: Sequence[str]) -> List[bool]:
        client, names = self._puts.client(), self._models.keys(keys)
        if names is None:
            return [False] * len(keys)
        deleted = []
        for name in names:
            try:
                deleted.append(client is not None and client.evict([name]) == 1)
            except KvferryError:
                deleted.append(False)
        return deleted

    def _reader_idle(self) -> None:
        _tick(self._gets)
        self._lookups.tick()

    # --- sessions ---------------------------------------------------------------------------------

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
