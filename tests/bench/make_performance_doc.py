#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make docs/performance.md, and its plots, of the results in tests/bench/results.

    make_performance_doc.py [--check]

Each file there has the JSON lines that tests/bench/run printed, unchanged. Of each bench the newest
line of each machine is shown, of gpu the newest of each program, of accuracy the newest results of
each model. With --check nothing is written: exit code 1 says that the page or a plot is stale.
"""
import glob
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import figures  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "accuracy"))
import page as accuracy  # noqa: E402

RESULTS = os.path.join(ROOT, "tests", "bench", "results")
DOCS = os.path.join(ROOT, "docs")
PAGE = "performance.md"

HEAD = """\
<!-- made by tests/bench/make_performance_doc.py from tests/bench/results: do not edit -->

# Performance

Every figure stands beside what limits it: the same bytes, on the same machine, in the same run.
`tests/bench/run BENCH` measures them; it needs a build (`make build`), and for some figures
redis-server and libhiredis-dev, or fio.

- **ours** and **limit** are medians over at least nine pairs. The two sides of a pair are measured
  one right after the other; who is first alternates.
- **ratio** is the median over the pairs of ours divided by the limit, with a bootstrap 95 %
  interval. Figures without a limit have the interval of the value.
- **bar** is what we hold the ratio to (the value, where there is no limit). A figure whose interval
  reaches further than 10 % from the median is inconclusive, whatever the median says.

How the two sides are kept alike:

- local: blocks of 1 MiB in random order, the working set 8 times as large as the last-level cache.
  The reader sums 64-bit words and compares the sum on both sides. Every put has a new key and
  pushes an old block out of a full arena. For round trips, client and daemon have a CPU each, and
  so have the two ends of the limit; before a round trip from sleep, 200 us pass.
- nvme: one preallocated, fully written file, O_DIRECT, blocks of 1 MiB. Reads and appends go
  through the drive tier (records, checksums, footers, syncs); fio moves bare bytes. CPU is that of
  all threads; checksums are shown apart. CPU changes from one start to the next, so there are many
  short pairs, each with a fio of its own, whose start is not counted.
- codec: chunks of 256 tokens, 8 KV heads, bf16, out of memory rather than a cache, one core.
  Encoding includes the checksum. memcpy moves the same bf16 bytes.
- x: two layers take turns. Ours widens the layer's bf16 weights, reads its factors, and writes K
  and V, rotated, to bf16 pages; the limit is the products alone, from fp32 matrices that are there.
  Both count the products' operations by CPU time, on one thread; many short pairs.
- gpu: Llama-3.1-8B's KV (32 layers, 8 heads of 128, bf16) in chunks of 256 tokens, bursts of 256
  MiB, profile balanced; kernels are judged by bytes read + written, beside device-to-device copies
  of as many; speeds over the link are those of the bf16 values. What is stolen is the difference of
  a window of 100 ms of an engine-like loop with and without KV moving beside it, by GiB of bf16 KV:
  encode and decode run on the loop's stream. Its bar is for the upper end of the interval; the
  control is the same difference with nothing moved.
  puts_ and gets_ are the whole way of `kvf_gpu_put` and `kvf_gpu_get`, with daemon, staging and
  arena, by this process (path ENGINE) or by a worker of the daemon (path AGENT), beside the same
  loops in windows of 160 ms; the rows of a loop share the window without KV of their round.
- remote: two daemons on one machine, TCP on loopback. One has blocks of 1 MiB in memory, a client
  of the other one gets them, 64 in flight: over the wire in pieces of 256 KiB, summed, held as
  blocks of the second daemon. The first limit is ucx_perftest, which moves active messages of
  256 KiB, 32 under way, between two processes that spin: one piece of memory, again and again, at
  which nobody looks. The second is plain TCP between two processes that send from a memory of
  256 MiB and copy into another one, summed, and do nothing else. On two cores either has both for
  itself, where ours share them with the client and what the daemons do besides. Measured under two
  congestion controls, since bbr sets a timer for what it sends, which cubic does not.
- hostile: one client puts and gets blocks of 64 KiB, one request each 0.4 ms, timed from when it
  was due, every byte compared. Its neighbour has two threads, which compute for the first 1.8 of
  each 5.3 ms (in no step with the kernel's ticks), and is either a well-behaved client or one that,
  in turn, scribbles over its rings, keys and staging while it puts, submits wild entries, opens
  namespaces without end and sends descriptors, punches holes into 96 MiB before MAPPED, fills a
  blocking eventfd, floods lookups, and connects in storms. The well-behaved one looks for its
  answers without sleeping, and leaves out as many phases as it takes to use no more of the CPUs
  (with two of them the slowest requests are those that wait for one). The two are processes of
  their own, since the daemon lets a process that broke the protocol attach later; the hostile one
  waits 20 ms for the answer to an attach and then begins its next attack. Slices of half a second
  alternate, and all slices of a pair are counted together.
- engines: at one boundary for all stores. Put: a block begins in memory of the client's process,
  and the store has answered for it. Get: it lies in memory of another client's process and has been
  read there once, by the same code (kvferry's blocks, too, are copied out of the daemon's memory
  first). All on this machine: kvferryd and LMCache's server by shared memory, Valkey (or Redis, its
  ancestor, where there is no Valkey) by a Unix socket and a client in C that sends from and
  receives into the buffer, Mooncake store by TCP with registered buffers, its memory owned by a
  process of its own; LMCache's clients copy a contiguous block, where an engine would gather pages.
  Random bytes, so nobody gains by packing; the working set is 8 times as large as the last-level
  cache, or what 60 % of the memory hold 12 times, if that is less. With 8 blocks in flight: in 8
  requests (kvferry, Valkey), in one call (Mooncake), in one request of 8 chunks (LMCache). Each put
  has a new key; between puts the blocks are removed, which does not count, nor does filling before
  gets. CPU is that of the client and of all of the store's processes. Each side of a pair has 32
  blocks or more: of slow stores p99 is nearly the slowest one. The limit `copy` is memcpy in one
  process, then the same reader.
  nohit: prompts that are all new, the products of one layer at 256 tokens, by OpenBLAS on one core;
  with kvferry each is looked up before, and its K and V are put after (exact), which the daemon
  stores meanwhile, pushing old ones out. nohit_cost_vllm: a real vLLM on the CPU, with the
  connector and without in processes of their own that take turns, prompts of 1,024 random tokens,
  one at a time; the smaller a model, the more its KV beside its computing.
- replay: `conversation_trace.jsonl` of Mooncake (FAST'25: 12,031 prompts in an hour, 288,500 blocks
  of 512 tokens), through the daemon's own index, admission and eviction by `kvferry replay`, which
  says the same on every machine and each time. Sizes are those of Llama-3.1-8B's blocks; a hit
  counts inside the unbroken run of leading blocks, over all blocks looked up. A store that forgets
  nothing is the most that any policy can hit.
- accuracy: of Gaussian vectors, the mean cosine with what comes back. Of models, windows of text,
  spread over all of it, run once with K and V as an engine caches them (bf16, K after RoPE) and
  once with K and V of all full chunks of 256 tokens encoded and decoded by the library as they are
  produced, layer upon layer. Ours is the mean difference of the NLL of a token, with a bootstrap
  95 % interval over windows; an interval on both sides of the bar is inconclusive. Every token
  attends to decoded K and V, its own chunk's too, where an engine still has the newest ones as they
  were. Comparators are what others have published, in Python, not in the library. Models this small
  are the hard case, and they are not evidence for your model.
"""

TITLES = {
    "local": "Memory, one machine",
    "nvme": "Drive",
    "codec": "Codecs, one core",
    "x": "K and V rebuilt from X, one core",
    "gpu": "GPU",
    "remote": "Between nodes",
    "hostile": "Beside a hostile client",
    "engines": "Beside other stores, one machine",
    "replay": "What a trace hits",
    "accuracy": "What models lose",
}


class Unusable(Exception):
    """A result that has no place on the page."""


def load(folder):
    """Reports, checked, from every line of every file."""
    reports = []
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                where = f"{os.path.relpath(path, ROOT)}:{number}"
                try:
                    report = json.loads(line)
                    if report["bench"] not in TITLES or report["quick"]:
                        raise Unusable(f"{where}: not a result to show (quick, or unknown bench)")
                    list(figures.rows(report))
                except (ValueError, KeyError, TypeError) as error:
                    raise Unusable(f"{where}: not a line of tests/bench/run: {error!r}") from error
                reports.append(report)
    return reports


def machine_key(report):
    machine = report["machine"]
    return tuple(str(machine.get(name)) for name in ("cpu", "cpu_model", "cores", "drive", "fs",
                                                    "gpu", "tcp_congestion"))


def is_of_other_program(result):
    return re.fullmatch(figures.ONLY_SOME_RAN, result.get("skipped", "")) is not None


def newest(reports):
    """The newest report of each bench and machine, in the order of TITLES. Where it is of some
    programs only, those that have what is missing follow it, newest first."""
    chosen = {}
    for report in sorted(reports, key=lambda report: report["date"], reverse=True):
        same = chosen.setdefault((report["bench"], machine_key(report)), [])
        shown = {result["name"] for older in same for result in older["results"]}
        results = [result for result in report["results"]
                   if result["name"] not in shown and not is_of_other_program(result)]
        if results and (not same or any(is_of_other_program(result)
                                        for result in same[0]["all"])):
            same.append({**report, "results": results, "all": report["results"]})
    order = list(TITLES)
    return [report for key in sorted(chosen, key=lambda key: (order.index(key[0]), key[1]))
            for report in chosen[key]]


def machine_text(report):
    machine = report["machine"]
    virtual = ", virtual" if machine["virtual"] else ""
    parts = [f"{machine['cpu']} ({machine['cpu_model']}{virtual})", f"{machine['cores']} cores",
             f"last-level cache {machine['llc_bytes'] >> 20} MiB",
             f"memory {machine['memory'] / (1 << 30):.0f} GiB", f"Linux {machine['kernel']}"]
    if "gpu" in machine:
        parts.append(f"{machine['gpu']} by {machine['gpu_link']}, driver {machine['gpu_driver']}")
    if "tcp_congestion" in machine:
        parts.append(f"TCP with {machine['tcp_congestion']}")
    if "drive" in machine:
        parts.append(f"drive {machine['drive']} with {machine['fs']}")
    # accuracy has no sides, and those of the GPU's programs differ
    has_sides = report["bench"] not in ("accuracy", "gpu", "replay")
    sides = f", {report['seconds']:g} s a side" if has_sides else ""
    parts += report.get("software", {}).values()
    return (f"{', '.join(parts)}. {report['date'][:10]}, commit {report['commit']}"
            f"{sides}; others took {machine['cpu_of_others']:.1%} of the "
            f"CPUs meanwhile, the host {machine['cpu_of_host']:.1%}.")


def escape(text):
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def figure_lines(results):
    lines = ["| figure | ours | limit | ratio | 95 % | bar | | |",
             "|---|---:|---:|---:|---:|---:|---|---|"]
    limits = {result["name"]: result.get("limit_name") for result in results}
    for name, value, limit, ratio, interval, bar, verdict, note in figures.rows(
            {"results": results}):
        notes = "; ".join(part for part in (note, limits[name] and f"limit: {limits[name]}")
                          if part)
        cells = [f"`{name}`", value, limit, ratio, interval, bar, verdict, notes]
        lines.append("| " + " | ".join(escape(cell) for cell in cells) + " |")
    return [*lines, ""]


def report_text(report):
    return "\n".join([machine_text(report), "", *figure_lines(report["results"])])


def make_page(reports):
    parts = [HEAD]
    title = None
    of_models = [report for report in reports if report["bench"] == "accuracy"]
    for report in newest([report for report in reports if report["bench"] != "accuracy"]):
        if report["bench"] != title:
            title = report["bench"]
            parts.append(f"## {TITLES[title]}\n")
        parts.append(report_text(report))
    if of_models:
        parts.append(f"## {TITLES['accuracy']}\n")
        parts.append(accuracy.text(of_models, machine_text, figure_lines))
    return "\n".join(parts)


def make_files(reports):
    """Text by the name of the file in docs."""
    of_models = [report for report in reports if report["bench"] == "accuracy"]
    return {PAGE: make_page(reports), **accuracy.plots(of_models)}


def read(name):
    """A file of docs, or None."""
    try:
        with open(os.path.join(DOCS, name), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def main(arguments):
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        files = make_files(load(RESULTS))
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    if arguments == []:
        for name, text in files.items():
            with open(os.path.join(DOCS, name), "w", encoding="utf-8") as file:
                file.write(text)
        return 0
    stale = [name for name, text in files.items() if read(name) != text]
    for name in stale:
        print(f"docs/{name} is stale: run tests/bench/make_performance_doc.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
