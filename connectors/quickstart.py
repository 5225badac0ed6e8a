# SPDX-License-Identifier: Apache-2.0
"""Force a hit outside vLLM, and print what came beside what was expected.

    quickstart.sh --model FOLDER [--build FOLDER] [--profile NAME]

A kvferryd of its own is started in a temporary folder. An engine computes a prompt, and ends; a
new engine, whose own prefix cache is empty, is asked for the same prompt: what it does not compute
came from the daemon. On a GPU or on a CPU, as the vllm that is installed has it. Exit 0: all as
expected; 1: not; 2: it could not be tried, and why.
"""
import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

CHUNK = 128
CHUNKS = 4
ANSWER_TOKENS = 8
TOKENS = CHUNKS * CHUNK + 1  # one behind the last whole chunk, which is always computed
READY_S = 120
ENGINE_S = 1800
MARK = "kvferry-quickstart: "


class Wrong(Exception):
    """It cannot be tried; the text says why, and the cure."""


def engine(options):
    """Run in a process of its own: one prompt through a new vLLM; a line of JSON."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    extra = {"socket": options.socket, "profile": options.profile, "chunk_tokens": CHUNK}
    if options.profile != "exact":
        extra["allow_uncalibrated"] = True
    if options.allow_untested:
        extra["allow_untested"] = True
    llm = LLM(model=options.model, enable_prefix_caching=True, skip_tokenizer_init=True,
              max_model_len=2 * TOKENS, gpu_memory_utilization=options.gpu_memory,
              kv_transfer_config=KVTransferConfig(
                  kv_connector="KvferryConnector", kv_connector_module_path="kvferry.vllm",
                  kv_role="kv_both", kv_load_failure_policy="recompute",
                  kv_connector_extra_config=extra))
    generator = random.Random(1)
    prompt = {"prompt_token_ids": [generator.randrange(10, 1000) for _ in range(TOKENS)]}
    done = llm.generate([prompt], SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0,
                                                 ignore_eos=True, detokenize=False))[0]
    params = done.kv_transfer_params or {}
    print(MARK + json.dumps({"tokens": list(done.outputs[0].token_ids),
                             "hit": params.get("kvferry.hit_tokens", 0),
                             "tier": params.get("kvferry.tier", "")}), flush=True)


def start_daemon(program, folder, profile):
    if shutil.which(program) is None:
        raise Wrong(f"no {program}: build kvferry (make build) and name the folder by --build")
    command = [program, "--dir", folder, "--set", "dram.bytes=512MiB"]
    if profile != "exact":
        command += ["--set", "allow_uncalibrated=true"]
    with open(os.path.join(folder, "log"), "wb") as log:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    end = time.monotonic() + READY_S
    while not os.path.exists(os.path.join(folder, "kvferryd.sock")):
        if daemon.poll() is not None or time.monotonic() > end:
            daemon.kill()
            with open(os.path.join(folder, "log"), encoding="utf-8", errors="replace") as log:
                raise Wrong(f"{program} does not start:\n{log.read()[-2000:]}")
        time.sleep(0.05)
    return daemon


def ask(arguments, folder, number):
    """What a new engine says."""
    path = os.path.join(folder, f"engine-{number}")
    with open(path, "wb") as log:
        done = subprocess.run([sys.executable, "-B", os.path.abspath(__file__), *arguments,
                               "--socket", os.path.join(folder, "kvferryd.sock")],
                              stdout=subprocess.PIPE, stderr=log, text=True, check=False,
                              timeout=ENGINE_S,
                              # one beginning of vLLM's hashes, for versions that draw one
                              env={**os.environ, "PYTHONHASHSEED": "0"})
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line[len(MARK):])
    with open(path, encoding="utf-8", errors="replace") as log:
        raise Wrong(f"engine {number} ended with code {done.returncode}:\n{log.read()[-3000:]}")


def compare(options, arguments):
    program = (os.path.join(os.path.abspath(options.build), "agent", "kvferryd")
               if options.build else "kvferryd")
    with tempfile.TemporaryDirectory(prefix="kvferry-quickstart-") as folder:
        daemon = start_daemon(program, folder, options.profile)
        try:
            print(f"a prompt of {TOKENS} tokens, two engines one after the other ...", flush=True)
            first, second = ask(arguments, folder, 1), ask(arguments, folder, 2)
        finally:
            daemon.terminate()
            daemon.wait()
    rows = [("first engine: tokens from kvferry", first["hit"], 0),
            ("second engine: tokens from kvferry", second["hit"], CHUNKS * CHUNK),
            ("second engine: found in", second["tier"], "dram")]
    if options.profile == "exact":
        rows.append(("second engine: its answer", second["tokens"], first["tokens"]))
    else:
        rows.append(("second engine: length of its answer", len(second["tokens"]), ANSWER_TOKENS))
    good = True
    for what, came, expected in rows:
        good = good and came == expected
        print(f"{'ok   ' if came == expected else 'WRONG'} {what}: {came}, expected {expected}")
    print("kvferry works here" if good else
          "NOT as expected: look into kvferry doctor, and docs/engines.md for what is served")
    return 0 if good else 1


def main(arguments):
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER",
                        help="a folder of a dense model, as of the model hub")
    parser.add_argument("--build", metavar="FOLDER",
                        help="where kvferry was built; default: kvferryd is on PATH")
    parser.add_argument("--profile", default="exact", metavar="NAME")
    parser.add_argument("--gpu-memory", type=float, default=0.5, metavar="SHARE",
                        help="vLLM's gpu_memory_utilization")
    parser.add_argument("--allow-untested", action="store_true",
                        help="a version of vLLM that is not in tested_versions.json")
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the daemon, too
    if options.socket:
        engine(options)
        return 0
    try:
        for name, cure in (("vllm", "install it, or name another Python in PYTHON"),
                           ("kvferry", "make wheel, and install build/wheel/kvferry-*.whl")):
            found = subprocess.run(
                [sys.executable, "-c", f"import importlib.util as u; u.find_spec('{name}') or 1/0"],
                stderr=subprocess.DEVNULL, check=False)
            if found.returncode != 0:
                raise Wrong(f"{sys.executable} has no {name}: {cure}")
        return compare(options, arguments)
    except (Wrong, subprocess.TimeoutExpired) as wrong:
        print(f"quickstart.sh: {wrong}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
