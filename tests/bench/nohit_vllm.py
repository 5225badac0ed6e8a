#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the connector costs a real vLLM where nothing hits: one of two engines that take turns.

usage: nohit_vllm.py --model DIR [--socket PATH]       (of a daemon; without: no connector)

Run by tests/bench/run engines, once with a daemon's socket and once without, each with a Python
that has vllm. A line on standard input, seconds: prompts of random tokens, each new, one at a time
and one token of an answer each, until that much time is over. The answer, a line: seconds, prompts,
seconds that the engine's thread was in the connector's methods.
"""
import argparse
import os
import random
import subprocess
import sys
import time

TOKENS = 1024  # of a prompt
CONTEXT = 2048
VOCABULARY = range(300, 8000)
WARM_S = 1.0
METHODS = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
           "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load",
           "save_kv_layer", "wait_for_save", "get_finished", "get_block_ids_with_load_errors",
           "get_kv_connector_stats", "build_connector_worker_meta", "clear_connector_metadata",
           "update_connector_output", "take_events", "request_finished_all_groups")


# --- the process of an engine --------------------------------------------------------------------

class Stopwatch:
    """Time inside of an object's methods; one that calls another is counted once."""

    def __init__(self):
        self.seconds, self.is_inside = 0.0, False

    def watch(self, kind):
        for name in METHODS:
            setattr(kind, name, self.timed(getattr(kind, name)))

    def timed(self, method):
        def run(*arguments, **named):
            if self.is_inside:
                return method(*arguments, **named)
            self.is_inside, began = True, time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began
                self.is_inside = False
        return run


def make_engine(model, socket, stopwatch):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its methods are called in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM
    from vllm.config import KVTransferConfig
    transfer = None
    if socket is not None:
        from kvferry.vllm import KvferryConnector
        stopwatch.watch(KvferryConnector)
        transfer = KVTransferConfig(
            kv_connector="KvferryConnector", kv_connector_module_path="kvferry.vllm",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": socket})
    return LLM(model=model, dtype="bfloat16", enforce_eager=True, max_model_len=CONTEXT,
               max_num_seqs=4, disable_log_stats=True, skip_tokenizer_init=True,
               hf_overrides={"max_position_embeddings": CONTEXT}, kv_transfer_config=transfer)


class Loop:
    def __init__(self, engine):
        from vllm import SamplingParams
        self.engine, self.random = engine, random.Random(os.getpid())
        self.asked = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def run(self, seconds):
        """Prompts for so long: seconds and prompts."""
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            tokens = self.random.choices(VOCABULARY, k=TOKENS)
            out, = self.engine.generate({"prompt_token_ids": tokens}, self.asked, use_tqdm=False)
            if out.num_cached_tokens:
                raise RuntimeError(f"a new prompt has {out.num_cached_tokens} tokens cached")
            n += 1
        return time.perf_counter() - began, n


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--socket", metavar="PATH")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    stopwatch = Stopwatch()
    loop = Loop(make_engine(options.model, options.socket, stopwatch))
    loop.run(WARM_S)
    from vllm import __version__
    print("vllm", __version__, file=answers, flush=True)
    for line in sys.stdin:
        before = stopwatch.seconds
        seconds, n = loop.run(float(line))
        print(seconds, n, stopwatch.seconds - before, file=answers, flush=True)
    return 0


# --- the bench's side ----------------------------------------------------------------------------

class Failure(Exception):
    """An engine has failed; the text says why."""


class Engine:
    """Such a process."""

    def __init__(self, children, python, package, model, socket, log_path):
        self.children, self.log_path = children, log_path
        command = [python, "-B", os.path.abspath(__file__), "--model", model]
        with open(log_path, "w", encoding="utf-8") as log:
            self.process = children.start(
                command + (["--socket", socket] if socket is not None else []),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": package})
        self.version = self.read().strip()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            with open(self.log_path, encoding="utf-8", errors="replace") as log:
                raise Failure(f"vLLM failed; its log:\n{log.read()[-4000:]}")
        return line

    def run(self, seconds):
        """Seconds a prompt, and the percentage of them that the connector's methods took."""
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        took, n, inside = (float(word) for word in self.read().split())
        return took / n, 100 * inside / took

    def close(self):
        self.process.stdin.close()
        self.children.wait(self.process)


def measure(children, python, package, model, socket, folder, samples, seconds, pairs):
    """Pairs of the two engines; who is first alternates."""
    engines = []
    try:
        for name, of in (("with", socket), ("without", None)):
            engines.append(Engine(children, python, package, model, of,
                                  os.path.join(folder, f"vllm-{name}.log")))
        samples.software["vllm"] = engines[0].version
        for pair in range(pairs):
            order = engines if pair % 2 == 0 else engines[::-1]
            took = {engine: engine.run(seconds) for engine in order}
            samples.add_pair("nohit_cost_vllm", took[engines[0]][0], took[engines[1]][0])
            samples.add_value("nohit_calls_vllm", took[engines[0]][1])
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    sys.exit(main())
