#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on a GPU with the connector and a real daemon: what comes back, and in what time?

usage: run_vllm_gpu.py identical --daemon KVFERRYD --model DIR [--out FILE] [--corrupt]
       run_vllm_gpu.py figures --daemon KVFERRYD [--out FILE] [--rounds N] [--pairs N] [--arms ...]

Run it as run_vllm.py, on a machine with a GPU. Too large for continuous integration: by hand, and
its results are committed.

  identical   What run_vllm.py asks of a vLLM on a processor: bytes of every page that was restored,
              tokens and logprobs beside a run whose local prefix cache hit as many tokens, the
              divergences from a cold run, and a daemon that is killed, comes back on its store, and
              comes back on one with flipped bytes. --corrupt flips a byte of each restored page,
              behind all checks: the run must fail then.
  figures     A model in the shape of Llama-3.1-8B with random weights, and an engine for each arm:
              no connector, vLLM's own offloading to host memory, kvferry under `exact` and under
              `balanced`. They take turns on one GPU, in an order shuffled anew each time, and only
              one computes at a time:
              ttft      to the first token: computed, computed and stored, from the engine's own
                        prefix cache, fetched;
              nohit     prefill of prompts of which nothing is known: with the connector, storing
                        and not, beside without, in pairs;
              calls     what each of the connector's calls has taken of the engine's thread;
              drift     what a comparison with what is stored takes of it.
"""
import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # pages and calls are looked at in the process
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench")]

import figures as bench  # noqa: E402

ARMS = ("none", "native", "kvferry-exact", "kvferry-balanced")
LENGTHS = (512, 1024, 2048, 4096, 16384, 32768)  # of prefixes; a prompt has one token more
CONTEXT = 33 << 10
BATCHED_TOKENS = 8192  # of a step, as `vllm serve` has it
VOCABULARY = 128256
KV_BYTES = 10 << 30  # of each engine's cache on the GPU
HOST_BYTES = 16 << 30  # of each arm that offloads: a client's share holds the longest prompt
STAGING_BYTES = 1 << 30  # more than a step's encoded KV
LOOP_PROMPTS, LOOP_TOKENS = 24, 2048
SETTLE_TOKENS = 8
TRIES = 8
DRIFT_ROUNDS = 20
ANSWER_S = 600
SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
         "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
         "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
         "eos_token_id": 2}
CALLS = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
         "update_connector_output", "request_finished", "start_load_kv", "wait_for_save",
         "get_finished")


def versions(commit):
    """What a figure is worth nothing without."""
    import torch
    import vllm

    import kvferry
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True, check=False).stdout.split()
    return {"vllm": vllm.__version__, "torch": torch.__version__, "kvferry": kvferry.__version__,
            "commit": commit, "gpu": torch.cuda.get_device_name(), "driver": driver[0],
            "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d", time.gmtime())}


def finish(result, path, good):
    result["load_average"] = round(os.getloadavg()[0], 1)
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return 0 if good else 1


# --- identical -----------------------------------------------------------------------------------

class Watch:
    """Sees pages when they are stored and when they have been restored, from outside the connector:
    by the engine's tensors, on the engine's stream."""

    def __init__(self, corrupt):
        from kvferry.vllm.worker_gpu import GpuWorker
        self.saved, self.pages_equal, self.pages_differ, self.corrupt = {}, 0, 0, corrupt
        put, take = GpuWorker._put, GpuWorker._take

        def watched_put(worker, gpu, chain, lossless):
            for chunk in chain:  # copied on the engine's stream: nothing here waits for the step
                self.saved.setdefault(chunk.key, []).append(self.copies(worker, chunk.pages))
            return put(worker, gpu, chain, lossless)

        def watched_take(worker, event):
            load = worker._loads.get(event.request)
            take(worker, event)
            if load is not None and event.kind == "block" and event.status == 0:
                self.restored(worker, load.job.chunks[load.first + event.index])

        GpuWorker._put, GpuWorker._take = watched_put, watched_take

    @staticmethod
    def copies(worker, ids):
        """Of these pages, layer by layer."""
        import torch
        index = torch.tensor(ids, pin_memory=True).to("cuda", non_blocking=True)
        return [tensor.index_select(0, index) for tensor in worker._pages.owners]

    @staticmethod
    def digests(copies):
        """Of the bytes of each page, layer by layer."""
        from run_vllm import digest
        copies = [copy.cpu() for copy in copies]
        return [tuple(digest(copy[i]) for copy in copies) for i in range(len(copies[0]))]

    def restored(self, worker, chunk):
        if self.corrupt:
            import torch
            with torch.inference_mode():
                for i in chunk.pages:
                    worker._pages.owners[0][i].view(torch.uint8)[0, 0, 0] ^= 1
        first = chunk.token_first // worker._pages.tokens_a_page
        now = self.digests(self.copies(worker, chunk.pages))
        counts = [sum(a == b for page, other in zip(now, self.digests(saved)[first:])
                      for a, b in zip(page, other)) for saved in self.saved[chunk.key]]
        n = sum(len(page) for page in now)
        self.pages_equal += max(counts)
        self.pages_differ += n - max(counts)


def identical(options):
    import run_vllm
    from node import Daemon
    run_vllm.MORE.update(kv_cache_memory_bytes=2 << 30)
    watch = Watch(options.corrupt)
    result = {**versions(options.commit), "model": Path(options.model).name, "profile": "exact",
              "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0"), "runs": []}
    ids = run_vllm.prompt(options.model)
    prompts = {length: ids[100 * i:100 * i + length]
               for i, length in enumerate(run_vllm.LENGTHS)}
    right = True
    with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as folder:
        daemon = Daemon(options.daemon, folder, "dram.bytes=1GiB", "nvme.0.bytes=2GiB")
        daemon.start()
        try:
            cold, local = run_vllm.references(options.model, "auto", prompts, {})
            llm = run_vllm.engine(options.model, "auto", daemon.socket)
            same = run_vllm.check_identical(llm, prompts, cold, local, result)
            result["pages_compared"] = watch.pages_equal + watch.pages_differ
            result["pages_differ"] = watch.pages_differ
            same = same and watch.pages_equal > 0 and watch.pages_differ == 0
            result["vllm_gpu_exact_identical"] = int(same)
            if not options.corrupt:
                right = run_vllm.check_failures(llm, daemon, prompts, local, cold, result)
                result["every_request_ended_right"] = right and watch.pages_differ == 0
            run_vllm.close(llm)
        finally:
            daemon.kill()
    return finish(result, options.out, same and right)


# --- an engine of an arm, in a process of its own ------------------------------------------------

class Calls:
    """Seconds that each call of the connector has taken, from outside of it."""

    def __init__(self):
        from kvferry.vllm import KvferryConnector
        self.seconds = {name: [] for name in CALLS}
        for name in CALLS:
            setattr(KvferryConnector, name, self.timed(name, getattr(KvferryConnector, name)))

    def timed(self, name, call):
        def timed_call(*arguments, **named):
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[name].append(time.perf_counter() - began)
        return timed_call

    def take(self):
        """Counts, and microseconds: median, of 99 in 100, most, all together."""
        rows = {}
        for name, all_of_it in self.seconds.items():
            ordered = sorted(all_of_it)
            all_of_it.clear()
            if ordered:
                rows[name] = {"n": len(ordered), "p50_us": us(ordered[len(ordered) // 2]),
                              "p99_us": us(ordered[len(ordered) * 99 // 100]),
                              "most_us": us(ordered[-1]), "sum_us": us(sum(ordered))}
        return rows


class Ends:
    """How blocks have ended that were to be loaded, and loads that were not begun."""

    def __init__(self):
        from kvferry import KvferryError
        from kvferry.vllm import worker_gpu
        self.counts = {}
        get, take = worker_gpu.Gpu.get, worker_gpu.GpuWorker._take

        def counted_get(gpu, items, **named):
            try:
                return get(gpu, items, **named)
            except KvferryError as error:
                self.count(f"not begun, {type(error).__name__}")
                raise

        def counted_take(worker, event):
            if event.request in worker._loads and event.kind == "block":
                self.count(event.status.name)
            take(worker, event)

        worker_gpu.Gpu.get, worker_gpu.GpuWorker._take = counted_get, counted_take

    def count(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1


def us(seconds):
    return round(seconds * 1e6, 1)


class Arm:
    """One engine. Its methods are called by the process that takes turns."""

    def __init__(self, arm, socket, options):
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig
        self.asked = SamplingParams
        self.calls = Calls() if arm.startswith("kvferry") else None
        self.ends = Ends() if arm.startswith("kvferry") else None
        transfer = None
        if arm == "native":
            transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both",
                                        kv_connector_extra_config={"cpu_bytes_to_use": HOST_BYTES})
        elif arm.startswith("kvferry"):
            extra = {"socket": socket, "profile": arm.split("-")[1], "weights_digest": "07" * 32,
                     "allow_uncalibrated": True, "staging_bytes": STAGING_BYTES,
                     **json.loads(options.extra)}
            transfer = KVTransferConfig(
                kv_connector="KvferryConnector", kv_connector_module_path="kvferry.vllm",
                kv_role="kv_both", kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra)
        self.llm = LLM(model=options.shape, load_format="dummy", skip_tokenizer_init=True,
                       dtype="bfloat16", enforce_eager=not options.compile, max_model_len=CONTEXT,
                       max_num_batched_tokens=BATCHED_TOKENS, max_num_seqs=32,
                       disable_log_stats=True, gpu_memory_utilization=0.2,
                       kv_cache_memory_bytes=KV_BYTES,
                       kv_transfer_config=transfer)

    def forget(self):
        """What the engine has in its own prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")

    def ask(self, prompts, tokens=1, params=None):
        """(seconds, cached tokens and what the connector said, of the last one)"""
        asked = self.asked(temperature=0, max_tokens=tokens, min_tokens=tokens, detokenize=False,
                           extra_args={"kv_transfer_params": params} if params else None)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        began = time.perf_counter()
        out = self.llm.generate(given, asked, use_tqdm=False)[-1]
        return time.perf_counter() - began, out.num_cached_tokens, out.kv_transfer_params or {}

    def take_calls(self):
        return self.calls.take()

    def worker(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        return get_kv_transfer_group()

    def counters(self):
        return {**vars(self.worker()._worker.counters), "blocks_to_load": self.ends.counts,
                "ring_bytes": self.worker()._worker.ring_bytes,
                "stream": self.worker()._worker._device.stream()}

    def drift(self, n_tokens=256):
        """Microseconds of the engine's thread for the copies of a chunk's pages, side by side and
        far from each other, and until they have ended."""
        connector = self.worker()
        drift, n = connector._drift, n_tokens // connector._worker._pages.tokens_a_page
        rows = {}
        for name, step in (("pages side by side", 1), ("pages apart", 7)):
            queued, ended = [], []
            for turn in range(DRIFT_ROUNDS + 1):
                ids = [1 + turn + i * step for i in range(n)]
                began = time.perf_counter()
                _, wait, _ = drift._fetch(drift._pages.owners, ids, drift._page_bytes)
                queued.append(time.perf_counter() - began)
                wait()
                ended.append(time.perf_counter() - began)
            rows[name] = {"first_us": us(queued[0]), "p50_us": us(statistics.median(queued[1:])),
                          "most_us": us(max(queued[1:])),
                          "ended_p50_us": us(statistics.median(ended[1:]))}
        return {"pages": n, "layers": len(drift._pages.owners), **rows}


def serve(pipe, arm, socket, options):
    """The process of an arm: calls its methods by name."""
    try:
        engine = Arm(arm, socket, options)
        pipe.send(("ok", None))
        while (call := pipe.recv()) is not None:
            name, arguments, named = call
            pipe.send(("ok", getattr(engine, name)(*arguments, **named)))
    except Exception:
        pipe.send(("bad", traceback.format_exc()))


class Remote:
    """An arm, from the process that takes turns."""

    def __init__(self, arm, socket, options):
        context = multiprocessing.get_context("spawn")
        self.name = arm
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, arm, socket, options))
        self.process.start()
        other.close()

    def answer(self):
        if not self.pipe.poll(ANSWER_S):
            raise RuntimeError(f"{self.name}: no answer within {ANSWER_S} s")
        what, value = self.pipe.recv()
        if what != "ok":
            raise RuntimeError(f"{self.name}: {value}")
        return value

    def call(self, name, *arguments, **named):
        self.pipe.send((name, arguments, named))
        return self.answer()

    def close(self):
        self.process.kill()
        self.process.join()


# --- figures -------------------------------------------------------------------------------------

class Prompts:
    """Tokens that nobody has seen before."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def fresh(self, n):
        return self.random.choices(range(1000, VOCABULARY), k=n)


def interval(values):
    """Median, and its interval as that of the other benches."""
    return [round(v, 5) for v in (statistics.median(values), *bench.interval(values))]


def fetched(arm, ids, prompts):
    """Ask again until as much is hit as can be; what is stored may be on its way. One more request
    moves that along, which takes place only in steps."""
    length = len(ids) - 1
    for turn in range(TRIES):
        arm.call("ask", [prompts.fresh(32)], SETTLE_TOKENS,
                 {"kvferry.load": False, "kvferry.store": False})
        if arm.name != "none":
            arm.call("forget")
        seconds, cached, _ = arm.call("ask", [ids])
        if cached == length:
            break
    return {"s": seconds, "hit_tokens": cached, "asked": turn + 1}


def measure_ttft(arms, rounds, prompts, order):
    """Rows of seconds, by length and arm."""
    rows = []
    for length in LENGTHS:
        seen = {arm.name: {"computed": [], "fetched": [], "hit_tokens": [], "asked": []}
                for arm in arms}
        for turn in range(rounds + 1):
            ids = prompts.fresh(length + 1)
            order.shuffle(arms)
            for arm in arms:
                arm.call("forget")
                seconds, cached, _ = arm.call("ask", [ids])
                if cached:
                    raise RuntimeError(f"{arm.name}: {cached} tokens hit that nobody has stored")
                got = fetched(arm, ids, prompts)
                if turn:  # the first one warms up
                    row = seen[arm.name]
                    row["computed"].append(seconds)
                    row["fetched"].append(got["s"])
                    row["hit_tokens"].append(got["hit_tokens"])
                    row["asked"].append(got["asked"])
        row = {"prefix_tokens": length}
        for name, one in sorted(seen.items()):
            row[name] = {"computed_s": interval(one["computed"]),
                         "fetched_s": interval(one["fetched"]),
                         "hit_tokens": [min(one["hit_tokens"]), max(one["hit_tokens"])],
                         "asked_most": max(one["asked"])}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def measure_nohit(arms, pairs, prompts, order):
    """Prefill of prompts of which nothing is known: seconds with each arm over those without a
    connector, in pairs; and the calls of the engine's thread meanwhile."""
    by_name = {arm.name: arm for arm in arms}
    off = {"kvferry.store": False}
    kinds = [(name, how, params) for name in by_name if name != "none"
             for how, params in (("stores", None), ("looks up only", off))
             if name.startswith("kvferry") or how == "stores"]
    made = {f"{name}, {how}": [] for name, how, _ in kinds}
    calls, plain = {}, []

    def loop(arm, params=None):
        arm.call("forget")
        given = [prompts.fresh(LOOP_TOKENS) for _ in range(LOOP_PROMPTS)]
        return arm.call("ask", given, 1, params)[0]

    for turn in range(pairs + 1):
        for name, how, params in order.sample(kinds, len(kinds)):
            arm = by_name[name]
            if arm.name.startswith("kvferry"):
                arm.call("take_calls")
            both = [lambda: loop(by_name["none"]), lambda: loop(arm, params)]
            first = order.randrange(2)
            seconds = {i: both[i]() for i in (first, 1 - first)}
            if turn:
                made[f"{name}, {how}"].append(seconds[1] / seconds[0] - 1)
                plain.append(seconds[0])
            if arm.name.startswith("kvferry"):
                calls[f"{name}, {how}"] = arm.call("take_calls")
    return {"prompts": LOOP_PROMPTS, "prompt_tokens": LOOP_TOKENS, "pairs": pairs,
            "without_s": interval(plain),
            "cost": {name: interval(values) for name, values in made.items()},
            "calls_of_one_loop": calls}


def figures(options):
    from node import Daemon, metrics
    prompts, order = Prompts(options.seed), random.Random(options.seed)
    result = {"shape": "Llama-3.1-8B, random weights", "step_tokens": BATCHED_TOKENS,
              "host_bytes": HOST_BYTES, "staging_bytes": STAGING_BYTES, "extra": options.extra,
              "is_compiled": options.compile}
    with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as folder:
        options.shape = str(Path(folder) / "model")
        Path(options.shape).mkdir()
        (Path(options.shape) / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        daemon = Daemon(options.daemon, folder, f"dram.bytes={HOST_BYTES}",
                        f"staging.total={4 * STAGING_BYTES}", "allow_uncalibrated=true",
                        *options.set).without_drive()
        daemon.start()
        arms = []
        try:
            for name in options.arms:
                arms.append(Remote(name, daemon.socket, options))
            for arm in arms:
                arm.answer()
            print("all engines have started", flush=True)
            result["ttft"] = {"rounds": options.rounds,
                              "rows": measure_ttft(arms, options.rounds, prompts, order)}
            if "none" in options.arms and options.pairs:
                result["nohit"] = measure_nohit(arms, options.pairs, prompts, order)
                cost = result["nohit"]["cost"].get("kvferry-exact, stores")
                if cost:
                    result["nohit_cost_vllm_gpu"] = cost[0]
            for arm in arms:
                if arm.name.startswith("kvferry"):
                    result[arm.name] = {"counters": arm.call("counters"),
                                        "drift": arm.call("drift")}
            said = metrics(daemon.socket)
            result["reported"] = {name: value for name, value in sorted(said.items())
                                  if name.startswith("kvferry_engine_")}
        finally:
            for arm in arms:
                arm.close()
            daemon.kill()
    result = {**versions(options.commit), **result}
    return finish(result, options.out, True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("identical", "figures"))
    parser.add_argument("--daemon", required=True, metavar="KVFERRYD")
    parser.add_argument("--model", metavar="DIR")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--commit", default="", metavar="TEXT", help="noted in the result")
    parser.add_argument("--corrupt", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of each time")
    parser.add_argument("--pairs", type=int, default=12, metavar="N", help="of loops")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--compile", action="store_true", help="as vLLM has it when not told")
    parser.add_argument("--extra", default="{}", metavar="JSON",
                        help="more for kv_connector_extra_config")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE",
                        help="more for the daemon")
    options = parser.parse_args()
    if options.what == "figures":
        return figures(options)
    if not options.model:
        parser.error("identical needs --model")
    return identical(options)


if __name__ == "__main__":
    sys.exit(main())
