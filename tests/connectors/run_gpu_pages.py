#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model's KV in vLLM-shaped pages on a GPU, out and back through the connector.

usage: run_gpu_pages.py KVFERRYD PACKAGE_FOLDER [--tokens N] [--layers N] [--device cuda|cpu]
                        [--out FILE]

The whole connector runs, scheduler's side and worker's, with the stand-in of vLLM (standin.py): the
model of transformers computes, its KV is laid into pages of 16 tokens as vLLM has them, and the
connector stores them while the model goes on. Then the pages are wiped, fetched into other pages
while the model computes something else, and generation goes on from there. Weights are random, in
the shape of Llama-3.1-8B: what is compared is bytes and tokens, not what the model has to say.

  identical   pages equal those that went out; tokens and logits those of a run that never left.
              Both runs take the plain attention and cuBLAS with a workspace of its own: the fast
              ways may sum in another order each time, as a third run that never left would show
  ttft        time to the first token: prefix fetched, computed, and from a pinned copy of raw KV
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, sys.argv[2] if len(sys.argv) > 2 else HERE)

import standin  # noqa: E402

TAIL, TOKENS, ROUNDS, READY_S = 20, 24, 5, 120


def install():
    tested = Path(sys.argv[2]) / "kvferry/tested_versions.json"
    standin.install(json.loads(tested.read_text(encoding="utf-8"))["vllm"][-1])


class Model:
    """A model of transformers, and its KV in pages."""

    def __init__(self, layers, device):
        import torch
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        self.torch, self.cache_type = torch, DynamicCache
        torch.manual_seed(1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
                             num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                             vocab_size=32000, max_position_embeddings=16384, rope_theta=500000.0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            self.model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(before)
        self.device, self.layers, self.heads, self.dim = device, layers, 8, 128

    def prompt(self, n, seed):
        generator = self.torch.Generator().manual_seed(seed)
        return self.torch.randint(5, 32000, (1, n), generator=generator).to(self.device)

    def run(self, ids, cache):
        """(logits of the last token, cache with these tokens)"""
        with self.torch.no_grad():
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1], out.past_key_values

    def go_on(self, ids, cache, n=TOKENS):
        """n greedy tokens from a cache and the tokens behind it: (tokens, logits)"""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        tokens, logits = [], []
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(n):
                last, cache = self.run(ids, cache)
                logits.append(last.clone())
                ids = last.argmax(-1, keepdim=True)
                tokens.append(ids)
        return self.torch.cat(tokens, 1), self.torch.cat(logits)

    def kv(self, cache, layer):
        """K and V of a layer, (head, token, element)"""
        if hasattr(cache, "layers"):
            return cache.layers[layer].keys[0], cache.layers[layer].values[0]
        return cache.key_cache[layer][0], cache.value_cache[layer][0]

    def to_pages(self, cache, arrays, table, n):
        """Lay n tokens into pages, logically (page, head, token, K and V)."""
        block = arrays[0].shape[2]
        ids = self.torch.tensor(table[:n // block], device=self.device)
        for layer, pages in enumerate(arrays):
            for part, at in zip(self.kv(cache, layer), (0, self.dim)):
                cut = part[:, :n].reshape(self.heads, n // block, block, self.dim).transpose(0, 1)
                pages[ids, :, :, at:at + self.dim] = cut

    def from_pages(self, arrays, table, n):
        """A cache of the n tokens in these pages."""
        block = arrays[0].shape[2]
        ids = self.torch.tensor(table[:n // block], device=self.device)
        cache = self.cache_type()
        for layer, pages in enumerate(arrays):
            both = pages[ids].transpose(0, 1).reshape(self.heads, n, 2 * self.dim)
            cache.update(both[None, :, :, :self.dim].contiguous(),
                         both[None, :, :, self.dim:].contiguous(), layer)
        return cache

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def make_engine(model, socket, tokens, profile):
    class Engine(standin.Engine):
        HEADS, DIM, LAYERS = model.heads, model.dim, model.layers
        PAGES = 2 * (tokens // 16) + 16
        DEVICE = model.device

        def make_array(self):
            return model.torch.zeros((self.PAGES, self.HEADS, self.BLOCK, 2 * self.DIM),
                                     dtype=model.torch.bfloat16, device=model.device)

    return Engine({"socket": socket, "weights_digest": "44" * 32, "profile": profile,
                   "allow_uncalibrated": True, "staging_bytes": 640 << 20,
                   "lookup_budget_ms": 10_000, "load_budget_ms": 10_000})


def start(daemon, folder):
    log = Path(folder) / "log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [daemon, "--dir", folder, "--set", "dram.bytes=6GiB", "--set", "staging.total=3GiB",
             "--set", "allow_uncalibrated=true"], stdin=subprocess.DEVNULL, stdout=file,
            stderr=file)
    end = time.monotonic() + READY_S
    while b"admin socket " not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(log.read_text(errors="replace"))
        time.sleep(0.05)
    return process


def fetch(engine, request):
    """Ask, allocate, load, as vLLM would: hit tokens."""
    tokens, _ = engine.ask(request)
    engine.allocate(request, tokens)
    end = time.monotonic() + READY_S
    engine.done.discard(request.request_id)
    while tokens and request.request_id not in engine.done:
        engine.step({})
        if time.monotonic() > end:
            raise RuntimeError("a load does not end")
    return tokens


def check(model, engine, n, seed, result):
    """One prompt goes out and comes back while the model computes."""
    ids = model.prompt(n + TAIL, seed)
    request = standin.Request(f"out {seed}", ids[0].tolist(), engine.BLOCK)
    engine.ask(request)
    engine.allocate(request)
    _, cache = model.run(ids[:, :n], model.cache_type())
    arrays, table = engine.arrays[0], list(engine.table[request.request_id])
    model.to_pages(cache, arrays, table, n)
    stayed, again = (model.from_pages(arrays, table, n) for _ in range(2))
    sent = [pages[table[:n // 16]].clone() for pages in arrays]
    model.wait()
    begin = time.monotonic()
    engine.step({request: (0, n)})
    for pages in arrays:
        pages[table] = 0  # queued behind the store: pages are free at once
    expected = model.go_on(ids[:, n:], stayed)
    repeated = model.go_on(ids[:, n:], again)
    engine.settle()
    out_s = time.monotonic() - begin
    engine.finish(request)
    back = standin.Request(f"back {seed}", ids[0].tolist(), engine.BLOCK)
    model.go_on(model.prompt(64, seed + 1), model.cache_type(), 2)  # the model is busy meanwhile
    hit = fetch(engine, back)
    table = engine.table[back.request_id]
    same = all(model.torch.equal(a, pages[table[:n // 16]]) for a, pages in zip(sent, arrays))
    got = model.go_on(ids[:, n:], model.from_pages(arrays, table, n))
    row = {"hit_tokens": hit, "pages_identical": same,
           "tokens_identical": bool(model.torch.equal(expected[0], got[0])),
           "logits_identical": bool(model.torch.equal(expected[1], got[1])),
           "logits_of_two_that_stayed_identical": bool(model.torch.equal(expected[1],
                                                                         repeated[1])),
           "stored_while_generating_s": round(out_s, 4)}
    engine.finish(back)
    result.append(row)
    return hit == n and row["pages_identical"] and row["tokens_identical"]


def measure(model, engine, n, seed):
    """Medians of seconds to the first token, and the rate of loads, of a prompt that is stored."""
    torch, ids = model.torch, model.prompt(n + TAIL, seed)
    kv_bytes = n * model.layers * model.heads * model.dim * 4
    raw = torch.zeros(kv_bytes, dtype=torch.uint8, pin_memory=model.device == "cuda")
    room = torch.zeros(kv_bytes, dtype=torch.uint8, device=model.device)
    times = {"fetched": [], "load": [], "computed": [], "pinned_raw": []}
    for turn in range(ROUNDS):
        request = standin.Request(f"turn {seed} {turn}", ids[0].tolist(), engine.BLOCK)
        model.wait()
        begin = time.monotonic()
        fetch(engine, request)
        loaded = time.monotonic()
        cache = model.from_pages(engine.arrays[0], engine.table[request.request_id], n)
        model.run(ids[:, n:], cache)[0].argmax().item()
        end = time.monotonic()
        times["load"].append(loaded - begin)
        times["fetched"].append(end - begin)
        begin = time.monotonic()
        room.copy_(raw, non_blocking=True)
        cache = model.from_pages(engine.arrays[0], engine.table[request.request_id], n)
        model.run(ids[:, n:], cache)[0].argmax().item()
        times["pinned_raw"].append(time.monotonic() - begin)
        engine.finish(request)
        begin = time.monotonic()
        model.run(ids, model.cache_type())[0].argmax().item()
        times["computed"].append(time.monotonic() - begin)
    median = {name: round(statistics.median(values), 5) for name, values in times.items()}
    return {"ttft_s": median, "kv_mib": round(kv_bytes / 2**20, 1),
            "load_gb_s": round(kv_bytes / median["load"] / 1e9, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("daemon", metavar="KVFERRYD")
    parser.add_argument("package", metavar="PACKAGE_FOLDER")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args()
    install()
    import kvferry
    model = Model(options.layers, options.device)
    result = {"kvferry": kvferry.__version__, "torch": model.torch.__version__,
              "device": (model.torch.cuda.get_device_name() if options.device == "cuda" else "cpu"),
              "shape": f"Llama-3.1-8B, {options.layers} layers, random weights",
              "prefix_tokens": options.tokens, "profiles": {}}
    good = True
    with tempfile.TemporaryDirectory(prefix="kvferry-pages-") as folder:
        daemon = start(options.daemon, folder)
        try:
            for profile in ("exact", "balanced") if options.device == "cuda" else ("exact",):
                engine = make_engine(model, str(Path(folder) / "kvferryd.sock"), options.tokens,
                                     profile)
                check(model, engine, options.tokens, 6, [])  # drivers and kernels get going
                rows = []
                same = [check(model, engine, options.tokens, seed, rows) for seed in (7, 8)]
                counters = vars(engine.workers[0]._worker.counters)
                row = {"runs": rows, "counters": dict(counters)}
                row.update(measure(model, engine, options.tokens, 8))
                result["profiles"][profile] = row
                if profile == "exact":
                    good = all(same)
                    result["hf_pages_exact_identical"] = int(good)
                engine.close()
        finally:
            daemon.kill()
            daemon.wait()
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
