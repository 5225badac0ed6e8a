# SPDX-License-Identifier: Apache-2.0
"""The bench replay: kvferry replay on a trace of prompts, by profile at equal bytes, and by what
the drive admits under write budgets. Nothing here depends on the machine."""
import json
import os
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PART = os.path.join(ROOT, "tests", "data", "trace", "mooncake-conversation-600.jsonl")

# Llama-3.1-8B
SHAPE = ("--layers", "32", "--d-model", "4096", "--heads", "8", "--query-heads", "32", "--dim",
         "128", "--ffn", "14336")
PROFILES = ("raw", "balanced", "dense", "max")
RAW_BLOCKS = 10000
DRAM_BLOCKS = 2500
NVME_BLOCKS = 40000
SEGMENT_BYTES = 256 << 20
RULES = {"auto": "auto", "all": "all", "second": "second-sight"}
BUDGETS = (0.1, 0.2, 0.4)
TIMEOUT_S = 600


class Failure(Exception):
    """The command cannot replay; the text says why."""


def command(kvferry, trace, *arguments):
    done = subprocess.run([kvferry, "replay", trace, *arguments, "-o", "json"],
                          capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise Failure(done.stderr.strip())
    return json.loads(done.stdout)


def seen_before(trace):
    """Hit ratio of a store that forgets nothing: leading blocks that came before, of all."""
    seen = set()
    blocks = hits = 0
    with open(trace, encoding="utf-8") as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"]
            run = 0
            while run < len(ids) and ids[run] in seen:
                run += 1
            seen.update(ids)
            blocks += len(ids)
            hits += run
    return hits / blocks


def hit_ratio(row):
    return (row["hits_dram"] + row["hits_nvme"]) / row["blocks"]


def record_bytes(kvferry, profile):
    """Of a block of 512 tokens."""
    report = command(kvferry, PART, *SHAPE, "--profiles", profile, "--dram", "1TiB")
    return report["rows"][0]["record_bytes"]


def measure_profiles(kvferry, trace, samples):
    limit = seen_before(trace)
    arena = RAW_BLOCKS * record_bytes(kvferry, "raw")
    report = command(kvferry, trace, *SHAPE, "--profiles", ",".join(PROFILES), "--dram",
                     str(arena))
    for row in report["rows"]:
        samples.add_pair(f"replay_{row['profile']}_hit", hit_ratio(row), limit)


def measure_admission(kvferry, trace, samples):
    size = record_bytes(kvferry, "balanced")
    store = (*SHAPE, "--profiles", "balanced", "--dram", str(DRAM_BLOCKS * size), "--nvme",
             str(-(-NVME_BLOCKS // (SEGMENT_BYTES // size)) * SEGMENT_BYTES))
    free = command(kvferry, trace, *store)
    limit = hit_ratio(free["rows"][0])
    samples.add_value("replay_free_writes", free["rows"][0]["writes"] / free["blocks"])
    for budget in BUDGETS:
        rate = int(budget * free["blocks"] / free["seconds"] * size)
        for name, rule in RULES.items():
            row = command(kvferry, trace, *store, "--write-budget", str(rate), "--admission",
                          rule)["rows"][0]
            samples.add_pair(f"replay_{name}_{budget:g}", hit_ratio(row), limit)
            samples.add_value(f"replay_{name}_{budget:g}_writes", row["writes"] / row["blocks"])


def measure(kvferry, trace, samples):
    measure_profiles(kvferry, trace, samples)
    measure_admission(kvferry, trace, samples)
