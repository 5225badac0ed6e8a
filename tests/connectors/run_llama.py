#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real llama.cpp with kvferry-llama and a real daemon: is what comes back what went out?

usage: run_llama.py --build DIR --model FILE.gguf [--source TEXT] [--part PART ...] [--out FILE]
                    [--threads N] [--length TOKENS ...] [--rounds N] [--corrupt]

DIR is a build of this tree with KVF_LLAMA. Too large for continuous integration: by hand, and its
result is committed. Parts, all if none is named:

  identical   For prompts of several lengths: tokens, logprobs and all logits of a run whose prefix
              came from the daemon, beside one whose prefix the server's own slot had, of as many
              tokens; and the bytes of every chunk in llama.cpp's cache after it was restored,
              beside those that had been saved. Beside a cold run too: where tokens differ there,
              it is listed with the gap of the logprobs.
  ttft        Time to the first token with a hit and computed, in turns.
  profiles    Profiles with loss over the same chunks: bytes a token in the daemon's memory, how
              many tokens are those without loss, and the gap of the first logprob.
  failures    kill -9 of the daemon, a restart on its store, a flipped byte in each block of the
              store, a daemon that stands still, a slow drive, a full store, and kill -9 while
              requests are under way: every request ends, with the tokens that it should have.

--corrupt changes one byte of each restored state behind all checks: the run must fail then.
"""
import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from llama_server import Server, State
from node import Daemon

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 256
CONTEXT = 4608
TOKENS = 24
LENGTHS = (588, 1100, 1868)  # of prompts; their prefixes of whole chunks: 512, 1024, 1792
TTFT_LENGTHS = (513, 1025, 2049, 4097)
PROFILES = ("exact", "saw8", "balanced", "tq4")
TRIES = 40
BUDGET_MS = 60_000  # where it is not time that is asked about
WRITTEN_S = 3  # what is stored is on the drive by then


class Bench:
    """What all parts use."""

    def __init__(self, options, folder):
        self.options, self.folder = options, Path(folder)
        build = Path(options.build)
        self.kvferryd = str(build / "agent" / "kvferryd")
        self.program = str(build / "connectors" / "llama.cpp" / "kvferry-llama")
        self.command = str(build / "client" / "kvferry")
        self.watch = str(build / "tests" / "connectors" / "libkvf_llama_watch.so")
        self.log = str(self.folder / "server.log")
        self.seen = self.folder / "seen"
        self.seen.mkdir()

    def daemon(self, name, *sets):
        return Daemon(self.kvferryd, self.folder / name, *(sets or (
            "dram.bytes=1GiB", "nvme.0.bytes=1GiB")))

    def server(self, socket, *more, watched=False):
        env = dict(os.environ)
        if watched:
            env.update(LD_PRELOAD=self.watch, KVF_WATCH_DIR=str(self.seen))
            if self.options.corrupt:
                env["KVF_WATCH_CORRUPT"] = "1"
        return Server(self.program, self.log, "--model", self.options.model, "--socket", socket,
                      "--ctx-tokens", str(CONTEXT), "--threads", str(self.options.threads), *more,
                      env=env)

    def taken(self, kind):
        """The states of a kind that were written since the last call, oldest first; and forget
        them all."""
        files = sorted(self.seen.glob("*.[gs]et"))
        found = [file.read_bytes() for file in files if file.suffix == "." + kind]
        for file in files:
            file.unlink()
        return found

    def logits(self):
        """Hashes of the logits since the last call."""
        file = self.seen / "logits"
        found = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return found


def text():
    return "\n".join(file.read_text(encoding="utf-8")
                     for file in sorted((ROOT / "docs").glob("*.md")))


def divergence(length, a, b):
    """The first token in which two runs differ, and by how much their logprobs do."""
    for place, (one, other) in enumerate(zip(a["tokens"], b["tokens"])):
        if one != other:
            return {"prompt_tokens": length, "token": place,
                    "logprob_gap": round(abs(a["logprobs"][place] - b["logprobs"][place]), 6)}
    return None


def answers_equal(a, b):
    return {"tokens_identical": a["tokens"] == b["tokens"],
            "logprobs_identical": a["logprobs"] == b["logprobs"],
            "logits_identical": a["logits"] == b["logits"] and len(a["logits"]) > 0}


def compare_chunks(saved, restored, n_tokens):
    """(chunks equal, chunks that differ) of two states' first tokens."""
    a, b = State(saved), State(restored)
    if b.n_tokens < n_tokens or a.n_tokens < n_tokens or a.rows.keys() != b.rows.keys():
        return 0, 1
    equal = sum(a.chunk(first, first + CHUNK) == b.chunk(first, first + CHUNK)
                for first in range(0, n_tokens, CHUNK))
    return equal, n_tokens // CHUNK - equal


def identical(bench, result):
    """Store, have the slot forget, fetch, compare."""
    daemon = bench.daemon("identical")
    daemon.start()
    server = bench.server(daemon.socket, watched=True)
    rows, diverged, same, equal, differ = [], [], True, 0, 0

    def ask(ids, tokens=TOKENS, **more):
        bench.logits()
        answer = server.complete(ids, tokens, **more)
        answer["logits"] = bench.logits()
        return answer

    try:
        ids = server.tokens(text()[:80_000])
        for place, length in enumerate(bench.options.length or LENGTHS):
            prompt = ids[700 * place:700 * place + length]  # none begins as another one does
            prefix = length - length % CHUNK
            alone = {"load": False, "store": False}
            server.forget()
            cold = ask(prompt, **alone)
            server.forget()
            ask(prompt[:prefix], 0, **alone)
            local = ask(prompt, **alone)
            server.forget()
            bench.taken("get")
            ask(prompt, load=False)
            server.forget()  # waits until that has been stored
            saved = bench.taken("get")
            fetched = ask(prompt, store=False, budget_ms=BUDGET_MS)
            restored = bench.taken("set")
            row = {"prompt_tokens": length, "hit_tokens": fetched["hit_tokens"],
                   "tokens": len(fetched["tokens"]), **answers_equal(fetched, local),
                   "cold": answers_equal(fetched, cold)}
            rows.append(row)
            good, bad = compare_chunks(saved[-1], restored[-1], prefix) if restored else (0, 1)
            equal, differ = equal + good, differ + bad
            same = same and (fetched["hit_tokens"] == local["local_tokens"] == prefix) and all(
                row[what] for what in row if what.endswith("_identical"))
            found = divergence(length, fetched, cold)
            diverged += [found] if found else []
        result["model_description"] = server.request("/health")[1]["model"]
    finally:
        server.kill()
        daemon.kill()
    result.update(runs=rows, divergences_from_cold=diverged, chunks_compared=equal + differ,
                  chunks_differ=differ)
    same = same and equal > 0 and differ == 0
    result["llamacpp_exact_identical"] = int(same)
    return same


def ttft(bench, result):
    """Seconds to one token, prefix from the daemon and computed, in turns."""
    daemon = bench.daemon("ttft", "dram.bytes=3GiB")
    daemon.start()
    server = bench.server(daemon.socket)
    rows = []
    try:
        ids = server.tokens(text()[:200_000])
        vocab = server.request("/health")[1]["vocab"]
        times = {length: ([], []) for length in TTFT_LENGTHS}
        for turn in range(bench.options.rounds):
            for length in TTFT_LENGTHS:
                prompt = [(t * 31 + turn * 97 + length) % (vocab - 300) + 200
                          for t in ids[:length]]
                server.forget()
                missed = server.complete(prompt, 1)
                server.forget()
                hit = server.complete(prompt, 1, store=False, budget_ms=BUDGET_MS)
                if missed["hit_tokens"] != 0 or hit["hit_tokens"] != length - 1:
                    raise RuntimeError(f"{length} tokens: {missed} {hit}")
                times[length][0].append(hit["seconds"])
                times[length][1].append(missed["seconds"])
        for length, (hits, misses) in times.items():
            middle = bench.options.rounds // 2
            rows.append({"prompt_tokens": length, "hit_tokens": length - 1,
                         "hit_s": round(sorted(hits)[middle], 4),
                         "recompute_s": round(sorted(misses)[middle], 4)})
    finally:
        server.kill()
        daemon.kill()
    result["ttft_median"] = {"rounds": bench.options.rounds, "rows": rows}
    return True


def stored_bytes(bench, daemon, profile):
    """(chunks, bytes in memory) of the namespace with a profile, as the command says."""
    done = subprocess.run([bench.command, "ls", "--output", "json", "--socket", daemon.socket],
                          capture_output=True, text=True, check=True)
    space, = (space for space in json.loads(done.stdout)["namespaces"]
              if space["profile"] == profile)
    return space["blocks"], space["dram_bytes"]


def profiles(bench, result):
    """The same prompt by several profiles."""
    daemon = bench.daemon("profiles", "dram.bytes=1GiB", "allow_uncalibrated=true")
    daemon.start()
    rows, right, good = [], None, True
    try:
        for profile in PROFILES:
            server = bench.server(daemon.socket, "--profile", profile, "--allow-uncalibrated")
            try:
                prompt = server.tokens(text()[:20_000])[:LENGTHS[0]]
                first = server.complete(prompt, TOKENS, load=False)
                right = right or first
                server.forget()
                answer = server.complete(prompt, TOKENS, store=False, budget_ms=BUDGET_MS)
            finally:
                server.kill()
            chunks, size = stored_bytes(bench, daemon, profile)
            same = [a == b for a, b in zip(answer["tokens"], right["tokens"])] + [False]
            rows.append({"profile": answer["profile"], "hit_tokens": answer["hit_tokens"],
                         "bytes_a_token": round(size / (chunks * CHUNK)),
                         "leading_tokens_the_same": same.index(False), "tokens": TOKENS,
                         "first_logprob_gap": round(abs(answer["logprobs"][0]
                                                        - right["logprobs"][0]), 6)})
            good = good and answer["profile"] == profile and answer["hit_tokens"] == 512
        good = good and rows[0]["first_logprob_gap"] == 0 and all(
            row["bytes_a_token"] < rows[0]["bytes_a_token"] for row in rows[1:])
    finally:
        daemon.kill()
    result["profiles"] = rows
    return good


def ask_failing(server, prompt, right, tries=1, **more):
    """Ask until something is hit, at most so often."""
    good = True
    for turn in range(tries):
        server.forget()
        answer = server.complete(prompt, TOKENS, **more)
        good = good and answer["tokens"] == right
        if answer["hit_tokens"]:
            break
        time.sleep(0.25)
    return {"asked": turn + 1, "hit_tokens": answer["hit_tokens"], "tier": answer["tier"],
            "seconds": round(answer["seconds"], 2), "right": good}


def lose_daemons(daemon, server, prompts, rights):
    """Requests one after the other while the daemon is killed and started again."""
    ends, done = [], threading.Event()

    def run():
        turn = 0
        while not done.is_set():
            which = turn % len(prompts)
            server.forget()
            ends.append(server.complete(prompts[which], TOKENS)["tokens"] == rights[which])
            turn += 1

    thread = threading.Thread(target=run)
    thread.start()
    killed = 0
    while killed < 6 or len(ends) < 12:
        time.sleep(1.5)
        daemon.kill()
        killed += 1
        time.sleep(0.5)
        daemon.start()
    done.set()
    thread.join()
    return {"daemons_killed": killed, "requests": len(ends), "right": all(ends)}


def failures(bench, result):
    """Requests end, and end right, whatever happens to the daemon."""
    daemon = bench.daemon("failures")
    daemon.start()
    server = bench.server(daemon.socket)
    ends = {}
    try:
        ids = server.tokens(text()[:40_000])
        prompts = [ids[300 * i:300 * i + LENGTHS[0]] for i in range(3)]
        rights = []
        for prompt in prompts:
            server.forget()
            rights.append(server.complete(prompt, TOKENS, load=False, store=False)["tokens"])
        prompt, right = prompts[0], rights[0]

        def ask(tries=1, **more):
            return ask_failing(server, prompt, right, tries, **more)

        server.forget()
        server.complete(prompt, 1)
        ends["stored, then hit"] = ask()
        time.sleep(WRITTEN_S)
        daemon.kill()
        ends["daemon killed"] = ask()
        daemon.start(failpoints="nvme.record_read=delay:2s")
        ends["daemon back on a drive that takes 2 s a read, budget 300 ms"] = ask(budget_ms=300)
        daemon.kill()
        daemon.start()
        ends["daemon back, with its store"] = ask(TRIES)
        time.sleep(WRITTEN_S)
        os.kill(daemon.process.pid, signal.SIGSTOP)
        ends["daemon stands still, budget 300 ms"] = ask(budget_ms=300)
        os.kill(daemon.process.pid, signal.SIGCONT)
        ends["daemon goes on"] = ask(TRIES)
        daemon.kill()
        daemon.flip_bytes()
        daemon.start()
        ends["a flipped byte in each 64 KiB of the store"] = ask()
        ends["stored anew"] = ask(TRIES)
        ends["kill -9 under way"] = lose_daemons(daemon, server, prompts, rights)
        server_code = server.stop()
        ends["server ended by SIGTERM"] = {"exit_code": server_code, "right": server_code == 0}
        daemon.kill()
        ends["a store of 64 MiB, full"] = full_store(bench, prompts, rights)
    finally:
        server.kill()
        daemon.kill()
    result["failures"] = ends
    result["every_request_ended_right"] = all(end["right"] for end in ends.values())
    return result["every_request_ended_right"]


def full_store(bench, prompts, rights):
    """More prompts than the memory tier holds, no drive."""
    daemon = bench.daemon("full", "dram.bytes=64MiB", "dram.area_bytes=1MiB",
                          "dram.piece_bytes=64MiB")
    daemon.start()
    server = bench.server(daemon.socket)
    good, filled = True, 0
    try:
        for turn in range(12):
            prompt = [(t * 7 + 1000 * turn) % 30000 + 200 for t in prompts[1]]
            server.forget()
            server.complete(prompt, 1)
            filled += len(prompt)
            if turn % 4 == 3:
                server.forget()
                answer = server.complete(prompts[0], TOKENS)
                good = good and answer["tokens"] == rights[0]
        counts = server.request("/health")[1]
    finally:
        server.kill()
        daemon.kill()
    return {"tokens_stored": filled, "stored_chunks": counts["stored_chunks"],
            "refused_chunks": counts["refused_chunks"], "right": good}


PARTS = {"identical": identical, "ttft": ttft, "profiles": profiles, "failures": failures}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", required=True, metavar="DIR")
    parser.add_argument("--model", required=True, metavar="FILE.gguf")
    parser.add_argument("--source", default="", metavar="TEXT", help="where the model is from")
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--length", action="append", type=int, metavar="TOKENS",
                        help="of a prompt of the first part; several times for several")
    parser.add_argument("--rounds", type=int, default=3, help="of ttft")
    parser.add_argument("--corrupt", action="store_true")
    options = parser.parse_args()
    model = Path(options.model)
    result = {"llama.cpp": "0.5.0-dev, out of llama-cpp-python 0.3.36", "model": model.name,
              "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
              "model_source": options.source, "profile": "exact", "kv_type": "f16",
              "chunk_tokens": CHUNK, "machine": platform.machine(), "cpus": os.cpu_count(),
              "threads": options.threads}
    good = True
    with tempfile.TemporaryDirectory(prefix="kvferry-llama-") as folder:
        bench = Bench(options, folder)
        for part in options.part or PARTS:
            good = PARTS[part](bench, result) and good
    result["load_average"] = round(os.getloadavg()[0], 1)
    said = json.dumps(result, indent=2)
    print(said)
    if options.out:
        Path(options.out).write_text(said + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
