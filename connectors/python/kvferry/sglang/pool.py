# SPDX-License-Identifier: Apache-2.0
"""One host pool of the engine, and the handles that its pages go through.

SGLang calls from threads of its own: one asks what is there, one loads, one stores. Each has a
handle of its own; calls may block, within the budgets.
"""
import ctypes
import threading
from typing import Any, Callable, List, Optional, Sequence, Tuple

from kvferry.client import Client, Hit, Put
from kvferry.errors import KvferryError
from kvferry.hostio import LOAD_STAGING_BYTES, Lookups, fetch, report, store, tick
from kvferry.session import Session
from kvferry.sglang.facts import PoolFacts
from kvferry.sglang.settings import Settings


class Pool:
    """session(**options) makes a session in the pool's namespace."""

    def __init__(self, host_pool: Any, facts: PoolFacts, settings: Settings,
                 session: Callable[..., Session], warn: Callable[[str], None]):
        self._host_pool = host_pool
        self._facts = facts
        self._settings = settings
        self._warn = warn
        self.lookups = Lookups(session(staging_bytes=LOAD_STAGING_BYTES),
                               settings.lookup_budget_ms)
        self._loads, self._load_lock = session(staging_bytes=LOAD_STAGING_BYTES), threading.Lock()
        self._stores, self._store_lock = session(), threading.Lock()

    def _slots(self, indices: Any, n: int) -> Optional[List[int]]:
        """The first slot of each page; None: these are no whole pages."""
        tokens = self._facts.page_tokens
        given = indices.tolist() if indices is not None else []
        slots = given[::tokens]
        if len(given) != n * tokens or any(slot % tokens for slot in slots):
            self._warn(f"{len(given)} slots are not {n} whole pages of {tokens}")
            return None
        return slots

    # --- loads ------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], indices: Any) -> int:
        """Fill pages of the pool; how many leading ones are good."""
        slots = self._slots(indices, len(keys))
        if slots is None:
            return 0
        try:
            with self._load_lock:
                client = self._loads.client()
                if client is None:
                    return 0
                good = fetch(client, keys, self._settings.load_budget_ms,
                             lambda index, hit: self._take(client, hit, slots[index]))
                tokens = good * self._facts.page_tokens if self._facts.pages is not None else 0
                report(client, tokens, len(keys) - good)
                return good
        finally:
            self.lookups.fetched(keys)

    def _take(self, client: Client, hit: Hit, slot: int) -> bool:
        try:
            if self._facts.pages is not None:
                client.decode(hit, self._facts.pages, [slot // self._facts.page_tokens])
                return True
            page = self._host_pool.get_dummy_flat_data_page()
            payload = hit.payload
            if len(payload) != page.nbytes:
                self._warn(f"a page of {len(payload)} bytes is stored, and one has {page.nbytes}")
                return False
            start = hit.record + hit.record_bytes - len(payload)
            ctypes.memmove(page.data_ptr(), start, len(payload))
            self._host_pool.set_from_flat_data_page(slot, page)
            return True
        except KvferryError as error:
            self._warn(f"load: {error}")
            return False

    # --- stores -----------------------------------------------------------------------------------

    def store(self, keys: Sequence[bytes], indices: Any, before: Sequence[bytes]) -> List[bool]:
        """Store pages of the pool; which are stored now. before: keys that they follow in their
        sequence, as far as the engine tells."""
        slots = self._slots(indices, len(keys))
        if slots is None:
            return [False] * len(keys)
        with self._store_lock:
            client = self._stores.client()
            if client is None:
                return [False] * len(keys)
            items, _held = self._items(keys, slots, len(before))
            return store(client, items, before[-1] if before else None, len(before),
                         self._settings.store_budget_ms)

    def _items(self, keys: Sequence[bytes], slots: Sequence[int],
               depth: int) -> Tuple[List[Put], List[Any]]:
        """Blocks to put, and what they point to."""
        tokens, pages = self._facts.page_tokens, self._facts.pages
        if pages is not None:
            return [Put(key, pages=pages, page_ids=[slot // tokens],
                        token_start=(depth + number) * tokens)
                    for number, (key, slot) in enumerate(zip(keys, slots))], []
        held = [self._host_pool.get_data_page(slot, flat=True).contiguous() for slot in slots]
        return [Put(key, data=page) for key, page in zip(keys, held)], held

    def tick(self) -> None:
        """For handles that rest: notice that a daemon has gone. Those that work do so anyway."""
        self.lookups.tick()
        for lock, session in ((self._load_lock, self._loads), (self._store_lock, self._stores)):
            if lock.acquire(blocking=False):
                try:
                    tick(session.client() if session.is_open else None)
                finally:
                    lock.release()

    def close(self) -> None:
        """Close the handles, when the calls that run are over."""
        self.lookups.close()
        with self._load_lock:
            self._loads.close()
        with self._store_lock:
            self._stores.close()
