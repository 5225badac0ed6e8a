#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on the CPU with the connector and a real daemon: is what comes back what went out?

usage: run_vllm.py --daemon KVFERRYD --model DIR [--out FILE] [--corrupt]

Run it with a Python that has vllm (a version of tested_versions.json), and the package and its
library where it finds them (PYTHONPATH to build/release/connectors/python). Too large for
continuous integration: by hand, and its result is committed.

  identical   For prompts of several lengths: tokens and logprobs of a run whose prefix came from
              the daemon, beside one whose local prefix cache hit as many tokens; and the bytes of
              every page that was restored, beside those that were saved. Beside a cold run too:
              where tokens differ there, that is vLLM's own (other shapes, other sums), and is
              listed with the gap of the logprobs.
  failures    kill -9 of the daemon while it is wanted, a restart on its store, a store with a
              flipped byte in each block, a store that is full, a drive that is too slow for the
              budgets: every request ends, with the tokens it should have.
  ttft        Time to the first token, in turns: prefix from the daemon; computed, and stored;
              computed, and neither looked up nor stored. With it, what the connector says that
              hits have saved and cost. The longest prompt is longer than what
              the model was trained for: its positions are computed all the same, and its time is
              what counts.

--kv-cache-dtype fp8 has vLLM itself quantize KV, which is kept without loss then. --corrupt flips
one byte of each restored page, behind all checks: the run must fail then.
"""
import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # pages are looked at in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

from node import Daemon, metrics  # noqa: E402

import kvferry  # noqa: E402
from kvferry.vllm import worker as connector_worker  # noqa: E402

LENGTHS = (588, 1100, 1868)  # prompts; their prefixes of whole chunks: 512, 1024, 1792
TTFT_LENGTHS = (513, 1025, 2049, 4097)
CONTEXT = 4608
SMALL_PROMPTS, SMALL_TOKENS = 10, 1100  # more than the small daemon holds
GAP = 0.1  # of logprobs of two tokens that are as good as equal to this model
SLOW = "load:400ms"  # of each read of the drive: longer than what a lookup waits
TOKENS = 24
CHUNK = 256
ROUNDS = 5
TRIES = 20
WRITTEN_S = 3  # what is stored is on the drive by then
MORE = {}  # of an engine: what another script asks for beside


def digest(tensor):
    """Of the bytes of a page."""
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy(), digest_size=16).digest()


class Watch:
    """Sees pages when they are saved and when they have been restored, from outside the connector:
    by the tensors themselves. A chunk that is saved again may have other bytes, and either may be
    what is stored. Off while times are measured."""

    def __init__(self, corrupt):
        self.saved, self.pages_equal, self.pages_differ = {}, 0, 0
        self.is_on = True
        worker, put, load_one = connector_worker.Worker, connector_worker.Worker._put, \
            connector_worker.Worker._load_one

        def pages_of(self_worker, ids):
            return [tuple(digest(tensor[i]) for tensor in self_worker._pages.owners) for i in ids]

        def watched_put(self_worker, client, chunk, *how):
            if self.is_on:
                versions = self.saved.setdefault(chunk.key, [])
                versions.append(pages_of(self_worker, chunk.pages))
            return put(self_worker, client, chunk, *how)

        def watched_load(self_worker, client, chunk, hit, wanted):
            done = load_one(self_worker, client, chunk, hit, wanted)
            if not done or not self.is_on:
                return done
            if corrupt:
                for i in chunk.pages:
                    self_worker._pages.owners[0][i].view(torch.uint8).view(-1)[0] ^= 1
            first = chunk.token_first // self_worker._pages.tokens_a_page
            restored = pages_of(self_worker, chunk.pages)
            counts = [sum(a == b for page, other in zip(restored, saved[first:])
                          for a, b in zip(page, other)) for saved in self.saved[chunk.key]]
            n = sum(len(page) for page in restored)
            self.pages_equal += max(counts)
            self.pages_differ += n - max(counts)
            return done

        worker._put, worker._load_one = watched_put, watched_load


def engine(model, dtype, socket=None, **extra):
    transfer = None
    if socket is not None:
        transfer = KVTransferConfig(
            kv_connector="KvferryConnector", kv_connector_module_path="kvferry.vllm",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": socket, **extra})
    return LLM(model=model, tokenizer=model, dtype="bfloat16", enforce_eager=True,
               max_model_len=CONTEXT, max_num_seqs=4, disable_log_stats=True, kv_cache_dtype=dtype,
               hf_overrides={"max_position_embeddings": CONTEXT}, kv_transfer_config=transfer,
               **MORE)


def close(llm):
    """End an engine in this process: vLLM keeps one connector a process."""
    llm.llm_engine.engine_core.shutdown()


def prompt(model):
    """Tokens of text that the model has not seen."""
    text = (Path(model) / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return tokenizer.encode(text[:40_000])[:CONTEXT]


def generate(llm, ids, tokens=TOKENS, params=None):
    """(token ids, logprobs, cached tokens, what the connector said, seconds)"""
    begin = time.monotonic()
    asked = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, logprobs=1,
                           extra_args={"kv_transfer_params": params} if params else None)
    out, = llm.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)
    seconds = time.monotonic() - begin
    answer = out.outputs[0]
    logprobs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids)]
    said = out.kv_transfer_params or {}
    return list(answer.token_ids), logprobs, out.num_cached_tokens, said, seconds


def divergence(length, a, b):
    """The first token in which two runs differ, and by how much their logprobs do."""
    for place, (one, other) in enumerate(zip(a[0], b[0])):
        if one != other:
            return {"prompt_tokens": length, "token": place,
                    "logprob_gap": round(abs(a[1][place] - b[1][place]), 6)}
    return None


def references(model, dtype, prompts, small):
    """Cold runs, those of small prompts too, and runs with local hits, of an engine without
    connector. It has to be the first one: a process that has had a connector keeps asking it."""
    llm = engine(model, dtype)
    cold, local = {}, {}
    block = llm.llm_engine.vllm_config.cache_config.block_size
    for length, ids in prompts.items():
        llm.reset_prefix_cache()
        prefix = length - length % block
        cold[length] = generate(llm, ids)
        local[length] = generate(llm, ids)
        if local[length][2] != prefix:
            raise RuntimeError(f"a local hit of {local[length][2]} tokens, not of {prefix}")
    for i, ids in small.items():
        llm.reset_prefix_cache()
        cold[f"small {i}"] = generate(llm, ids)
    close(llm)
    return cold, local


def check_identical(llm, prompts, cold, local, result):
    """Store, forget what the engine has itself, fetch, compare."""
    same, diverged = True, []
    block = llm.llm_engine.vllm_config.cache_config.block_size
    for length, ids in prompts.items():
        llm.reset_prefix_cache()
        generate(llm, ids)
        llm.reset_prefix_cache()
        got = generate(llm, ids)
        prefix = length - length % block
        hit = got[3].get("kvferry.hit_tokens")
        row = {"prompt_tokens": length, "hit_tokens": hit, "tokens": TOKENS,
               "tokens_identical": got[0] == local[length][0],
               "logprobs_identical": got[1] == local[length][1]}
        result["runs"].append(row)
        same = same and hit == prefix and row["tokens_identical"] and row["logprobs_identical"]
        found = divergence(length, got, cold[length])
        diverged += [found] if found else []
    result["divergences_from_cold"] = diverged
    return same


def check_failures(llm, daemon, prompts, local, cold, result):
    """Requests end, and end right, whatever happens to the daemon."""
    length = LENGTHS[0]
    ids = prompts[length]
    time.sleep(WRITTEN_S)
    allowed = (local[length][0], cold[length][0])

    def ask(tries=1):
        """Ask until something is hit, at most so often."""
        right = True
        for turn in range(tries):
            llm.reset_prefix_cache()
            got = generate(llm, ids)
            right = right and got[0] in allowed
            hit = got[3].get("kvferry.hit_tokens")
            if hit:
                break
        return {"asked": turn + 1, "hit_tokens": hit, "tier": got[3].get("kvferry.tier"),
                "right": right}

    ends = {}
    daemon.kill()
    ends["daemon killed"] = ask()
    daemon.start()
    ends["daemon back, with its store"] = ask(TRIES)
    time.sleep(WRITTEN_S)
    daemon.kill()
    daemon.flip_bytes()
    daemon.start()
    ends["a flipped byte in each 64 KiB of the store"] = ask()
    ends["stored anew"] = ask(TRIES)
    result["failures"] = ends
    hits = [bool(end["hit_tokens"]) for end in ends.values()]
    return all(end["right"] for end in ends.values()) and hits == [False, True, False, True]


def check_small(options, prompts, cold, folder, sets, extra, result, name):
    """Prompts that a daemon of little memory, or with a slow drive, cannot serve in time: each ends
    with the tokens of a run without, or leaves them where two are as good as equal, since a hit of
    another length gives other sums."""
    daemon = Daemon(options.daemon, folder, *sets)
    daemon.start()
    try:
        llm = engine(options.model, options.kv_cache_dtype, daemon.socket, **extra)
        right, hits, slowest, diverged = True, [], 0.0, []
        for turn in range(2):
            # back again from the last one, which is there when those before it are not
            for i, ids in sorted(prompts.items(), reverse=turn == 1):
                llm.reset_prefix_cache()
                got = generate(llm, ids)
                found = divergence(len(ids), got, cold[f"small {i}"])
                diverged += [found] if found else []
                right = right and (found is None or found["logprob_gap"] < GAP)
                slowest = max(slowest, got[4])
                if turn == 1:
                    hits.append(got[3].get("kvferry.hit_tokens"))
        result["failures"][name] = {"asked": 2 * len(prompts), "right": right, "hit_tokens": hits,
                                    "divergences_from_cold": diverged,
                                    "slowest_s": round(slowest, 3)}
        close(llm)
        return right
    finally:
        daemon.kill()


def measure_ttft(llm, ids, rounds, result):
    """Seconds to one token: prefix from the daemon, computed and stored, computed only; in turns.
    Prompts that follow no text: each turn has tokens of its own."""
    rows = []
    for row, length in enumerate(TTFT_LENGTHS):
        hit, miss, plain = [], [], []
        for turn in range(rounds):
            fresh = [(t + row * rounds + turn + 1) % 8000 for t in ids[:length]]
            llm.reset_prefix_cache()
            plain.append(generate(llm, fresh, 1, {"kvferry.load": False,
                                                  "kvferry.store": False})[4])
            llm.reset_prefix_cache()
            got = generate(llm, fresh, 1)
            if got[3].get("kvferry.hit_tokens"):
                raise RuntimeError(f"{length} tokens, not seen before: {got[3]}")
            miss.append(got[4])
            for _ in range(TRIES):  # the last chunk may still be on its way to the daemon
                llm.reset_prefix_cache()
                got = generate(llm, fresh, 1)
                if got[3].get("kvferry.hit_tokens") == length - 1:
                    break
            else:
                raise RuntimeError(f"{length} tokens: {got[3]}")
            hit.append(got[4])
        rows.append({"prompt_tokens": length, "hit_tokens": length - 1, "hit_s": spread(hit),
                     "recompute_and_store_s": spread(miss), "recompute_s": spread(plain)})
    result["ttft"] = {"rounds": rounds, "rows": rows}


def check_reported(daemon, result):
    """The daemon has heard what these hits have saved, and cost."""
    said = metrics(daemon.socket)
    names = ("saved_seconds", "spent_seconds", "prompt_tokens_loaded", "drift_chunks",
             "drift_error_ppm")
    result["reported"] = {name: round(said[f"kvferry_engine_{name}_total"], 3) for name in names}
    return result["reported"]["saved_seconds"] > 0


def spread(seconds):
    """Least, median and most."""
    ordered = sorted(seconds)
    return [round(ordered[i], 4) for i in (0, len(ordered) // 2, -1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--daemon", required=True, metavar="KVFERRYD")
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--corrupt", action="store_true")
    parser.add_argument("--identical-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="of each time")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="NAME")
    options = parser.parse_args()
    watch = Watch(options.corrupt)
    result = {"vllm": vllm.__version__, "torch": torch.__version__, "kvferry": kvferry.__version__,
              "model": Path(options.model).name, "kv_cache_dtype": options.kv_cache_dtype,
              "profile": "exact", "chunk_tokens": CHUNK,
              "machine": platform.machine(), "threads": torch.get_num_threads(), "runs": []}
    with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as folder:
        daemon = Daemon(options.daemon, folder, "dram.bytes=1GiB", "nvme.0.bytes=2GiB")
        daemon.start()
        try:
            ids = prompt(options.model)
            # none of them begins as another one does
            prompts = {length: ids[100 * i:100 * i + length] for i, length in enumerate(LENGTHS)}
            small = {i: ids[60 * i:60 * i + SMALL_TOKENS] for i in range(SMALL_PROMPTS)}
            is_long = not options.corrupt and not options.identical_only
            cold, local = references(options.model, options.kv_cache_dtype, prompts,
                                     small if is_long else {})
            llm = engine(options.model, options.kv_cache_dtype, daemon.socket)
            same = check_identical(llm, prompts, cold, local, result)
            result["pages_compared"] = watch.pages_equal + watch.pages_differ
            result["pages_differ"] = watch.pages_differ
            same = same and watch.pages_equal > 0 and watch.pages_differ == 0
            result["vllm_exact_identical"] = int(same)
            if is_long:
                watch.is_on = False
                measure_ttft(llm, ids, options.rounds, result)
                right = check_reported(daemon, result)
                watch.is_on = True
                right = check_failures(llm, daemon, prompts, local, cold, result) and right
            close(llm)
        finally:
            daemon.kill()
    if is_long:
        sizes = ("dram.bytes=64MiB", "dram.area_bytes=16MiB", "dram.piece_bytes=64MiB",
                 "staging.total=256MiB", "nvme.0.bytes=128MiB", "nvme.0.segment_bytes=8MiB")
        for name, sets, extra in (("a full store", sizes, {"staging_bytes": 32 << 20}),
                                  ("a slow drive", (*sizes, "test.delay_nvme=" + SLOW),
                                   {"staging_bytes": 32 << 20, "load_budget_ms": 200})):
            with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as folder:
                right = check_small(options, small, cold, folder, sets, extra, result,
                                    name) and right
        result["every_request_ended_right"] = right and watch.pages_differ == 0
    result["load_average"] = round(os.getloadavg()[0], 1)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")
    return 0 if same and result.get("every_request_ended_right", True) else 1


if __name__ == "__main__":
    sys.exit(main())
