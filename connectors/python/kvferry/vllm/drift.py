# SPDX-License-Identifier: Apache-2.0
"""Chunks that have been computed though they are stored, beside what is stored of them.

That is what a lookup has found and could not give in time. Now and then the scheduler names one of
these; its pages are copied when the step has run, since they are the engine's again at once, and a
thread of its own asks for the block, decodes it and reports the difference to the daemon
(kvferry_engine_drift_*). One at a time: what is named meanwhile is left out.
"""
import ctypes
import queue
import threading
from typing import Any, Callable, List, Optional, Tuple

from kvferry.buffers import Pages, Strides
from kvferry.client import Geometry, Put
from kvferry.session import Session
from kvferry.vllm.jobs import StoreChunk

PING_MS = 1000  # for what was reported to arrive, before the handle is closed

# Begins to copy pages, by their ids, of tensors into host memory: so many bytes of each page. The
# addresses of each tensor's copy, page behind page; a call that waits until all is there, for
# another thread; and what keeps the memory.
Fetch = Callable[[List[Any], List[int], int], Tuple[List[int], Callable[[], None], Any]]


def page_bytes(pages: Pages, geometry: Geometry, item: int) -> int:
    """Bytes from the first one of a page's K to the last one of its V, which lies in the same page
    of the same tensor."""
    assert pages.v is not None
    ends = []
    for strides, dim in ((pages.k, geometry.dim_k), (pages.v, geometry.dim_v)):
        ends.append(strides.layers[0] - pages.k.layers[0] + (geometry.n_heads - 1) * strides.head
                    + (pages.tokens_a_page - 1) * strides.token + dim * item)
    return max(ends)


def moved(pages: Pages, addresses: List[int], n_bytes: int) -> Pages:
    """The same pages elsewhere: one behind the other, of so many bytes each."""
    assert pages.v is not None
    k, v = pages.k, pages.v
    behind = [address + v_at - k_at for address, v_at, k_at in zip(addresses, v.layers, k.layers)]
    return Pages(pages.tokens_a_page, Strides(tuple(addresses), n_bytes, k.token, k.head),
                 Strides(tuple(behind), n_bytes, v.token, v.head))


def fetch_host(pages: Pages) -> Fetch:
    """Copies of pages that are in host memory."""
    def fetch(tensors: List[Any], ids: List[int],
              n_bytes: int) -> Tuple[List[int], Callable[[], None], Any]:
        memory = ctypes.create_string_buffer(len(tensors) * len(ids) * n_bytes)
        base = ctypes.addressof(memory)
        starts = [base + i * len(ids) * n_bytes for i in range(len(tensors))]
        for start, layer in zip(starts, pages.k.layers):
            for i, page in enumerate(ids):
                ctypes.memmove(start + i * n_bytes, layer + page * pages.k.page, n_bytes)
        return starts, lambda: None, memory
    return fetch


class Drift:
    """Belongs to the engine's thread; _run is the other one's. session makes the handle of a
    comparison, which is closed with it: they are far between."""

    def __init__(self, pages: Pages, geometry: Geometry, item_bytes: int, fetch: Fetch,
                 session: Callable[[], Session], warn: Callable[[str], None]):
        self._pages, self._fetch, self._session, self._warn = pages, fetch, session, warn
        self._page_bytes = page_bytes(pages, geometry, item_bytes)
        self._queue: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._is_free = threading.Event()
        self._is_free.set()
        self._thread: Optional[threading.Thread] = None

    def look(self, chunk: StoreChunk) -> None:
        """Compare a chunk, whose pages the step has written, with what is stored under its key.
        Blocks as long as it takes to copy it, on a GPU to queue that."""
        if not self._is_free.is_set():
            return
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvferry-drift", daemon=True)
                thread.start()
                self._thread = thread
            fetched = self._fetch(self._pages.owners, chunk.pages, self._page_bytes)
        except Exception as error:  # no memory to pin, say: the engine goes on
            self._warn(f"comparison with what is stored: {error!r}")
            return
        self._is_free.clear()
        self._queue.put((chunk, *fetched))

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            chunk, addresses, wait, held = job
            try:
                wait()
                self._compare(chunk, moved(self._pages, addresses, self._page_bytes))
            except Exception as error:  # a figure that there is not, and no more
                self._warn(f"comparison with what is stored: {error!r}")
            del job, held
            self._is_free.set()

    def _compare(self, chunk: StoreChunk, pages: Pages) -> None:
        session = self._session()
        try:
            client = session.client()
            if client is not None:
                client.drift(Put(chunk.key, pages=pages, page_ids=range(len(chunk.pages)),
                                 token_start=chunk.token_start, n_tokens=chunk.n_tokens))
                client.ping(PING_MS)
        finally:
            session.close()

    def close(self) -> None:
        """End the thread when what it has begun is done."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
