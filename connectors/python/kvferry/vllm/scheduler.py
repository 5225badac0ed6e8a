# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which chunks a request can have, and which of its chunks to keep.

A hit is what is leased in the daemon's memory when it is answered, whole sets only. Loads are
asynchronous, always. No call waits for the daemon longer than POLL_MS.

    lookup -> (None while chunks come from slower tiers) -> hit, leased -> blocks allocated -> load
           -> the workers' report -> lease given back
"""
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from kvferry.client import REQUEST_KEYS_MAX, Client, Event, Lookup
from kvferry.errors import KvferryError, SessionError
from kvferry.session import Session
from kvferry.identity import adapter_key
from kvferry.vllm.facts import Facts
from kvferry.vllm.jobs import LoadChunk, LoadJob, Report, Step, StoreChunk
from kvferry.vllm.settings import RequestSettings, Settings

POLL_MS = 2  # a round trip takes a twentieth of that
AGAIN_S = 0.002  # between two lookups of a request whose chunks are coming
LEASE_S = 10.0  # a hit that has not been taken up by then is looked up again


@dataclass
class Found:
    """What a lookup has found, from chunk `first` on: `ready` chunks, leased."""

    first: int
    ready: int
    run: int
    lease: int
    since: float


@dataclass
class Request:
    """A request of the engine, from its first lookup to its end."""

    engine: Any  # vLLM's own object
    settings: RequestSettings
    adapter: Optional[bytes] = None
    excluded: bool = False  # neither looked up nor stored
    started: Optional[float] = None  # first lookup of those that are not answered yet
    asked: int = 0  # chunk that the lookup in flight begins with
    asked_at: float = 0.0
    in_flight: int = 0  # id of the lookup in flight
    result: Optional[Lookup] = None
    waited: bool = False  # some of the hit came from a slower tier
    found: Optional[Found] = None
    local_tokens: int = 0
    loading: bool = False
    failed: Set[bytes] = field(default_factory=set)
    hit_tokens: int = 0
    pages: List[int] = field(default_factory=list)
    next_store: Optional[int] = None
    known: int = 0  # chunks before this one are stored somewhere


class Scheduler:
    """Belongs to the engine's scheduler thread. warn_once(line) is called where something is not
    served that the user may expect to be."""

    def __init__(self, facts: Facts, settings: Settings, session: Session,
                 adapter_digest: Callable[[Any], Optional[bytes]],
                 warn_once: Callable[[str], None]):
        self._facts = facts
        self._settings = settings
        self._session = session
        self._adapter_digest = adapter_digest
        self._warn_once = warn_once
        self._chunk = facts.geometry.chunk_tokens
        self._blocks = self._chunk // facts.block_tokens
        self._requests: Dict[str, Request] = {}
        self._lookups: Dict[int, Request] = {}
        self._loads: List[LoadJob] = []
        self._profile = settings.profile
        self._lossless = True

    # --- requests ---------------------------------------------------------------------------------

    def _request(self, engine: Any) -> Request:
        request = self._requests.get(engine.request_id)
        if request is None:
            params = getattr(engine, "kv_transfer_params", None)
            request = Request(engine, RequestSettings.read(params, self._warn_once))
            self._exclude(request)
            self._requests[engine.request_id] = request
        return request

    def _exclude(self, request: Request) -> None:
        """Mark requests whose KV the block hashes alone do not name, or not yet."""
        engine = request.engine
        if getattr(engine, "mm_features", None):
            self._warn_once("requests with images or sound are not stored")
            request.excluded = True
        elif getattr(engine, "prompt_embeds", None) is not None:
            self._warn_once("requests with prompt_embeds are not stored")
            request.excluded = True
        elif getattr(engine, "lora_request", None) is not None:
            request.adapter = self._adapter_digest(engine.lora_request)
            if request.adapter is None:
                self._warn_once("requests with a LoRA whose files are not on this machine are not "
                                "stored: give lora_path as a local folder")
                request.excluded = True

    def _keys(self, request: Request, first: int, end: int) -> List[bytes]:
        """Keys of chunks first..end - 1: the engine's hash of the last block of each."""
        hashes = request.engine.block_hashes
        return [adapter_key(bytes(hashes[(i + 1) * self._blocks - 1]), request.adapter)
                for i in range(first, end)]

    def _full_chunks(self, request: Request) -> int:
        return len(request.engine.block_hashes) // self._blocks

    # --- lookup -----------------------------------------------------------------------------------

    def matched_tokens(self, engine: Any, computed: int) -> Tuple[Optional[int], bool]:
        """Tokens beyond the computed ones that can be loaded; None: ask again in the next step. May
        be called any number of times: all it changes is what this object knows."""
        request = self._request(engine)
        request.local_tokens = computed
        if request.excluded or not request.settings.load or self._skips_cache(engine):
            return 0, False
        first = computed // self._chunk
        if not self._is_found(request, first):
            keys = self._wanted(request, first)
            if not keys:
                return self._answer(request)
            if not self._look(request, first, keys):
                return None, False
        return self._answer(request)

    @staticmethod
    def _skips_cache(engine: Any) -> bool:
        """The request says that it does not read the prefix cache (its prompt's logprobs are
        wanted). Asked here too, for versions whose scheduler does not."""
        for asked in (engine, getattr(engine, "sampling_params", None)):
            if getattr(asked, "skip_reading_prefix_cache", None):
                return True
        return False

    def _wanted(self, request: Request, first: int) -> List[bytes]:
        """Keys to look up: up to the first one that has failed for this request."""
        end = min(self._full_chunks(request), first + REQUEST_KEYS_MAX)
        keys = self._keys(request, first, end)
        for i, key in enumerate(keys):
            if key in request.failed:
                return keys[:i]
        return keys

    def _is_found(self, request: Request, first: int) -> bool:
        """Whether what was found before can be answered again."""
        found = request.found
        if found is None:
            return False
        client = self._session.client()
        if found.first <= first and (not found.lease or (client and client.holds(found.lease))):
            return True
        self._drop(request)
        return False

    def _look(self, request: Request, first: int, keys: List[bytes]) -> bool:
        """Look keys up, or see what has come of it. True: there is an answer in request.found."""
        now = time.monotonic()
        if request.started is None:
            request.started = now
            request.waited = False
        client = self._session.client()
        if client is None:
            return self._settle(request, Found(first, 0, 0, 0, now))
        try:
            if not request.in_flight and request.result is None:
                if request.waited and now - request.asked_at < AGAIN_S:
                    return self._is_late(request, first, now)
                request.in_flight = client.submit_lookup(keys, lease=True, prefetch=True)
                request.asked, request.asked_at = first, now
                self._lookups[request.in_flight] = request
            self._poll(client, request, POLL_MS)
        except SessionError as error:
            if error.is_attaching:
                client.poll(POLL_MS)
                return self._is_late(request, first, now)
            return self._settle(request, Found(first, 0, 0, 0, now))
        except KvferryError as error:
            self._warn_once(f"lookup: {error}")
            return self._settle(request, Found(first, 0, 0, 0, now))
        return self._judge(request, first)

    def _is_late(self, request: Request, first: int, now: float) -> bool:
        """True, and nothing found, once the budget of a lookup is used up."""
        assert request.started is not None
        if (now - request.started) * 1000 < self._settings.lookup_budget_ms:
            return False
        self._abandon(request)
        return self._settle(request, Found(first, 0, 0, 0, now))

    def _judge(self, request: Request, first: int) -> bool:
        """Take a lookup's result, if there is one: the answer, or a reason to look again."""
        now = time.monotonic()
        result, request.result = request.result, None
        if result is None:
            return self._is_late(request, first, now)
        found = Found(request.asked, result.ready_chunks, result.run_chunks, result.lease, now)
        assert request.started is not None
        late = (now - request.started) * 1000 >= self._settings.lookup_budget_ms
        if result.status >= 0 and result.coming_chunks > 0 and not late:
            request.waited = True
            self._release(found.lease)
            return False
        if result.status < 0:
            found = Found(request.asked, 0, 0, 0, now)
        return self._settle(request, found)

    def _settle(self, request: Request, found: Found) -> bool:
        request.started = None
        request.found = found
        request.known = max(request.known, found.first + found.run)
        return True

    def _answer(self, request: Request) -> Tuple[int, bool]:
        """Tokens of what was found; the last token of a request is always computed."""
        if request.found is None:
            return 0, False
        end = (request.found.first + request.found.ready) * self._chunk
        end = min(end, request.engine.num_tokens - 1)
        tokens = max(0, end - request.local_tokens)
        if tokens == 0:
            self._drop(request)
        return tokens, tokens > 0

    def _poll(self, client: Client, request: Optional[Request], timeout_ms: int) -> None:
        """Take completions; wait a little for that of one request."""
        waiting = request is not None and request.in_flight != 0
        while events := client.poll(timeout_ms if waiting else 0):
            for event in events:
                self._take(event)
            waiting = waiting and request is not None and request.in_flight != 0

    def _take(self, event: Event) -> None:
        request = self._lookups.pop(event.request, None)
        if request is not None and request.in_flight == event.request:
            request.in_flight = 0
            request.result = event.lookup
        elif event.lookup is not None:
            self._release(event.lookup.lease)

    # --- leases -----------------------------------------------------------------------------------

    def _release(self, lease: int) -> None:
        client = self._session.client()
        if lease and client is not None:
            client.release(lease)

    def _drop(self, request: Request) -> None:
        """Forget what was found."""
        if request.found is not None:
            self._release(request.found.lease)
            request.found = None

    def _abandon(self, request: Request) -> None:
        """Forget a lookup in flight; its lease is given back when it comes."""
        client = self._session.client()
        if request.in_flight and client is not None:
            client.cancel(request.in_flight)
        request.in_flight = 0
        if request.result is not None:
            self._release(request.result.lease)
            request.result = None

    def _drop_old(self) -> None:
        now = time.monotonic()
        for request in self._requests.values():
            if request.found is not None and not request.loading:
                if now - request.found.since > LEASE_S:
                    self._drop(request)

    # --- loads ------------------------------------------------------------------------------------

    def allocated(self, engine: Any, pages: List[int], external: int) -> None:
        """The request has these pages; external of its tokens are to be loaded. Called again when
        the load is over, with 0."""
        request = self._request(engine)
        request.pages = list(pages)
        if external == 0 or request.found is None:
            if not request.loading:
                self._drop(request)
            return
        start, end = request.local_tokens, request.local_tokens + external
        first, stop = start // self._chunk, -(-end // self._chunk)
        chunks = []
        for number, key in enumerate(self._keys(request, first, stop), first):
            begin = max(start, number * self._chunk)
            # of a full hit the last token is computed, and may be alone on a page
            chunk_end = min((number + 1) * self._chunk,
                            len(request.pages) * self._facts.block_tokens)
            chunks.append(LoadChunk(key, begin - number * self._chunk, chunk_end - begin,
                                    self._pages(request, begin, chunk_end)))
        budget = request.settings.budget_ms
        self._loads.append(LoadJob(engine.request_id, chunks,
                                   self._settings.load_budget_ms if budget is None else budget))
        request.loading = True
        request.hit_tokens += external

    def _pages(self, request: Request, begin: int, end: int) -> List[int]:
        block = self._facts.block_tokens
        return request.pages[begin // block:end // block]

    def loaded(self, request_ids: Set[str], report: Optional[Report]) -> None:
        """Loads are over, and this did not work."""
        for request_id, keys in (report.failed if report is not None else {}).items():
            request = self._requests.get(request_id)
            if request is not None:
                request.failed.update(keys)
                request.known = 0
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.loading = False
                self._drop(request)

    # --- stores -----------------------------------------------------------------------------------

    def step(self, output: Any) -> Step:
        """What the workers do in this step; output is vLLM's SchedulerOutput."""
        made, self._loads = Step(loads=self._loads), []
        for new in output.scheduled_new_reqs:
            self._scheduled(made, new.req_id, new.block_ids, False, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            self._scheduled(made, request_id, cached.new_block_ids[i],
                            request_id not in cached.resumed_req_ids,
                            cached.num_computed_tokens[i], output)
        client = self._session.client() if self._session.is_open else None
        if client is not None:
            self._poll(client, None, 0)
        self._drop_old()
        return made

    def _scheduled(self, made: Step, request_id: str, pages: Any, appended: bool, computed: int,
                   output: Any) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if pages is not None:
            request.pages = (request.pages if appended else []) + list(pages[0])
        if request.next_store is None:
            # What was in the engine's own cache was stored when it was computed. A chunk that it
            # has in part is stored whole, unless what is in it may have been through a lossy codec.
            rounded = computed if self._lossless else computed + self._chunk - 1
            request.next_store = rounded // self._chunk
        self._store(made, request, computed + output.num_scheduled_tokens[request_id])

    def _store(self, made: Step, request: Request, computed: int) -> None:
        """Add the chunks that are full when this step has run."""
        assert request.next_store is not None
        if request.excluded or not request.settings.store or self._settings.store == "none":
            return
        tokens = computed
        if self._settings.store == "prompt":
            tokens = min(tokens, request.engine.num_prompt_tokens)
        if request.settings.max_offload_tokens is not None:
            tokens = min(tokens, request.settings.max_offload_tokens)
        first = max(request.next_store, request.known)
        end = min(tokens // self._chunk, self._full_chunks(request))
        if first >= end:
            return
        keys = self._keys(request, max(first - 1, 0), end)
        parents = [None, *keys] if first == 0 else list(keys)
        for number, key in enumerate(keys[first > 0:], first):
            begin = number * self._chunk
            made.stores.append(StoreChunk(key, parents[number - first], number, begin,
                                          self._pages(request, begin, begin + self._chunk)))
        request.next_store = end

    # --- the end ----------------------------------------------------------------------------------

    def finished(self, engine: Any) -> Mapping[str, Any]:
        """The request is over: what its response carries."""
        request = self._requests.pop(engine.request_id, None)
        if request is None:
            return {}
        self._abandon(request)
        self._drop(request)
        tier = ("nvme" if request.waited else "dram") if request.hit_tokens else ""
        return {"kvferry.hit_tokens": request.hit_tokens, "kvferry.tier": tier,
                "kvferry.profile": self._profile}

    def connected(self, profile: str, lossless: bool) -> None:
        """The profile in force, which may be another one than was asked for."""
        self._profile, self._lossless = profile, lossless

    def close(self) -> None:
        """Give all leases back."""
        self._session.close()
