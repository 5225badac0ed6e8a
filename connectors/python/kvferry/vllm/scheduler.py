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

from kvferry.client import REQUEST_KEYS_MAX, TAIL_KEYS_MAX, Client, Event, Lookup
from kvferry.errors import KvferryError, SessionError, Status
from kvferry.session import Session
from kvferry.identity import adapter_key
from kvferry.vllm.facts import Facts
from kvferry.vllm.events import Chunk, Ledger
from kvferry.vllm.jobs import LoadChunk, LoadJob, Report, Step, StoreChunk
from kvferry.vllm.rate import PrefillRate
from kvferry.vllm.settings import RequestSettings, Settings
from kvferry.vllm.stats import SchedulerCounters
from kvferry.vllm.taint import Taint

POLL_MS = 2  # a round trip takes a twentieth of that
AGAIN_S = 0.002  # between two lookups of a request whose chunks are coming
LEASE_S = 10.0  # a hit that has not been taken up by then is looked up again
AGAIN_S_LEAST = 10.0  # between two chunks that are compared with what is stored of them


@dataclass
class Found:
    """What lookups have found, from chunk `first` on: `ready` chunks, leased, and behind them a
    tail of so many blocks, leased apart."""

    first: int
    ready: int
    run: int
    lease: int
    since: float
    tail_blocks: int = 0
    tail_lease: int = 0

    @property
    def end(self) -> int:
        """The chunk behind those that are ready: the one that the tail begins."""
        return self.first + self.ready


NOTHING = Lookup(Status.OK, 0, 0, 0, -1, 0)


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
    asked_end: int = 0  # and the chunk that it ends before
    asked_tails: int = 0  # tails that it asks for
    in_flight: int = 0  # id of the lookup in flight
    result: Optional[Lookup] = None
    waited: bool = False  # some of the hit came from a slower tier
    chain: Optional[Found] = None  # whole chunks, while the tail behind them is looked up
    found: Optional[Found] = None
    local_tokens: int = 0
    loading: List[LoadChunk] = field(default_factory=list)
    load_began: float = 0.0
    load_first: int = 0  # the first token that is loaded
    load_tokens: int = 0  # of them, those that the engine counts as computed
    failed: Set[bytes] = field(default_factory=set)
    hit_tokens: int = 0
    pages: List[int] = field(default_factory=list)
    next_store: Optional[int] = None
    own: int = 0  # chunks from this one on are computed by this engine, now
    known: int = 0  # chunks before this one are stored somewhere
    tail_chunk: int = -1  # the chunk of which the beginning is stored, as a tail
    tail_blocks: int = 0  # of so many blocks

    def is_of(self, first: int, end: int, n_tails: int) -> bool:
        """Whether the lookup in flight, or what has come of it, says something about these."""
        begins = self.asked == first if n_tails else self.asked <= first
        return begins and self.asked_end == end and self.asked_tails == n_tails


class Scheduler:
    """Belongs to the engine's scheduler thread. warn_once(line) is called where something is not
    served that the user may expect to be; tells: vLLM wants KV events."""

    def __init__(self, facts: Facts, settings: Settings, session: Session,
                 adapter_digest: Callable[[Any], Optional[bytes]],
                 warn_once: Callable[[str], None], tells: bool = False):
        self._facts = facts
        self._settings = settings
        self._session = session
        self._adapter_digest = adapter_digest
        self._warn_once = warn_once
        self._chunk = facts.geometry.chunk_tokens
        self._blocks = self._chunk // facts.block_tokens
        self._tail_most = min(self._blocks - 1, TAIL_KEYS_MAX) if settings.tails else 0  # blocks
        self._requests: Dict[str, Request] = {}
        self._lookups: Dict[int, Request] = {}
        self._loads: List[LoadJob] = []
        self._profile = settings.profile
        self._lossless = True
        self._reconnects = 0
        self._taint = Taint(facts.block_tokens)
        self._rate = PrefillRate()
        self._next_again = 0.0
        self._n_again = 0
        self.counters = SchedulerCounters()
        self.ledger: Optional[Ledger] = Ledger(facts.shard_count) if tells else None

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
            request.excluded = request.adapter is None

    def _key(self, request: Request, block: int) -> bytes:
        """The key of what ends with a block: the engine's hash of it."""
        return adapter_key(bytes(request.engine.block_hashes[block]), request.adapter)

    def _keys(self, request: Request, first: int, end: int) -> List[bytes]:
        """Keys of chunks first..end - 1."""
        return [self._key(request, (i + 1) * self._blocks - 1) for i in range(first, end)]

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
        if not self._is_found(request, first) and not self._look(request, first):
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

    def _tails(self, request: Request, chunk: int) -> List[bytes]:
        """Keys of what there may be of a chunk that is not whole, the longest first. Tails are of
        lossless profiles: a chunk that grows out of a loaded tail is stored once it is whole. Where
        something has failed for this request, there is no point in asking for less of it."""
        if not self._lossless or request.failed:
            return []
        begin = chunk * self._blocks
        n = min(self._blocks - 1, len(request.engine.block_hashes) - begin, self._tail_most)
        return [self._key(request, begin + i) for i in reversed(range(max(n, 0)))]

    def _is_found(self, request: Request, first: int) -> bool:
        """Whether what was found before can be answered again."""
        found = request.found
        if found is None:
            return False
        client = self._session.client()
        leases = [lease for lease in (found.lease, found.tail_lease) if lease]
        if found.first <= first and all(client and client.holds(lease) for lease in leases):
            return True
        self._drop(request)
        return False

    def _look(self, request: Request, first: int) -> bool:
        """Find the run of whole chunks from `first` on, and then the longest tail that extends it.
        True: request.found says."""
        if request.started is None:
            request.started = time.monotonic()
            request.waited = False
        if request.chain is not None and request.chain.first > first:
            self._drop(request)  # the engine has less of it now than when that was found
        if request.chain is None:
            keys = self._wanted(request, first)
            got = self._ask(request, first, keys, 0)
            if got is None:
                return False
            request.chain = Found(request.asked if keys else first, got.ready_chunks,
                                  got.run_chunks, got.lease, time.monotonic())
        chain = request.chain
        is_early = chain.ready == chain.run and not self._budget_is_over(request)
        tails = self._tails(request, chain.end) if is_early else []
        got = self._ask(request, chain.end, tails, len(tails))
        if got is None:
            return False
        if got.ready_chunks:
            key = tails[got.tail_index]
            chain.tail_blocks = self._tail_length(request, chain.end, key)
            chain.tail_lease = got.lease
        request.chain = None
        self._settle(request, chain)
        return True

    def _tail_length(self, request: Request, chunk: int, key: bytes) -> int:
        """Blocks of the tail of a chunk that has this key."""
        begin = chunk * self._blocks
        return next(i + 1 for i in range(self._blocks) if self._key(request, begin + i) == key)

    def _ask(self, request: Request, first: int, keys: List[bytes],
             n_tails: int) -> Optional[Lookup]:
        """Look keys up, or see what has come of it. None: ask again."""
        if not request.is_of(first, first + len(keys), n_tails):
            self._abandon(request)
        client = self._session.client() if keys else None
        if client is None:
            return NOTHING
        now = time.monotonic()
        try:
            if not request.in_flight and request.result is None:
                if request.waited and now - request.asked_at < AGAIN_S:
                    return self._late(request)
                request.in_flight = client.submit_lookup(keys, lease=True, prefetch=True,
                                                         n_tails=n_tails)
                request.asked, request.asked_end = first, first + len(keys)
                request.asked_at, request.asked_tails = now, n_tails
                self._lookups[request.in_flight] = request
            self._poll(client, request, POLL_MS)
        except SessionError as error:
            if error.is_attaching:
                client.poll(POLL_MS)
                return self._late(request)
            return NOTHING
        except KvferryError as error:
            self._warn_once(f"lookup: {error}")
            return NOTHING
        return self._judge(request)

    def _budget_is_over(self, request: Request) -> bool:
        assert request.started is not None
        return (time.monotonic() - request.started) * 1000 >= self._settings.lookup_budget_ms

    def _late(self, request: Request) -> Optional[Lookup]:
        """Nothing found, once the budget of a lookup is used up; else None."""
        if not self._budget_is_over(request):
            return None
        self.counters.lookups_late += 1
        self._abandon(request)
        return NOTHING

    def _judge(self, request: Request) -> Optional[Lookup]:
        """Take a lookup's result, if there is one: the answer, or a reason to look again."""
        result, request.result = request.result, None
        if result is None:
            return self._late(request)
        if result.status < 0:
            return NOTHING
        self._is_gone(request, result)
        if result.coming_chunks > 0:
            if not self._budget_is_over(request):
                request.waited = True
                self._release(result.lease)
                return None
            self.counters.lookups_late += 1
        return result

    def _is_gone(self, request: Request, result: Lookup) -> None:
        """Tell of the first chunk that was not found, if it was told of before."""
        end = request.asked + result.run_chunks
        if self.ledger is not None and not request.asked_tails and end < request.asked_end:
            self.ledger.gone(self._key(request, (end + 1) * self._blocks - 1))

    def _settle(self, request: Request, found: Found) -> None:
        assert request.started is not None
        self._spent(time.monotonic() - request.started, "lookup_s")
        request.started = None
        request.found = found
        request.known = max(request.known, found.first + found.run)
        if found.tail_blocks:
            request.tail_chunk, request.tail_blocks = found.end, found.tail_blocks

    def _answer(self, request: Request) -> Tuple[int, bool]:
        """Tokens of what was found; the last token of a request is always computed."""
        if request.found is None:
            return 0, False
        end = min(self._found_end(request.found), request.engine.num_tokens - 1)
        tokens = max(0, end - request.local_tokens)
        if tokens == 0:
            self._drop(request)
        return tokens, tokens > 0

    def _found_end(self, found: Found) -> int:
        """The token behind all that was found."""
        return found.end * self._chunk + found.tail_blocks * self._facts.block_tokens

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

    def _spent(self, seconds: float, counter: str = "") -> None:
        """A request has waited for kvferry."""
        if counter:
            setattr(self.counters, counter, getattr(self.counters, counter) + seconds)
        self._report("spent-us", int(seconds * 1e6))

    def _report(self, kind: str, amount: int) -> None:
        client = self._session.client() if self._session.is_open else None
        if client is not None:
            client.report(kind, amount)

    # --- leases -----------------------------------------------------------------------------------

    def _release(self, lease: int) -> None:
        """Without a look at the daemon's state, on which the handle may be closed: a poll may be
        under way, and leases of a handle go with it."""
        if lease and self._session.handle is not None:
            self._session.handle.release(lease)

    def _drop(self, request: Request) -> None:
        """Forget what was found."""
        for found in (request.found, request.chain):
            if found is not None:
                self._release(found.lease)
                self._release(found.tail_lease)
        request.found = request.chain = None

    def _abandon(self, request: Request) -> None:
        """Forget a lookup in flight; its lease is given back when it comes."""
        if request.in_flight and self._session.handle is not None:
            self._session.handle.cancel(request.in_flight)
        request.in_flight = 0
        if request.result is not None:
            self._release(request.result.lease)
            request.result = None

    def _drop_old(self) -> None:
        now = time.monotonic()
        for request in self._requests.values():
            if request.result is not None and now - request.asked_at > LEASE_S:
                self._abandon(request)
            found = request.found or request.chain
            if found is not None and not request.loading and now - found.since > LEASE_S:
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
        begin, found, chunks = request.local_tokens, request.found, []
        end = begin + external
        while begin < end:
            # of a full hit the last token is computed, and may be alone on a page
            number = begin // self._chunk
            chunk_end = min((number + 1) * self._chunk, self._found_end(found),
                            len(request.pages) * self._facts.block_tokens)
            assert chunk_end > begin
            blocks = found.tail_blocks if number == found.end else self._blocks
            chunks.append(LoadChunk(self._key(request, number * self._blocks + blocks - 1),
                                    begin - number * self._chunk, chunk_end - begin,
                                    self._pages(request, begin, chunk_end)))
            begin = chunk_end
        budget = request.settings.budget_ms
        budget = self._settings.load_budget_ms if budget is None else budget
        self._loads.append(LoadJob(engine.request_id, chunks, max(budget, 1),  # 0 is the longest
                                   self._lossless))
        self._taint.loads([page for chunk in chunks for page in chunk.pages], self._lossless)
        request.loading, request.load_tokens = chunks, external
        request.load_first = request.local_tokens
        request.load_began = time.monotonic()

    def _pages(self, request: Request, begin: int, end: int) -> List[int]:
        block = self._facts.block_tokens
        return request.pages[begin // block:end // block]

    def loaded(self, request_ids: Set[str], report: Optional[Report]) -> None:
        """Loads are over, this did not work, and that is stored."""
        if report is not None and report.stored and self.ledger is not None:
            self.ledger.stored(report.stored)
        for request_id, keys in (report.failed if report is not None else {}).items():
            request = self._requests.get(request_id)
            if request is not None:
                request.failed.update(keys)
                request.known, request.tail_chunk = 0, -1
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._is_loaded(request)
                self._drop(request)
        self._rate.ended(report.ran if report is not None else {})
        self._tell_saved()

    def _is_loaded(self, request: Request) -> None:
        """Count what has come: all before the first chunk that has not."""
        if not request.loading:
            return  # it was another connector's
        tokens = 0
        self._spent(time.monotonic() - request.load_began)
        for chunk in request.loading:
            if chunk.key in request.failed:
                self.counters.loads_failed += 1
                break
            tokens += chunk.n_tokens
        self._rate.saved(request.load_first,
                         request.load_first + min(tokens, request.load_tokens))
        if not getattr(request.engine, "num_preemptions", 0):  # as vLLM counts
            more = max(0, min(tokens, request.load_tokens) - request.hit_tokens)
            request.hit_tokens += more
            self.counters.hit_tokens += more
        request.loading = []

    def _tell_saved(self) -> None:
        """What loads have saved, as far as a rate of this engine is known. Their own time is not
        taken off: the daemon hears of it as of time that was spent."""
        seconds = self._rate.take()
        self.counters.saved_s += seconds
        self._report("saved-us", int(seconds * 1e6))

    # --- stores -----------------------------------------------------------------------------------

    def step(self, output: Any) -> Step:
        """What the workers do in this step; output is vLLM's SchedulerOutput. Which profile is in
        force comes first: what may be stored follows from it."""
        client = self._session.client() if self._session.is_open else None
        if client is not None:
            try:
                self._poll(client, None, 0)
                self._follow(client)
            except KvferryError as error:
                if not isinstance(error, SessionError):
                    self._warn_once(f"lookup: {error}")
        made, self._loads = Step(loads=self._loads, lossless=self._lossless), []
        prompts: List[Tuple[int, int]] = []
        for new in output.scheduled_new_reqs:
            prompts += self._scheduled(made, new.req_id, new.block_ids, False,
                                       new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            prompts += self._scheduled(made, request_id, cached.new_block_ids[i],
                                       request_id not in cached.resumed_req_ids,
                                       cached.num_computed_tokens[i], output)
        made.number = self._rate.scheduled(prompts, sum(output.num_scheduled_tokens.values()))
        self._drop_old()
        return made

    def _follow(self, client: Client) -> None:
        """A daemon that has come back may have another profile in force."""
        info = client.info()
        if info.connected and info.reconnects != self._reconnects:
            self._reconnects = info.reconnects
            self.connected(info.profile, info.lossless)

    def _scheduled(self, made: Step, request_id: str, pages: Any, appended: bool, computed: int,
                   output: Any) -> List[Tuple[int, int]]:
        """A request takes part in the step. The part of its prompt that this computes, if any."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        if pages is not None:
            request.pages = (request.pages if appended else []) + list(pages[0])
        if request.next_store is None:
            self._report("tokens-loaded", request.hit_tokens)
            self._report("tokens-engine", computed - request.hit_tokens)
            self._report("tokens-computed", request.engine.num_prompt_tokens - computed)
        if request.next_store is None or not appended:
            # What was in the engine's own cache was stored when it was computed; a chunk that it
            # has in part is stored whole.
            request.next_store = computed // self._chunk
            request.own = -(-computed // self._chunk)
        end = computed + output.num_scheduled_tokens[request_id]
        self._taint.computes(request.pages, computed, end)
        self._store(made, request, end)
        prompt_end = min(end, request.engine.num_prompt_tokens)
        return [(computed, prompt_end)] if prompt_end > computed else []

    def _limit(self, request: Request) -> int:
        """Tokens of a request that may be stored."""
        if request.excluded or not request.settings.store or self._settings.store == "none":
            return 0
        tokens = request.engine.num_tokens
        if self._settings.store == "prompt":
            tokens = request.engine.num_prompt_tokens
        if request.settings.max_offload_tokens is not None:
            tokens = min(tokens, request.settings.max_offload_tokens)
        return int(tokens)

    def _store(self, made: Step, request: Request, computed: int) -> None:
        """Add the chunks that are full when this step has run, and the tail of a prompt that ends
        with it."""
        assert request.next_store is not None
        if request.adapter is not None and request.adapter != self._adapter_digest(
                request.engine.lora_request):
            request.excluded = True  # it has been exchanged since the request came
        tokens = min(computed, self._limit(request))
        first = max(request.next_store, request.known)
        end = min(tokens // self._chunk, self._full_chunks(request))
        if made.again is None and time.monotonic() >= self._next_again:
            self._compare(made, request, max(request.next_store, request.own),
                          min(end, request.known))
        for number in range(first, end):
            self._store_chunk(made, request, number, self._blocks)
        request.next_store = max(request.next_store, end)
        prompt = min(request.engine.num_prompt_tokens, self._limit(request))
        number, blocks = prompt // self._chunk, prompt % self._chunk // self._facts.block_tokens
        if made.lossless and computed >= prompt and 0 < blocks <= self._tail_most:
            begun = request.tail_blocks if request.tail_chunk == number else 0
            if blocks > begun and number >= max(request.known, request.next_store):
                self._store_chunk(made, request, number, blocks)

    def _compare(self, made: Step, request: Request, first: int, end: int) -> None:
        """Have one of chunks first..end - 1, which are stored and computed all the same, compared
        with what is stored; not behind what was loaded with loss, of which they would speak."""
        if first >= end:
            return
        self._n_again += 1
        number = first + self._n_again % (end - first)
        begin = number * self._blocks
        if not self._taint.forbids(request.pages, begin, begin + self._blocks, True):
            made.again = StoreChunk(self._key(request, begin + self._blocks - 1), None, number,
                                    number * self._chunk,
                                    request.pages[begin:begin + self._blocks])
            self._next_again = time.monotonic() + AGAIN_S_LEAST

    def _store_chunk(self, made: Step, request: Request, number: int, blocks: int) -> None:
        """Store chunk `number`, or so many blocks of it, in place of what there was of it."""
        first = number * self._blocks
        pages = request.pages[first:first + blocks]
        begun = request.tail_blocks if request.tail_chunk == number else 0
        if blocks < self._blocks:
            request.tail_chunk, request.tail_blocks = number, blocks
        if self._taint.forbids(request.pages, first, first + blocks, made.lossless):
            self.counters.stores_tainted += 1
            self._report("taint-refused", self._facts.shard_count)
            return
        made.stores.append(StoreChunk(
            self._key(request, first + blocks - 1),
            self._key(request, first - 1) if number > 0 else None, number, number * self._chunk,
            pages, 0 if blocks == self._blocks else blocks * self._facts.block_tokens,
            self._key(request, first + begun - 1) if begun else None))
        if self.ledger is not None:
            self._tell(request, made.stores[-1], first, blocks)

    def _tell(self, request: Request, store: StoreChunk, first: int, blocks: int) -> None:
        """Note what vLLM's event says, for when the chunk is stored."""
        assert self.ledger is not None
        engine, block = request.engine, self._facts.block_tokens
        lora = getattr(engine, "lora_request", None)
        self.ledger.begun(store.key, Chunk(
            [bytes(h) for h in engine.block_hashes[first:first + blocks]],
            bytes(engine.block_hashes[first - 1]) if first else None,
            list(engine.all_token_ids[first * block:(first + blocks) * block]),
            getattr(lora, "lora_int_id", None), getattr(lora, "lora_name", None)))
        if store.supersedes is not None:
            self.ledger.superseded(store.supersedes)

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

    def is_from_drive(self, request_id: str) -> bool:
        """Whether a part of what a request loads was on a slower tier when it was looked up."""
        request = self._requests.get(request_id)
        return request is not None and request.waited

    def is_attached(self) -> bool:
        """Whether a daemon answers, as far as is known."""
        handle = self._session.handle
        return handle is not None and handle.link() is not None

    def connected(self, profile: str, lossless: bool) -> None:
        """The profile in force, which may be another one than was asked for."""
        self._profile, self._lossless = profile, lossless

    def close(self) -> None:
        """Give all leases back."""
        self._session.close()
