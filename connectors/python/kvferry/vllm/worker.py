# SPDX-License-Identifier: Apache-2.0
"""A worker's side for pages in host memory: the CPU codecs.

Stores are encoded on the engine's thread when the step has run, so that pages are free again before
anybody can have them: nothing waits for a preempted or aborted request's store. What does not fit
into staging is left out: a store that is dropped is a miss some day, and no more. Loads run on a
thread of their own, between steps, into pages that only their request has.
"""
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from kvferry.buffers import Pages
from kvferry.client import Client, Hit, Put
from kvferry.errors import BusyError, KvferryError, SessionError, Status
from kvferry.session import Session, agrees
from kvferry.vllm.jobs import LoadChunk, LoadJob, Report, StoreChunk
from kvferry.vllm.stats import WorkerCounters

# Blocks that one get asks for: they are leased together, and a client may hold a share of the arena
GET_CHUNKS = 16
# What a step's stores wait for room in staging, all together. The daemon makes room at the rate of
# a copy, so that a step which has more to store than staging holds loses none of it.
ROOM_S = 0.02
ROOM_POLL_MS = 5  # to be attached again is no completion, and ends no wait
LOAD_STAGING_BYTES = 1 << 20  # a handle that only loads needs none
TICK_S = 1.0  # between two looks of a handle that rests


@dataclass
class Done:
    """A load, and in the end what has come of it. bad: pages that hold nothing."""

    job: LoadJob
    began: float = field(default_factory=time.monotonic)
    bad: Set[int] = field(default_factory=set)
    failed: Set[bytes] = field(default_factory=set)
    loaded: int = 0
    too_slow: int = 0
    gone: int = 0
    seconds: float = 0.0

    @property
    def request_id(self) -> str:
        return self.job.request_id

    def saw(self, status: int) -> None:
        """What came of a block that has not hit."""
        self.too_slow += status == Status["TOO_SLOW"]
        self.gone += status == Status["MISS"]

    def end(self, good: int) -> None:
        """Over: so many leading chunks are good. Nothing of the others is to be believed. Only the
        first of them is said to have failed: the engine computes from its first page on, and those
        behind it may be fine."""
        self.loaded = good
        left = self.job.chunks[good:]
        for chunk in left:
            self.bad.update(chunk.pages)
        if left:
            self.failed.add(left[0].key)
        self.seconds = time.monotonic() - self.began

    def collect(self, requests: Set[str], bad: Set[int], report: Report,
                counters: WorkerCounters) -> None:
        """Add this to what a worker tells."""
        requests.add(self.request_id)
        bad |= self.bad
        if self.failed:
            report.merge(Report({self.request_id: self.failed}))
        counters.loaded += self.loaded
        counters.failed += len(self.failed)
        counters.loads += 1
        counters.load_s += self.seconds
        counters.loads_late += self.seconds * 1000 > self.job.budget_ms
        counters.failed_too_slow += self.too_slow
        counters.failed_gone += self.gone
        left = len(self.job.chunks) - self.loaded
        counters.failed_lost += max(0, left - self.too_slow - self.gone)


def count(counters: WorkerCounters, stored: Dict[bytes, int], status: int,
          key: Optional[bytes]) -> None:
    """A store has been answered."""
    if status == Status["OK"]:
        counters.stored += 1
    elif status == Status["EXISTS"]:
        counters.present += 1
    else:
        counters.refused += 1
        return
    if key is not None:
        stored[key] = 1


class Worker:
    """Made by the engine's thread, which calls everything but _run."""

    def __init__(self, pages: Pages, session: Callable[..., Session], stores: bool,
                 warn: Callable[[str], None]):
        self._pages = pages
        self._stores = stores
        self._warn = warn
        self._store_session = session()
        self._load_session = session(staging_bytes=LOAD_STAGING_BYTES)
        self._store_session.client()  # now, since it may take a moment
        self._queue: "queue.SimpleQueue[Optional[LoadJob]]" = queue.SimpleQueue()
        self._done: "queue.SimpleQueue[Done]" = queue.SimpleQueue()
        self._put_keys: Dict[int, bytes] = {}
        self._stored: Dict[bytes, int] = {}
        self.counters = WorkerCounters()
        self._thread = threading.Thread(target=self._run, name="kvferry-load", daemon=True)
        self._thread.start()

    # --- stores -----------------------------------------------------------------------------------

    def store(self, chunks: List[StoreChunk], lossless: bool) -> None:
        """Encode chunks and hand them over. The pages may be rewritten when this returns. Waits for
        the daemon at most ROOM_S."""
        client = self._store_session.client() if self._stores and chunks else None
        if client is None:
            self.counters.skipped += len(chunks) if self._stores else 0
            return
        began = time.monotonic()
        self._collect(client)
        deadline = began + ROOM_S
        for chunk in chunks:
            try:
                if self._put(client, chunk, deadline, lossless):
                    self.counters.handed += 1
                else:
                    self.counters.skipped += 1
            except (BusyError, SessionError):
                self.counters.skipped += 1
            except KvferryError as error:
                self.counters.skipped += 1
                self._warn(f"store: {error}")
        spent = time.monotonic() - began
        self.counters.store_s += spent
        client.report("spent-us", int(spent * 1e6))

    def _put(self, client: Client, chunk: StoreChunk, deadline: float, lossless: bool) -> bool:
        """False: the profile in force is another one than the chunk is meant for."""
        item = Put(chunk.key, pages=self._pages, page_ids=chunk.pages,
                   token_start=chunk.token_start, n_tokens=chunk.n_tokens,
                   supersedes=chunk.supersedes)
        while True:
            try:
                if not agrees(client, lossless):
                    return False
                request = client.submit_put([item], parent=chunk.parent, depth=chunk.depth)
                self._put_keys[request] = chunk.key
                return True
            except (BusyError, SessionError) as error:
                left = deadline - time.monotonic()
                if left <= 0 or (isinstance(error, SessionError) and not error.is_attaching):
                    raise
                self._collect(client, max(1, min(ROOM_POLL_MS, int(left * 1000))))

    def _collect(self, client: Client, timeout_ms: int = 0) -> None:
        """Take completions of stores, which give staging back; wait for the first."""
        while events := client.poll(timeout_ms):
            timeout_ms = 0
            for event in events:
                if event.is_request:
                    self._put_keys.pop(event.request, None)
                else:
                    count(self.counters, self._stored, event.hit.status,
                          self._put_keys.get(event.request))

    def idle(self) -> None:
        """Take completions of stores. Does not block."""
        client = self._store_session.client() if self._store_session.is_open else None
        if client is not None:
            self._collect(client)

    # --- loads ------------------------------------------------------------------------------------

    def load(self, job: LoadJob) -> None:
        """Start a load. Does not block; finished() tells of its end, exactly once."""
        self._queue.put(job)

    def finished(self) -> Tuple[Set[str], Set[int], Report]:
        """Loads that have ended since the last call: requests, pages that hold nothing, and keys
        that did not load. Does not block."""
        requests: Set[str] = set()
        bad: Set[int] = set()
        report = Report()
        while True:
            try:
                done = self._done.get_nowait()
            except queue.Empty:
                report.stored, self._stored = self._stored, {}
                return requests, bad, report
            done.collect(requests, bad, report, self.counters)

    def _run(self) -> None:
        """The thread of loads."""
        while (job := self._next_job()) is not None:
            done = Done(job)
            try:
                self._load(job, done)
            except Exception as error:  # whatever it is, the request must end
                self._warn(f"load of {job.request_id}: {error!r}")
                done.end(0)
            self._done.put(done)
        self._load_session.close()

    def _next_job(self) -> Optional[LoadJob]:
        """Wait for a load. Meanwhile the handle is called now and then: it lets go of the memory of
        a daemon that has died, which the next one needs."""
        while True:
            try:
                return self._queue.get(timeout=TICK_S)
            except queue.Empty:
                client = self._load_session.client() if self._load_session.is_open else None
                try:
                    if client is not None:
                        client.poll(0)
                except KvferryError as error:
                    if not isinstance(error, SessionError):
                        self._warn(f"load: {error}")

    def _load(self, job: LoadJob, done: Done) -> None:
        client, good = self._load_session.client(), 0
        deadline, left_ms = time.monotonic() + job.budget_ms / 1000, job.budget_ms
        while client is not None and good < len(job.chunks) and left_ms > 0:
            part = job.chunks[good:good + GET_CHUNKS]
            came = self._load_part(client, part, done, left_ms)
            left_ms = int((deadline - time.monotonic()) * 1000)
            good += came
            if came < len(part):
                break
        done.end(good)
        if client is not None and good < len(job.chunks):
            client.report("load-failed", len(job.chunks) - good)

    def _load_part(self, client: Client, chunks: List[LoadChunk], done: Done,
                   budget_ms: int) -> int:
        """Load chunks; how many leading ones are good."""
        try:
            if not client.info().connected:
                client.ping(max(budget_ms, 1))  # a daemon that has come back is attached to first
            hits = client.get([chunk.key for chunk in chunks], budget_ms)
            whole = client.info().lossless == done.job.lossless
        except KvferryError:
            return 0
        good = 0
        for chunk, hit in zip(chunks, hits):
            done.saw(hit.status)
            whole = self._load_one(client, chunk, hit, whole) and whole
            good += whole
        return good

    def _load_one(self, client: Client, chunk: LoadChunk, hit: Hit, wanted: bool) -> bool:
        """Decode a hit into its pages, unless one before it has failed, and give its lease back."""
        if hit.status != 0:
            return False
        try:
            if wanted:
                client.decode(hit, self._pages, chunk.pages, chunk.token_first, chunk.n_tokens)
        except KvferryError as error:
            self._warn(f"load: {error}")
            wanted = False
        # What was read under the lease is the block's only if the lease was good to the end.
        return client.release(hit.lease) and wanted

    def close(self) -> None:
        """End the thread of loads when what it has begun is done, and close the handles. Blocks as
        long as the load that is running may take."""
        self._queue.put(None)
        self._thread.join()
        self._store_session.close()


def make_session(warn: Callable[[str], None], **options: Any) -> Callable[..., Session]:
    """What makes sessions of a worker, one a thread; a call may name options of its own."""
    return lambda **own: Session(warn, **{**options, **own})
