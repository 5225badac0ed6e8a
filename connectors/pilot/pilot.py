# SPDX-License-Identifier: Apache-2.0
"""Measure what offloading KV is worth on this node, and write the evidence down.

    run.sh --model MODEL --host-bytes 64GiB --out FOLDER [--arms NAME...]
           [-- ARGUMENTS OF vllm serve]

Arms, each a vLLM server of its own with the same arguments and the same bytes of host memory:
    none              vLLM's prefix cache in GPU memory only
    native            vLLM's OffloadingConnector
    lmcache           LMCacheMPConnector and `lmcache server`
    kvferry-exact     kvferryd, without loss
    kvferry-balanced  kvferryd, K and V at 4 bits: its speed; quality is not measured here

Each repeat runs all arms, in an order shuffled anew. An arm gets --documents prompts of
--document-tokens random tokens once (cold), then all of them --rounds times in shuffled order, each
with another question behind it (warm): --concurrency requests at a time, --answer-tokens each. Give
documents that together do not fit into the GPU's KV cache and do fit into --host-bytes.

FOLDER gets pilot.json (all that was measured, the machine, the plan), pilot.md (one page) and a log
of every process. An arm that fails is reported there and the others go on; exit code 1 then.
"""
import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request

import load
import page
import processes

ARMS = ("none", "native", "lmcache", "kvferry-exact", "kvferry-balanced")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SOCKET_PATH_MAX = 107
HOST_BYTES_MIN = 256 << 20
STAGING_SHARE = 16  # of kvferry's host bytes, one in so many is staging, as others need none
STAGING_CLIENTS = 16  # workers of up to 8 GPUs, and schedulers


class Wrong(Exception):
    """The pilot cannot run; the text says what is wrong, where, and the cure."""


# --- what is asked for ---------------------------------------------------------------------------

def size(text):
    found = re.fullmatch(r"(\d+)(KiB|MiB|GiB|TiB)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size as 64GiB")
    return int(found.group(1)) * UNITS[found.group(2)]


def count(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def parse(arguments):
    ours, of_vllm = arguments, []
    if "--" in arguments:
        ours, of_vllm = arguments[:arguments.index("--")], arguments[arguments.index("--") + 1:]
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="run.sh --model MODEL --host-bytes SIZE --out FOLDER "
                                           "[options] [-- ARGUMENTS OF vllm serve]")
    parser.add_argument("--model", required=True, help="a name or folder, as for vllm serve")
    parser.add_argument("--host-bytes", type=size, required=True, metavar="SIZE",
                        help="host memory of each arm, as 64GiB")
    parser.add_argument("--out", required=True, metavar="FOLDER",
                        help="must not exist, or be empty")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME",
                        help="default: all")
    parser.add_argument("--repeats", type=count, default=5, metavar="N")
    parser.add_argument("--documents", type=count, default=40, metavar="N")
    parser.add_argument("--document-tokens", type=count, default=8192, metavar="N")
    parser.add_argument("--rounds", type=count, default=2, metavar="N")
    parser.add_argument("--question-tokens", type=count, default=64, metavar="N")
    parser.add_argument("--answer-tokens", type=count, default=32, metavar="N")
    parser.add_argument("--concurrency", type=count, default=4, metavar="N")
    parser.add_argument("--vocabulary", type=count, default=30000, metavar="N",
                        help="prompts are of token numbers 1000 up to this")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--start-s", type=count, default=1200, metavar="N",
                        help="how long a server may take to start")
    parser.add_argument("--vllm", default="vllm", metavar="COMMAND", help="default: vllm")
    parser.add_argument("--build", metavar="FOLDER",
                        help="where kvferry was built; default: kvferryd is on PATH")
    parser.add_argument("--dry-run", action="store_true",
                        help="check everything, print the plan with all commands, start nothing")
    parser.add_argument("--no-gpu", action="store_true",
                        help="go on where there is no GPU, to try the pilot; figures mean nothing")
    options = parser.parse_args(ours)
    options.of_vllm = of_vllm
    options.arms = list(dict.fromkeys(options.arms))
    if options.vocabulary <= 1000:
        parser.error("--vocabulary is above 1000")
    return options


def check(options):
    """What would be found out only hours later."""
    longest = socket_path(run_folder(options, options.repeats, ARMS[-1]))
    if len(longest) > SOCKET_PATH_MAX:
        raise Wrong(f"--out {options.out}: the path of the daemon's socket would have "
                    f"{len(longest)} characters, more than {SOCKET_PATH_MAX}: name a shorter one")
    if options.host_bytes < HOST_BYTES_MIN:
        raise Wrong(f"--host-bytes {options.host_bytes >> 20} MiB: at least "
                    f"{HOST_BYTES_MIN >> 20} MiB")
    if os.path.exists(options.out) and (not os.path.isdir(options.out) or os.listdir(options.out)):
        raise Wrong(f"--out {options.out} is there and not an empty folder: name another")
    for argument in options.of_vllm:
        name = argument.split("=")[0]
        if name in ("--kv-transfer-config", "--port", "--host", "--kv-offloading-size"):
            raise Wrong(f"{name} behind --: the arms set it; leave it out")
    programs = [(shlex.split(options.vllm)[0], "install vllm here, or name it by --vllm")]
    if any(arm.startswith("kvferry") for arm in options.arms):
        programs.append((kvferryd(options), "build kvferry and name the folder by --build"))
    if "lmcache" in options.arms:
        programs.append(("lmcache", "pip install lmcache, or leave the arm out by --arms"))
    for program, cure in programs:
        if shutil.which(program) is None:
            raise Wrong(f"{program} is not on PATH: {cure}")
    if shutil.which("nvidia-smi") is None and not options.no_gpu:
        raise Wrong("no nvidia-smi, so no GPU: run this on the GPU node (--no-gpu tries the pilot "
                    "without one)")
    available = processes.memory_available()
    if available < options.host_bytes * 5 // 4:
        raise Wrong(f"--host-bytes {options.host_bytes >> 20} MiB: this machine has "
                    f"{available >> 20} MiB of memory free, and a quarter is to stay so; give less")


def run_folder(options, repeat, arm):
    return os.path.join(os.path.abspath(options.out), f"{repeat}-{arm}")


def socket_path(folder):
    return os.path.join(folder, "kvferryd.sock")


def kvferryd(options):
    if options.build is None:
        return "kvferryd"
    return os.path.join(os.path.abspath(options.build), "agent", "kvferryd")


# --- the plan ------------------------------------------------------------------------------------

class Ports:
    """Numbers that are free now."""

    def __init__(self):
        self.held = []

    def take(self):
        found = socket.socket()
        found.bind(("127.0.0.1", 0))
        self.held.append(found)
        return found.getsockname()[1]

    def close(self):
        for held in self.held:
            held.close()


def transfer_config(options, arm, folder, store_port):
    """The JSON of --kv-transfer-config, or None."""
    made = {"kv_role": "kv_both"}
    if arm == "none":
        return None
    if arm == "native":
        extra = {"cpu_bytes_to_use": options.host_bytes}
        return {**made, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    if arm == "lmcache":
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": store_port}
        return {**made, "kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    profile = arm.split("-")[1]
    extra = {"socket": socket_path(folder), "profile": profile}
    if profile != "exact":
        extra["allow_uncalibrated"] = True
    return {**made, "kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}


def store_command(options, arm, folder, port, http_port):
    """The process beside vLLM, or None."""
    if arm == "lmcache":
        return ["lmcache", "server", "--host", "localhost", "--port", str(port), "--http-port",
                str(http_port), "--l1-size-gb", f"{options.host_bytes / UNITS['GiB']:g}",
                "--eviction-policy", "LRU",
                # without a GPU's memory to open, the server has engines copy
                *(["--supported-transfer-mode", "engine_driven"] if options.no_gpu else [])]
    if arm.startswith("kvferry"):
        staging = max(options.host_bytes // STAGING_SHARE, 64 << 20)
        sets = [f"dram.bytes={(options.host_bytes - staging) >> 20}MiB",
                f"staging.total={staging >> 20}MiB",
                f"staging.client={staging // STAGING_CLIENTS >> 20}MiB"]
        if arm != "kvferry-exact":
            sets.append("allow_uncalibrated=true")
        return [kvferryd(options), "--config", os.path.join(folder, "kvferryd.yaml"),
                *(word for one in sets for word in ("--set", one))]
    return None


def plan(options):
    """Every run in the order in which it is made."""
    generator = random.Random(options.seed)
    runs = []
    for repeat in range(options.repeats):
        order = list(options.arms)
        generator.shuffle(order)
        for arm in order:
            ports = Ports()
            folder = run_folder(options, repeat, arm)
            port, store_port, http_port = ports.take(), ports.take(), ports.take()
            ports.close()
            config = transfer_config(options, arm, folder, store_port)
            serve = [*shlex.split(options.vllm), "serve", options.model, "--port", str(port),
                     "--enable-prefix-caching", *options.of_vllm]
            if config is not None:
                serve += ["--kv-transfer-config", json.dumps(config)]
            runs.append({"repeat": repeat, "arm": arm, "folder": folder, "port": port,
                         "store_port": store_port, "serve": serve,
                         "store": store_command(options, arm, folder, store_port, http_port)})
    return runs


def describe(options, runs):
    """The plan, for people."""
    lines = [f"{len(runs)} runs: {options.repeats} repeats of {len(options.arms)} arms, seed "
             f"{options.seed}; {options.documents} documents of {options.document_tokens} tokens, "
             f"{options.rounds} warm rounds, {options.concurrency} requests at a time; "
             f"{options.host_bytes >> 20} MiB of host memory for each arm but none"]
    for number, run in enumerate(runs):
        lines.append(f"{number}: repeat {run['repeat']}, {run['arm']}")
        if run["store"]:
            lines.append(f"    {shlex.join(run['store'])}")
        lines.append(f"    {shlex.join(run['serve'])}")
    return "\n".join(lines)


# --- running it ----------------------------------------------------------------------------------

def is_listening(port):
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def is_healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def run_arm(options, run):
    """What one run has measured. processes.Failed: why it could not."""
    os.makedirs(run["folder"])
    with processes.Group(run["folder"], options.start_s) as group:
        if run["arm"] == "lmcache":
            group.start("store", run["store"], lambda: is_listening(run["store_port"]))
        elif run["store"]:
            with open(os.path.join(run["folder"], "kvferryd.yaml"), "w", encoding="utf-8") as file:
                file.write(f"sockets:\n  - path: {socket_path(run['folder'])}\n")  # no drive
            group.start("store", run["store"], lambda: os.path.exists(socket_path(run["folder"])))
        group.start("vllm", run["serve"], lambda: is_healthy(run["port"]))
        began = time.monotonic()
        measured = load.run(options, run["port"], group.check)
        measured["seconds"] = time.monotonic() - began
        measured["store_peak_bytes"] = group.peak_bytes("store")
        return measured


def write(options, report):
    with open(os.path.join(options.out, "pilot.json"), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    with open(os.path.join(options.out, "pilot.md"), "w", encoding="utf-8") as file:
        file.write(page.text(report))


def main(arguments):
    options = parse(arguments)
    try:
        check(options)
    except Wrong as wrong:
        print(f"run.sh: {wrong}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # servers end with us
    runs = plan(options)
    print(describe(options, runs), flush=True)
    if options.dry_run:
        return 0
    os.makedirs(options.out, exist_ok=True)
    report = {"version": 1, "machine": processes.facts(), "options": vars(options), "runs": []}
    for number, run in enumerate(runs):
        print(f"run {number} of {len(runs)}: {run['arm']}", flush=True)
        made = {name: run[name] for name in ("repeat", "arm", "serve", "store")}
        try:
            made["measured"] = run_arm(options, run)
        except (processes.Failed, load.Failed) as failed:
            made["failed"] = str(failed)
            print(f"run {number}, {run['arm']}, has failed: {failed}", file=sys.stderr, flush=True)
        report["runs"].append(made)
        write(options, report)  # what there is, should the next one take the machine down
    print(page.text(report))
    print(f"written: {options.out}/pilot.json, {options.out}/pilot.md")
    return 1 if any("failed" in run for run in report["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
