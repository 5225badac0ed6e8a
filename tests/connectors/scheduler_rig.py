# SPDX-License-Identifier: Apache-2.0
"""scheduler_rig.py: vLLM's own scheduler over workers that compute nothing.

What a model would have written for a token follows from the tokens before it, and the next token
too. Each step looks at every page that attention would read: the rows of all tokens before those
that are computed now. A row that is wrong there ends the run. So do tokens that are not the ones
that a request has to get.
"""
import collections
import copy

import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, HEADS, DIM, LAYERS, CHUNK = 16, 1, 32, 2, 64
VOCABULARY = 8000
MASK = (1 << 61) - 1


class WrongPage(AssertionError):
    """A step would have read rows that are not those of its tokens."""


def state_after(state, token):
    return (state * 6364136223846793005 + token * 1442695040888963407 + 12345) & MASK


def next_token(state):
    return state % VOCABULARY


def continuation(prompt, n):
    """What a request with this prompt has to answer."""
    state, answer = 0, []
    for token in prompt:
        state = state_after(state, token)
    for _ in range(n):
        answer.append(next_token(state))
        state = state_after(state, answer[-1])
    return answer


def row(state):
    """What the model writes for a token: 2 * DIM numbers of 16 bits. Layer and rank add to it."""
    words = [(state >> shift) & 0x3FFF for shift in (0, 14, 28, 42)]
    return torch.tensor(words * (2 * DIM // 4), dtype=torch.int16)


class Runner:
    """Workers of all ranks, in the order of calls of vLLM's model runner."""

    def __init__(self, config, cache, connector_class, ranks, blocks):
        self.tables, self.tokens, self.states = {}, {}, {}
        self.workers, self.pages = [], []
        for rank in range(ranks):
            parallel_state.get_tensor_model_parallel_rank = lambda rank=rank: rank
            worker = connector_class(config, KVConnectorRole.WORKER, cache)
            pages = [torch.zeros((blocks, HEADS, BLOCK, 2 * DIM), dtype=torch.int16)
                     for _ in range(LAYERS)]
            worker.register_kv_caches({f"layers.{i}.attn": p.view(torch.bfloat16)
                                       for i, p in enumerate(pages)})
            self.workers.append(worker)
            self.pages.append(pages)
        self.aggregator = KVOutputAggregator(ranks)
        self.before_save = None

    def _rows(self, request_id, first, end):
        """The rows of tokens first..end - 1, as layer 0 of rank 0 has them."""
        states, rows = self.states[request_id]
        tokens = self.tokens[request_id]
        while len(states) < end:
            states.append(state_after(states[-1] if states else 0, tokens[len(states)]))
            rows.append(row(states[-1]))
        return torch.stack(rows[first:end])

    def _tables(self, output):
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.states[new.req_id] = ([], [])
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = list(blocks[0])
            elif blocks is not None:
                self.tables[request_id] += blocks[0]
            if request_id in cached.all_token_ids:
                known = list(cached.all_token_ids[request_id])
                for part in self.states[request_id]:
                    del part[len(known):]
                self.tokens[request_id] = known

    def _where(self, request_id, first, end):
        """(blocks, slots) of tokens first..end - 1."""
        at = torch.arange(first, end)
        return torch.tensor(self.tables[request_id])[at // BLOCK], at % BLOCK

    def _each_layer(self):
        for rank, layers in enumerate(self.pages):
            for layer, pages in enumerate(layers):
                yield rank, layer, pages

    def _check(self, request_id, computed):
        """All that attention reads."""
        if computed == 0:
            return
        blocks, slots = self._where(request_id, 0, computed)
        wanted = self._rows(request_id, 0, computed)
        for rank, layer, pages in self._each_layer():
            equal = (pages[blocks, 0, slots] == wanted + rank * LAYERS + layer).all(dim=1)
            if not equal.all():
                first = int((~equal).nonzero()[0])
                raise WrongPage(f"{request_id}: token {first} of {computed}, block "
                                f"{int(blocks[first])}, rank {rank}, layer {layer}")

    def _compute(self, request_id, computed, n):
        blocks, slots = self._where(request_id, computed, computed + n)
        made = self._rows(request_id, computed, computed + n)
        for rank, layer, pages in self._each_layer():
            pages[blocks, 0, slots] = made + rank * LAYERS + layer

    def _sample(self, request_id, end):
        """The token that follows, where all that are known have been computed."""
        tokens = self.tokens[request_id]
        assert end <= len(tokens), (request_id, end, len(tokens))
        if end < len(tokens):
            return []
        tokens.append(next_token(self.states[request_id][0][end - 1]))
        return [tokens[-1]]

    def execute(self, output):
        """A step: what vLLM's workers answer, put together as its executor does it."""
        self._tables(output)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens))
        ids = list(output.num_scheduled_tokens)
        for worker in self.workers:
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
        sampled = []
        for request_id in ids:
            n = output.num_scheduled_tokens[request_id]
            self._check(request_id, computed[request_id])
            self._compute(request_id, computed[request_id], n)
            sampled.append(self._sample(request_id, computed[request_id] + n))
        made = [self._worker_output(worker, output, ids, sampled) for worker in self.workers]
        return self.aggregator.aggregate(made)

    def _worker_output(self, worker, output, ids, sampled):
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        if self.before_save is not None:
            self.before_save()
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending, finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta())
        worker.clear_connector_metadata()
        return ModelRunnerOutput(req_ids=list(ids), kv_connector_output=told,
                                 req_id_to_index={name: i for i, name in enumerate(ids)},
                                 sampled_token_ids=copy.deepcopy(sampled))


class Rig:
    """An engine core: the scheduler, its steps, and what has come of each request."""

    def __init__(self, model, transfer, blocks=64, ranks=1, seqs=8, batched=128,
                 is_async=False, events=False):
        from vllm.config import KVEventsConfig
        arguments = EngineArgs(
            model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024,
            block_size=BLOCK, enforce_eager=True, max_num_seqs=seqs, async_scheduling=is_async,
            max_num_batched_tokens=batched, kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            if events else None)
        config = arguments.create_engine_config()
        config.parallel_config.tensor_parallel_size = ranks
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.block_size = BLOCK
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM,
                                 dtype=torch.bfloat16)
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[
            KVCacheGroupSpec([f"layers.{i}.attn" for i in range(LAYERS)], spec)])
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.blocks, self.is_async = blocks, is_async
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config, kv_cache_config=cache, log_stats=True, block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config))
        connector_class = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        self.runner = Runner(config, cache, connector_class, ranks, blocks)
        self.in_flight = collections.deque()
        self.answers, self.said, self.ended, self.prompts = {}, {}, {}, {}
        self.requests, self.external, self.stats, self.events = {}, {}, [], []
        self.steps = 0

    @property
    def connector(self):
        """Ours, also inside a MultiConnector."""
        found = self.scheduler.connector
        for part in getattr(found, "_connectors", ()):
            if type(part).__name__ == "KvferryConnector":
                return part
        return found

    def worker(self, rank=0):
        found = self.runner.workers[rank]
        for part in getattr(found, "_connectors", ()):
            if type(part).__name__ == "KvferryConnector":
                return part._worker
        return found._worker

    def add(self, name, prompt, tokens=4, params=None, **more):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True,
                                  extra_args={"kv_transfer_params": params} if params else None,
                                  **more)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        self.prompts[name], self.answers[name], self.requests[name] = list(prompt), [], request
        self.scheduler.add_request(request)
        return request

    def step(self):
        """One turn of the engine's loop."""
        self.steps += 1
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.runner.execute(output)))
        if self.is_async and len(self.in_flight) < 2 and output.total_num_scheduled_tokens > 0:
            return
        while self.in_flight:
            self._update(*self.in_flight.popleft())
            if self.is_async and output.total_num_scheduled_tokens > 0:
                return

    def _update(self, output, answer):
        for outputs in self.scheduler.update_from_output(output, answer).values():
            if outputs.scheduler_stats is not None:
                if outputs.scheduler_stats.kv_connector_stats:
                    self.stats.append(outputs.scheduler_stats.kv_connector_stats)
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids
                if one.prefill_stats is not None:
                    self.external[one.request_id] = one.prefill_stats.num_external_cached_tokens
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
                    self.said[one.request_id] = one.kv_transfer_params or {}

    def preempt_all(self):
        """Begin all running requests anew, without vLLM's own cache. False: vLLM does not do that
        while a load, a step in flight or a request that waits has pages."""
        while self.in_flight:
            self._update(*self.in_flight.popleft())
        fine = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if self.scheduler.deferred_frees or len(self.scheduler.kv_holding_waiting) or any(
                request.status not in fine for request in self.scheduler.requests.values()):
            return False
        return self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def state(self, name):
        return self.scheduler.requests[name].status

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.ended[name] = "abort"

    def until(self, is_so, steps=20_000):
        """Step until is_so()."""
        for _ in range(steps):
            if is_so():
                return
            self.step()
        raise AssertionError("what was waited for does not happen")

    def run(self, *names):
        """Step until these have ended, and look at what they got."""
        self.until(lambda: all(name in self.ended for name in names))
        self.drain()
        for name in names:
            answer = self.answers[name]
            wanted = continuation(self.prompts[name], len(answer))
            if answer != wanted:
                raise AssertionError(f"{name}: wrong tokens {answer}, not {wanted}")

    def drain(self):
        """Let what is in flight come in, and stores be answered."""
        while self.in_flight:
            self._update(*self.in_flight.popleft())
        self.step()
        for rank in range(len(self.runner.workers)):
            worker = self.worker(rank)
            while True:
                worker.idle()
                c = worker.counters
                if c.stored + c.present + c.refused == c.handed:
                    break

    def ask(self, name, prompt, tokens=4, params=None, **more):
        """One request from its beginning to its end: hit tokens as vLLM counts them."""
        self.add(name, prompt, tokens, params, **more)
        self.run(name)
        return self.external.get(name, 0)

    def forget(self):
        """Empty vLLM's own cache."""
        assert self.scheduler.reset_prefix_cache()

    def is_clean(self):
        """Nothing is held for nobody: pages, leases, requests."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        scheduler = self.connector._scheduler
        client = scheduler._session.client()
        leased = client.stat()["leased_bytes"] if client is not None else 0
        held = {"pages": self.blocks - 1 - free, "leased_bytes": leased,
                "requests": len(scheduler._requests), "lookups": len(scheduler._lookups),
                "of_vllm": len(self.scheduler.requests)}
        assert not any(held.values()), held

    def close(self):
        self.scheduler.shutdown()
        for worker in self.runner.workers:
            worker.shutdown()
