# SPDX-License-Identifier: Apache-2.0
"""Blocks between an engine's host memory and the daemon, for engines that call from threads of
their own: every call here may block, for as long as the budget that it is given.

A handle is used by one thread at a time; what is leased by a lookup is given back by whoever has
fetched it, on a thread of its own.
"""
import threading
import time
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

from kvferry.client import REQUEST_KEYS_MAX, Client, Event, Hit, Lookup, Put
from kvferry.errors import BusyError, KvferryError, SessionError, Status
from kvferry.session import Session, agrees

# Blocks that one get asks for: they are leased together, and a client may hold a share of the arena
GET_BLOCKS = 16
LEASE_S = 10.0  # a run that has not been fetched by then is given up
ATTACH_MS = 20
# A page computed again, in another batch, has other last bits: the first one stands, and is there.
STORED = (Status["OK"], Status["EXISTS"], Status["ERR_CONFLICT"])
TICK_S = 1.0  # how often a handle that rests is to tick
LOAD_STAGING_BYTES = 1 << 20  # a handle that puts nothing needs none


def attach(client: Client) -> None:
    """Attach to a daemon that has come back, or go on doing so. KvferryError: there is none yet,
    and the engine computes meanwhile: no call waits longer than ATTACH_MS for that."""
    if not client.info().connected:
        client.ping(ATTACH_MS)


def left_ms(deadline: float) -> int:
    """Milliseconds until then, rounded up; 0: it has passed."""
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)


def tick(client: Optional[Client]) -> None:
    """For a handle that has nothing to do for a while: notice that the daemon is gone, and let go
    of its memory. A daemon that has started again has little room until all have."""
    try:
        if client is not None:
            client.poll()
    except KvferryError:
        pass  # nobody listens


def report(client: Client, loaded_tokens: int, failed: int) -> None:
    """Count for the daemon's metrics what a load has come to: tokens, and blocks that had been
    promised and did not come."""
    try:
        client.report("tokens-loaded", loaded_tokens)
        client.report("load-failed", failed)
    except KvferryError:
        pass  # nobody listens


def fetch(client: Client, keys: Sequence[bytes], budget_ms: int,
          take: Callable[[int, Hit], bool]) -> int:
    """Get blocks in chain order and hand each to take(index, hit), which copies it to where it is
    wanted and says whether it could. How many leading ones are good to be used: what was copied
    under a lease that was lost is not. Nothing is taken of another kind of profile than the caller
    has seen in force."""
    deadline = time.monotonic() + budget_ms / 1000
    try:
        lossless = client.info().lossless
        attach(client)
        for first in range(0, len(keys), GET_BLOCKS):
            part = keys[first:first + GET_BLOCKS]
            left = left_ms(deadline)
            good = _fetch_part(client, part, left, first, take, lossless) if left > 0 else 0
            if good < len(part):
                return first + good
    except KvferryError:
        return 0
    return len(keys)


def _fetch_part(client: Client, keys: Sequence[bytes], budget_ms: int, first: int,
                take: Callable[[int, Hit], bool], lossless: bool) -> int:
    hits = client.get(keys, budget_ms)
    good, whole = 0, client.info().lossless == lossless
    for index, hit in enumerate(hits, first):
        whole = whole and hit.status == 0 and take(index, hit)
        if hit.status == 0:
            whole = client.release(hit.lease) and whole
        good += whole
    return good


def store(client: Client, items: Sequence[Put], parent: Optional[bytes], depth: int,
          budget_ms: int) -> List[bool]:
    """Put blocks in chain order: which are stored now. Nothing is put behind one that had no
    room, nor under another kind of profile than the caller has seen in force."""
    deadline = time.monotonic() + budget_ms / 1000
    stored = [False] * len(items)
    pending: Dict[int, int] = {}
    try:
        lossless = client.info().lossless
        attach(client)
        for index, item in enumerate(items):
            request = _submit(client, item, parent, depth, deadline, pending, stored, lossless)
            if request is None:
                break
            pending[request] = index
            parent, depth = bytes(item.key), depth + 1
        while pending and (left := left_ms(deadline)) > 0:
            _settle(client.poll(left), pending, stored)
    except KvferryError:
        pass  # what has been answered counts
    return stored


def _submit(client: Client, item: Put, parent: Optional[bytes], depth: int, deadline: float,
            pending: Dict[int, int], stored: List[bool], lossless: bool) -> Optional[int]:
    """Queue one block, as soon as there is room for it. None: there was none in time, or another
    kind of profile is in force."""
    while True:
        try:
            if not agrees(client, lossless):
                return None
            return client.submit_put([item], parent=parent, depth=depth)
        except (BusyError, SessionError) as error:
            left = left_ms(deadline)
            attaching = isinstance(error, SessionError)
            if left == 0 or (attaching and not error.is_attaching):
                return None
            # Room comes with a completion, and an attached handle with none.
            _settle(client.poll(min(left, 1) if attaching else left), pending, stored)


def _settle(events: List[Event], pending: Dict[int, int], stored: List[bool]) -> None:
    """Take completions. Those of an earlier call, which had no time for them, are not asked for."""
    for event in events:
        if event.request not in pending:
            continue
        if event.is_request:
            del pending[event.request]
        else:
            stored[pending[event.request]] = event.hit.status in STORED


class Lookups:
    """Which keys are stored. What a run has ready is leased until it has been fetched, or for
    LEASE_S. Any thread; no call waits for blocks that come from slower tiers."""

    def __init__(self, session: Session, budget_ms: int):
        self._session = session
        self._budget_ms = budget_ms
        self._lock = threading.Condition()
        self._held: Dict[bytes, Tuple[int, float]] = {}  # by the last key of what is leased
        self._thread: Optional[threading.Thread] = None
        self._closed = False

    def run(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored, on whatever tier; what is in memory is leased, and the
        rest begins to come."""
        with self._lock:
            total = 0
            for first in range(0, len(keys), REQUEST_KEYS_MAX):
                part = keys[first:first + REQUEST_KEYS_MAX]
                answer, = self._ask([part], True)
                total += self._keep(part, answer)
                if total < first + len(part):
                    break
            return total

    def each(self, keys: Sequence[bytes]) -> List[bool]:
        """Which keys are stored, one by one: for those that need not begin a run."""
        with self._lock:
            answers = self._ask([[key] for key in keys], False)
        return [answer is not None and answer.run_chunks == 1 for answer in answers]

    def fetched(self, keys: Sequence[bytes]) -> None:
        """Give back what was leased for a run that ends with one of these keys."""
        with self._lock:
            for key in keys:
                held = self._held.pop(key, None)
                if held is not None:
                    self._release(held[0])

    def tick(self) -> None:
        """tick() for the handle of lookups; answers that are late give their leases back."""
        with self._lock:
            client = self._session.client() if self._session.is_open else None
            try:
                if client is not None:
                    self._take(client.poll(), {}, [])
            except KvferryError:
                pass  # nobody listens

    def close(self) -> None:
        """Give everything back and close the handle."""
        with self._lock:
            self._closed = True
            self._held.clear()
            self._session.close()
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()

    # --- with the lock held -----------------------------------------------------------------------

    def _ask(self, asked: Sequence[Sequence[bytes]], run: bool) -> List[Optional[Lookup]]:
        """An answer to each lookup; None: there was none in time."""
        client = None if self._closed else self._session.client()
        answers: List[Optional[Lookup]] = [None] * len(asked)
        if client is None:
            return answers
        deadline = time.monotonic() + self._budget_ms / 1000
        pending: Dict[int, int] = {}
        try:
            attach(client)
            for index, keys in enumerate(asked):
                while left_ms(deadline) > 0:
                    try:
                        request = client.submit_lookup(keys, lease=run, prefetch=run)
                        pending[request] = index
                        break
                    except BusyError:
                        self._take(client.poll(left_ms(deadline)), pending, answers)
            while pending and (left := left_ms(deadline)) > 0:
                self._take(client.poll(left), pending, answers)
            for request in pending:
                client.cancel(request)
        except KvferryError:
            pass  # what has been answered counts
        return answers

    def _take(self, events: List[Event], pending: Dict[int, int],
              answers: List[Optional[Lookup]]) -> None:
        for event in events:
            index = pending.pop(event.request, None)
            if event.lookup is None:
                continue
            if index is None:
                self._release(event.lookup.lease)  # late
            elif event.lookup.status >= 0:
                answers[index] = event.lookup

    def _keep(self, keys: Sequence[bytes], answer: Optional[Lookup]) -> int:
        """Hold a run's lease; how long the run is."""
        if answer is None:
            return 0
        if answer.lease:
            key = bytes(keys[answer.ready_chunks - 1])
            old = self._held.pop(key, None)
            if old is not None:
                self._release(old[0])
            self._held[key] = (answer.lease, time.monotonic() + LEASE_S)
            if self._thread is None:
                self._thread = threading.Thread(target=self._expire, name="kvferry-leases",
                                                daemon=True)
                self._thread.start()
            self._lock.notify()
        return answer.run_chunks

    def _release(self, lease: int) -> None:
        client = self._session.client() if self._session.is_open else None
        if lease and client is not None:
            client.release(lease)

    def _expire(self) -> None:
        """The thread that gives up what nobody fetches."""
        with self._lock:
            while not self._closed:
                if not self._held:
                    self._lock.wait()
                    continue
                key, (lease, end) = next(iter(self._held.items()))
                left = end - time.monotonic()
                if left > 0:
                    self._lock.wait(left)
                    continue
                del self._held[key]
                self._release(lease)
