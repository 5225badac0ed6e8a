# SPDX-License-Identifier: Apache-2.0
"""The asynchronous calls of a handle as coroutines of asyncio.

The loop watches the handle's descriptor; no thread is started, and nothing is polled while nothing
happens. Everything runs on the loop's thread, and so does the handle.
"""
import asyncio
from typing import Any, Dict, List, Optional, Sequence, Tuple

from kvferry.client import Client, Hit, Key, Lookup, Put
from kvferry.errors import BusyError, Status, error


class AsyncClient:
    """A Client whose requests are awaited. Made inside a running loop; the client stays the
    caller's, is given back by close(), and is not to be polled by anybody else until then."""

    def __init__(self, client: Client):
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._waiting: Dict[int, Tuple["asyncio.Future[Any]", List[Hit]]] = {}
        self._progress = asyncio.Event()
        self._loop.add_reader(client.fileno(), self._drain)

    def close(self) -> None:
        """Stop watching; requests in flight are canceled, and whoever awaits them is told so."""
        self._loop.remove_reader(self._client.fileno())
        for request, (future, hits) in self._waiting.items():
            self._client.cancel(request)
            future.cancel()
            self._release(None, hits)
        self._waiting.clear()

    def _drain(self) -> None:
        while True:
            events = self._client.poll()
            if not events:
                return
            for event in events:
                future, hits = self._waiting.get(event.request, (None, []))
                if future is None:
                    self._release(event.lookup, [event.hit])
                elif event.is_request:
                    del self._waiting[event.request]
                    self._end(future, event.hit.status, event.lookup, hits)
                elif event.index < len(hits):
                    hits[event.index] = event.hit
            self._progress.set()

    def _end(self, future: "asyncio.Future[Any]", status: Status, lookup: Optional[Lookup],
             hits: List[Hit]) -> None:
        if future.done():  # canceled: nobody takes it
            self._release(lookup, hits)
        elif status < 0 and not any(hit.status >= 0 for hit in hits):
            future.set_exception(error(status))
        else:
            future.set_result((lookup, hits))

    def _release(self, lookup: Optional[Lookup], hits: Sequence[Hit]) -> None:
        """Give the leases of an answer back."""
        for lease in [lookup.lease if lookup is not None else 0, *(hit.lease for hit in hits)]:
            if lease:
                self._client.release(lease)

    async def _run(self, submit: Any, n: int) -> Tuple[Optional[Lookup], List[Hit]]:
        """Submit, again after each completion while the handle is busy with other requests."""
        while True:
            try:
                request = submit()
                break
            except BusyError:
                if not self._waiting:
                    raise
                self._progress.clear()
                await self._progress.wait()
        future: "asyncio.Future[Any]" = self._loop.create_future()
        self._waiting[request] = (future, [Hit(Status.MISS)] * n)
        self._loop.call_soon(self._drain)
        try:
            answer: Tuple[Optional[Lookup], List[Hit]] = await future
        except asyncio.CancelledError:
            if request in self._waiting:
                self._client.cancel(request)  # what comes of it is given back then
            elif future.done() and not future.cancelled() and future.exception() is None:
                self._release(*future.result())
            raise
        return answer

    async def put(self, items: Sequence[Put], **options: Any) -> List[Status]:
        """As Client.put; items are encoded before the first suspension."""
        _, hits = await self._run(lambda: self._client.submit_put(items, **options), len(items))
        return [hit.status for hit in hits]

    async def get(self, keys: Sequence[Key], budget_ms: int = 0) -> List[Hit]:
        """As Client.get."""
        _, hits = await self._run(lambda: self._client.submit_get(keys, budget_ms), len(keys))
        return hits

    async def lookup(self, keys: Sequence[Key], **options: Any) -> Lookup:
        """As Client.lookup."""
        found, _ = await self._run(lambda: self._client.submit_lookup(keys, **options), 0)
        assert found is not None
        return found
