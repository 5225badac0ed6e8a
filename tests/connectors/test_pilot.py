#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pilot without a GPU: arguments, plan, statistics of fabricated results, and whole runs
against a stand-in for vLLM, with a real kvferryd.

usage: test_pilot.py KVFERRYD BUILD_FOLDER [unittest arguments]
"""
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout

HERE = os.path.dirname(os.path.abspath(__file__))
PILOT = os.path.join(HERE, "..", "..", "connectors", "pilot")
KVFERRYD, BUILD = sys.argv[1:3]
sys.path.insert(0, PILOT)

import page  # noqa: E402
import pilot  # noqa: E402
import processes  # noqa: E402

# What vllm serve has that the pilot uses. It does not come up where the offloading connector is
# asked for, and ends before its time where a file of the name "die" lies beside it.
VLLM = f"""#!{sys.executable}
import http.server, json, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
if "OffloadingConnector" in " ".join(sys.argv):
    sys.exit("this stand-in has no offloading")
tokens = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            for name, value in (("prefix_cache_queries", tokens),
                                ("prefix_cache_hits", tokens // 4),
                                ("external_prefix_cache_hits", tokens // 2)):
                self.wfile.write(f'vllm:{{name}}_total{{{{x="1"}}}} {{value}}\\n'.encode())

    def do_POST(self):
        global tokens
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens += len(asked["prompt"])
        if os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "die")):
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        for i in range(asked["max_tokens"]):
            piece = {{"choices": [{{"text": str(asked["prompt"][i])}}]}}
            self.wfile.write(f"data: {{json.dumps(piece)}}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def measured(first_s, answer="a", peak=None):
    """A run in which each request took so long."""
    def part(number):
        rows = [{"round": number, "document": i, "first_s": first_s, "between_s": [0.01],
                 "answer": answer} for i in range(10)]
        return {"seconds": 2.0, "requests": rows, "queried_tokens": 100.0, "gpu_hit_tokens": 20.0,
                "external_hit_tokens": 60.0}
    return {"rounds": [part(0), part(1)], "seconds": 4.0, "store_peak_bytes": peak}


def report(runs, arms):
    return {"version": 1, "runs": runs,
            "machine": {"cpu": "c", "cores": 2, "memory_free_bytes": 1 << 33, "kernel": "6",
                        "python": "3", "gpus": ["a GPU"], "versions": {"vllm": "1"}, "date": "d"},
            "options": {"model": "m", "documents": 10, "document_tokens": 90, "rounds": 1,
                        "question_tokens": 10, "concurrency": 1, "host_bytes": 1 << 30,
                        "repeats": 5, "seed": 1, "of_vllm": [], "arms": arms}}


class Statistics(unittest.TestCase):
    def runs(self, arm, values):
        return [{"arm": arm, "repeat": i, "measured": measured(value), "serve": [], "store": None}
                for i, value in enumerate(values)]

    def test_arms_are_compared_within_a_repeat(self):
        # a machine that becomes ten times slower: the ratio stays
        slow = (1, 2, 3, 5, 10)
        runs = self.runs("none", slow) + self.runs("kvferry-exact", [value / 4 for value in slow])
        runs = [{**run, "figures": page.figures(run["measured"], report([], [])["options"])}
                for run in runs]
        ratio, ends, pairs = page.compared(runs, "kvferry-exact", "none", "warm_first_p50_s")
        self.assertEqual((ratio, ends, pairs), (0.25, (0.25, 0.25), 5))

    def test_an_interval_holds_the_median_and_needs_repeats(self):
        low, high = page.interval([0.5, 0.6, 0.4, 0.55, 0.45])
        self.assertTrue(0.4 <= low < 0.5 < high <= 0.6, (low, high))
        self.assertIsNone(page.interval([0.5, 0.6, 0.4]))

    def test_figures_of_a_run(self):
        found = page.figures(measured(0.5), report([], [])["options"])
        self.assertEqual((found["warm_first_p50_s"], found["warm_first_p99_s"]), (0.5, 0.5))
        self.assertEqual((found["gpu_hits"], found["external_hits"]), (0.2, 0.6))
        self.assertEqual(found["warm_tokens_a_s"], 10 * 100 / 2.0)
        self.assertEqual([page.quantile(range(100), share) for share in (0, 0.5, 0.99)],
                         [0, 50, 99])

    def test_the_page_has_ratios_hits_and_failures(self):
        runs = self.runs("none", [1.0] * 5) + self.runs("kvferry-exact", [0.5] * 5)
        runs[-1]["measured"] = measured(0.5, "b", 3 << 30)
        runs.append({"arm": "lmcache", "repeat": 0, "serve": [], "store": None,
                     "failed": "store has ended with code 1: why\nmore"})
        text = page.text(report(runs, ["none", "kvferry-exact", "lmcache"]))
        self.assertIn("| kvferry-exact | 500 | 0.5 (0.5..0.5) |  |", text)
        self.assertIn("| kvferry-exact | 0.2 | 0.6 | 3 | 0.8 |", text)
        self.assertIn("- repeat 0, lmcache: store has ended with code 1: why\n", text)
        self.assertNotIn("| lmcache |", text)

    def test_an_arm_that_hits_nothing_is_named(self):
        runs = self.runs("none", [1.0]) + self.runs("kvferry-exact", [1.0])
        text = page.text(report(runs, ["none", "kvferry-exact"]))
        self.assertNotIn("has hit nothing", text)
        for part in runs[1]["measured"]["rounds"]:
            part["external_hit_tokens"] = 0.0
        text = page.text(report(runs, ["none", "kvferry-exact"]))
        self.assertEqual(text.count("kvferry-exact has hit nothing outside the GPU"), 1)
        self.assertNotIn("none has hit", text)

    def test_the_cause_of_a_failure_is_its_first_line(self):
        with tempfile.TemporaryDirectory() as folder:
            group = processes.Group(folder, 60)
            for log, cause in ((b"", "it has said nothing"), (b"a\nb\n", "b"),
                               (b"WARNING [a.py:1] causes OSError: no files, at times\n"
                                b"(Worker pid=1) ERROR 11-30 [b.py:2] Exception: only on GPUs\n"
                                + b"z\n" * 9000 + b"a.RuntimeError: see above\n",
                                "Exception: only on GPUs")):
                with open(os.path.join(folder, "vllm.log"), "wb") as file:
                    file.write(log)
                self.assertEqual(group.why("vllm").splitlines()[0], cause)

    def test_a_page_of_failures_alone(self):
        runs = [{"arm": "none", "repeat": 0, "serve": [], "store": None, "failed": "x"}]
        self.assertIn("- repeat 0, none: x", page.text(report(runs, ["none"])))


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvf-pilot-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.out = os.path.join(self.folder, "o")
        self.vllm = os.path.join(self.folder, "vllm")
        with open(self.vllm, "w", encoding="utf-8") as file:
            file.write(VLLM)
        os.chmod(self.vllm, 0o755)

    def call(self, *more, host="256MiB"):
        """(code, output, errors) of the pilot."""
        said, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(said), redirect_stderr(errors):
            try:
                code = pilot.main(["--model", "m", "--host-bytes", host, "--out", self.out,
                                   "--vllm", self.vllm, "--build", BUILD, "--no-gpu", *more])
            except SystemExit as end:
                code = end.code
        return code, said.getvalue(), errors.getvalue()


class Arguments(Case):
    def refused(self, why, *more, **changes):
        code, _, errors = self.call(*more, **changes)
        self.assertEqual(code, 2, errors)
        self.assertRegex(errors, why)
        self.assertFalse(os.path.exists(os.path.join(self.out, "pilot.json")))

    def test_what_cannot_work_is_said_before_anything_starts(self):
        arms = ("--arms", "none", "kvferry-exact")
        self.refused("'1x' is not a size as 64GiB", *arms, host="1x")
        self.refused("at least 256 MiB", *arms, host="1MiB")
        self.refused("memory free", *arms, host="9000TiB")
        self.refused("--kv-transfer-config behind --: the arms set it", *arms, "--",
                     "--kv-transfer-config={}")
        self.refused("'0' is not a whole number above 0", *arms, "--repeats", "0")
        self.refused("invalid choice: 'all'", "--arms", "all")
        self.refused("is not on PATH: install vllm here", *arms, "--vllm", "no-such-program")
        self.refused("is not on PATH: build kvferry", *arms, "--build", self.folder)
        self.refused("more than 107: name a shorter one", *arms, "--out",
                     os.path.join(self.folder, "x" * 100))
        os.mkdir(self.out)
        with open(os.path.join(self.out, "file"), "w", encoding="utf-8"):
            pass
        self.refused("not an empty folder: name another", *arms)

    @unittest.skipIf(shutil.which("nvidia-smi"), "there is a GPU")
    def test_no_gpu(self):
        code = subprocess.run(
            [os.path.join(PILOT, "run.sh"), "--model", "m", "--host-bytes", "256MiB", "--out",
             self.out, "--vllm", self.vllm, "--build", BUILD, "--arms", "none"],
            capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHON": sys.executable})
        self.assertEqual(code.returncode, 2)
        self.assertIn("no nvidia-smi, so no GPU: run this on the GPU node", code.stderr)


class Plan(Case):
    def plan(self, *more, arms=("none", "native", "kvferry-exact", "kvferry-balanced")):
        options = pilot.parse(["--model", "m", "--host-bytes", "64GiB", "--out", self.out,
                               "--build", BUILD, "--arms", *arms, *more])
        return pilot.plan(options)

    def test_each_repeat_has_every_arm_in_an_order_of_its_own(self):
        runs = self.plan("--repeats", "12", arms=pilot.ARMS)
        orders = [tuple(run["arm"] for run in runs if run["repeat"] == i) for i in range(12)]
        self.assertEqual({tuple(sorted(order)) for order in orders}, {tuple(sorted(pilot.ARMS))})
        self.assertGreater(len(set(orders)), 1)
        again = self.plan("--repeats", "12", arms=pilot.ARMS)
        self.assertEqual([run["arm"] for run in runs], [run["arm"] for run in again])

    def test_host_bytes_are_equal(self):
        by_arm = {run["arm"]: run for run in self.plan("--repeats", "1", arms=pilot.ARMS)}
        self.assertIsNone(by_arm["none"]["store"])
        self.assertNotIn("--kv-transfer-config", by_arm["none"]["serve"])
        native = json.loads(by_arm["native"]["serve"][-1])
        self.assertEqual(native["kv_connector_extra_config"]["cpu_bytes_to_use"], 64 << 30)
        self.assertIn("--l1-size-gb 64 ", " ".join(by_arm["lmcache"]["store"]))
        for arm in ("kvferry-exact", "kvferry-balanced"):
            sets = dict(word.split("=") for word in by_arm[arm]["store"] if "=" in word)
            mib = sum(int(sets[name][:-3]) for name in ("dram.bytes", "staging.total"))
            self.assertEqual(mib << 20, 64 << 30)

    def test_a_dry_run_prints_all_commands_and_starts_nothing(self):
        code, said, _ = self.call("--dry-run", "--repeats", "2", "--arms", "none", "kvferry-exact",
                                  "--", "--max-model-len", "9000")
        self.assertEqual(code, 0)
        self.assertEqual(said.count("serve m --port"), 4)
        self.assertEqual(said.count("--max-model-len 9000"), 4)
        self.assertEqual(said.count(f"{KVFERRYD} --config"), 2)
        self.assertFalse(os.path.exists(self.out))


class Runs(Case):
    SMALL = ("--repeats", "1", "--documents", "3", "--document-tokens", "40", "--rounds", "2",
             "--answer-tokens", "4", "--question-tokens", "8", "--concurrency", "2", "--start-s",
             "120")

    def read(self):
        with open(os.path.join(self.out, "pilot.json"), encoding="utf-8") as file:
            return json.load(file)

    def test_arms_run_and_one_that_fails_is_reported(self):
        code, said, errors = self.call(*self.SMALL, "--arms", "none", "native", "kvferry-exact")
        self.assertEqual(code, 1, errors)
        runs = {run["arm"]: run for run in self.read()["runs"]}
        self.assertIn("vllm has ended with code 1: this stand-in has no offloading",
                      runs["native"]["failed"])
        for arm in ("none", "kvferry-exact"):
            rounds = runs[arm]["measured"]["rounds"]
            self.assertEqual([len(part["requests"]) for part in rounds], [3, 3, 3])
            self.assertEqual([part["queried_tokens"] for part in rounds], [3 * 48.0] * 3)
        self.assertGreater(runs["kvferry-exact"]["measured"]["store_peak_bytes"], 1 << 20)
        self.assertIn("| kvferry-exact | 0.25 | 0.5 |", said)
        self.assertIn("- repeat 0, native: vllm has ended", said)
        with open(os.path.join(self.out, "pilot.md"), encoding="utf-8") as file:
            self.assertIn("# kvferry pilot", file.read())
        self.assertEqual(self.left(), [])

    def test_a_server_that_dies_under_load(self):
        with open(os.path.join(self.folder, "die"), "w", encoding="utf-8"):
            pass
        code, _, errors = self.call(*self.SMALL, "--arms", "none")
        self.assertEqual(code, 1)
        self.assertIn("a request failed", errors)
        self.assertIn("a request failed", self.read()["runs"][0]["failed"])
        self.assertEqual(self.left(), [])

    def left(self):
        """Processes of the pilot that still run."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    line = file.read().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if self.folder in line:
                found.append(line)
        return found


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
