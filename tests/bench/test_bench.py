#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the benches' scripts, and of a very short run of each bench.

    test_bench.py                   statistics, verdicts, wrong arguments, the page
    test_bench.py --run BENCH DIR   measure BENCH of the build in DIR for a moment, read the result
    test_bench.py --stop DIR        end a bench of the build in DIR by signals, see what is left
"""
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import figures  # noqa: E402
import machine  # noqa: E402
import make_performance_doc as doc  # noqa: E402

RUN = os.path.join(HERE, "run")


class Samples:
    def __init__(self, pairs=None, values=None, skipped=None):
        self.pairs = pairs or {}
        self.values = values or {}
        self.skipped = skipped or {}


class Statistics(unittest.TestCase):
    def test_interval_repeats_and_holds_the_median(self):
        values = [1.0, 1.1, 0.9, 1.05, 0.95, 1.2, 0.8, 1.0, 1.02]
        low, high = figures.interval(values)
        self.assertEqual((low, high), figures.interval(values))
        self.assertTrue(0.8 <= low < 1.0 < high <= 1.2, (low, high))

    def test_interval_of_equal_values_is_a_point(self):
        self.assertEqual(figures.interval([2.0] * 9), (2.0, 2.0))

    def test_verdicts(self):
        self.assertIs(figures.verdict(0.9, 0.88, 0.92, 0.85, "higher"), True)
        self.assertIs(figures.verdict(0.8, 0.78, 0.82, 0.85, "higher"), False)
        self.assertIs(figures.verdict(1.9, 1.8, 2.0, 2.0, "lower"), True)
        self.assertIs(figures.verdict(2.1, 2.0, 2.2, 2.0, "lower"), False)
        self.assertIsNone(figures.verdict(0.5, 0.49, 0.51, None, "higher"))
        # differences are judged by the upper end, whatever the width
        self.assertIs(figures.verdict(0.4, 0.1, 0.7, 0.8, "lower", True), True)
        self.assertIs(figures.verdict(0.7, 0.6, 0.9, 0.8, "lower", True), False)
        # a median above the bar does not help an interval that is too wide on either side
        self.assertEqual(figures.verdict(1.0, 0.89, 1.0, 0.85, "higher"), "inconclusive")
        self.assertEqual(figures.verdict(1.0, 1.0, 1.11, 0.85, "higher"), "inconclusive")


class Quiet(unittest.TestCase):
    def test_a_child_that_computes_is_not_others(self):
        program = "import time\nwhile time.process_time() < 0.2: pass"
        quietness = machine.Quietness()
        subprocess.run([sys.executable, "-c", program], check=True)
        ours = machine.Quietness.now()[1] - quietness.began[1]
        self.assertGreaterEqual(ours, 0.15)  # clocks that tick 100 times a second
        others, host = quietness.shares()
        self.assertTrue(0 <= others <= 1 and 0 <= host <= 1, (others, host))


class Results(unittest.TestCase):
    def one(self, bench, name, samples, is_quick=False):
        found = [result for result in figures.results(bench, samples, is_quick)
                 if result["name"] == name]
        self.assertEqual(len(found), 1)
        return found[0]

    def test_ratio_is_the_median_of_ratios(self):
        pairs = [(1.0, 2.0), (3.0, 4.0), (10.0, 10.0)]
        result = self.one("local", "get_touch_vs_read",
                          Samples(pairs={"get_touch_vs_read": pairs}))
        self.assertEqual((result["value"], result["limit"], result["ratio"]), (3.0, 4.0, 0.75))
        self.assertEqual(result["pairs"], 3)

    def test_a_value_without_limit_is_judged_itself(self):
        result = self.one("local", "get_cpu_us", Samples(values={"get_cpu_us": [1.5] * 9}))
        self.assertEqual((result["value"], result["ratio"], result["pass"]), (1.5, None, True))
        result = self.one("local", "get_cpu_us", Samples(values={"get_cpu_us": [2.5] * 9}))
        self.assertIs(result["pass"], False)

    def test_quick_runs_prove_nothing(self):
        samples = Samples(values={"get_cpu_us": [1.5] * 9})
        self.assertEqual(self.one("local", "get_cpu_us", samples, True)["pass"], "inconclusive")

    def test_missing_is_skipped_with_a_reason(self):
        result = self.one("local", "redis_get", Samples(skipped={"redis_get": "no redis-server"}))
        self.assertEqual(result["skipped"], "no redis-server")

    def test_the_worst_depth_stands_for_all(self):
        pairs = {f"read_vs_fio_d{depth}": [(ours, 1.0)] * 9
                 for depth, ours in zip(figures.NVME_DEPTHS, (0.95, 0.8, 1.0, 0.9))}
        samples = Samples(pairs=pairs)
        self.assertEqual(self.one("nvme", "read_vs_fio", samples)["ratio"], 0.8)
        pairs = {f"read_cpu_vs_fio_d{depth}": [(ours, 1.0)] * 9
                 for depth, ours in zip(figures.NVME_DEPTHS, (0.9, 1.4, 1.0, 1.1))}
        result = self.one("nvme", "read_cpu_vs_fio", Samples(pairs=pairs))
        self.assertEqual((result["ratio"], result["pass"]), (1.4, False))
        result = self.one("nvme", "read_vs_fio", Samples(skipped={"read_vs_fio_d4": "no fio"}))
        self.assertIn("skipped", result)

    def test_a_stranger_is_refused(self):
        with self.assertRaises(ValueError):
            figures.results("local", Samples(values={"speed": [1.0]}), False)

    def test_names_are_unique(self):
        for bench, table in figures.FIGURES.items():
            names = [figure.name for figure in table]
            self.assertEqual(len(names), len(set(names)), bench)


class Arguments(unittest.TestCase):
    def refused(self, *arguments):
        done = subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, 2, done.stderr)
        return done.stderr

    def test_unknown_bench(self):
        self.assertIn("no bench 'speed', only local, nvme, codec", self.refused("speed"))

    def test_missing_build(self):
        self.assertIn("is not built: cmake --preset release",
                      self.refused("codec", "--build", HERE))

    def test_wrong_seconds(self):
        self.assertIn("--seconds", self.refused("codec", "--build", HERE, "--seconds", "0"))
        self.assertIn("--seconds", self.refused("codec", "--build", HERE, "--seconds", "soon"))

    def test_unknown_figure(self):
        self.assertIn("codec has no figure 'speed'", self.refused("codec", "--only", "speed"))

    def test_no_trace(self):
        with tempfile.TemporaryDirectory() as build:
            self.assertIn("replay needs a trace by --trace",
                          self.refused("replay", "--build", build))
            self.assertIn("replay needs a trace by --trace",
                          self.refused("replay", "--build", build, "--trace", build + "/none"))

    def test_missing_folder(self):
        self.assertIn("is not a folder", self.refused("nvme", "--dir", os.path.join(HERE, "none")))


class Stop(unittest.TestCase):
    BUSY_DAEMON = """#!/bin/sh
while [ "$1" != --config ]; do shift; done
while :; do n=$((n + 1)); : > "${2%/*}/$n"; done 2>/dev/null
"""

    def test_a_daemon_that_writes_to_the_end(self):
        """Its folder can be deleted only when it has ended."""
        with tempfile.TemporaryDirectory() as build:
            for path in ("agent/kvferryd", "tests/bench/bench_local"):
                path = os.path.join(build, path)
                os.makedirs(os.path.dirname(path))
                with open(path, "w", encoding="ascii") as file:
                    file.write(self.BUSY_DAEMON)
                os.chmod(path, 0o700)
            self.assertIsNone(stop_bench(build, signal.SIGTERM))


class Page(unittest.TestCase):
    MACHINE = {"cpu": "x", "cpu_model": "y", "virtual": False, "cores": 2, "llc_bytes": 1 << 25,
               "memory": 1 << 34, "kernel": "6", "cpu_of_others": 0.01, "cpu_of_host": 0.0}

    def report(self, date, value):
        samples = Samples(values={"get_cpu_us": [value] * 9})
        return {"bench": "local", "commit": "c", "date": date, "quick": False, "seconds": 1.0,
                "machine": self.MACHINE, "results": figures.results("local", samples, False)}

    def test_the_newest_of_a_machine_counts(self):
        reports = [self.report("2026-02-01T00:00:00Z", 1.5),
                   self.report("2026-01-01T00:00:00Z", 2.5)]
        page = doc.make_page(reports)
        self.assertIn("| `get_cpu_us` | 1.5 us |", page)
        self.assertNotIn("2.5 us", page)

    def test_another_machine_has_a_table_of_its_own(self):
        other = self.report("2026-01-01T00:00:00Z", 2.5)
        other["machine"] = {**self.MACHINE, "cpu": "z"}
        page = doc.make_page([self.report("2026-02-01T00:00:00Z", 1.5), other])
        self.assertIn("| 1.5 us |", page)
        self.assertIn("| 2.5 us |", page)

    def partial(self, date, name, program):
        samples = Samples(pairs={name: [(1.0, 2.0)] * 9})
        for figure in figures.FIGURES["gpu"]:
            if figure.name != name:
                samples.skipped[figure.name] = figures.ONLY_SOME_RAN.replace("(.+)", program)
        return {**self.report(date, 1.5), "bench": "gpu", "commit": date[:4],
                "results": figures.results("gpu", samples, False)}

    def test_programs_of_a_bench_that_ran_at_different_times(self):
        page = doc.make_page([
            self.partial("2025-01-01T00:00:00Z", "offload_vs_ideal", "gpu_link"),
            self.partial("2026-01-01T00:00:00Z", "fill_vs_copy", "gpu_kernels"),
            self.partial("2024-01-01T00:00:00Z", "fill_vs_copy", "gpu_kernels")])
        self.assertEqual(page.count("| `fill_vs_copy` |"), 1)
        self.assertEqual(page.count("| `offload_vs_ideal` |"), 1)
        self.assertLess(page.index("commit 2026"), page.index("commit 2025"))
        self.assertNotIn("commit 2024", page)
        self.assertNotIn("were run", page)


def run_bench(bench, build):
    """A very short run: the last line is JSON and has every name of the table."""
    done = subprocess.run([sys.executable, RUN, bench, "--build", build, "--quick"],
                          stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode != 0:
        return f"exit code {done.returncode}"
    report = json.loads(done.stdout.splitlines()[-1])
    names = [result["name"] for result in report["results"]]
    if report["bench"] != bench or names != [figure.name for figure in figures.FIGURES[bench]]:
        return f"other names than in the table: {names}"
    for key in ("cpu", "cores", "llc_bytes", "memory", "kernel"):
        if not report["machine"].get(key):
            return f"the machine has no {key}"
    for result in report["results"]:
        if "skipped" in result:
            if not any(word in result["skipped"]
                       for word in ("apt-get install", "engines_venvs.sh", "one CPU", "no GPU",
                                    "libcublas", "cuMemcpyBatchAsync", "--vllm")):
                return f"{result['name']} is missing: {result['skipped']}"
            continue
        if result.get("limit") and bench == "gpu" and "/GiB" in result["note"]:
            continue  # a difference, which noise makes negative
        if not result["value"] > 0 or (result["limit_name"] and not result["ratio"] > 0):
            return f"{result['name']} has no value: {result}"
        if not result["ci"][0] <= result["ci"][1] or result["pass"] != "inconclusive":
            return f"{result['name']} says more than a quick run can: {result}"
    return None


def processes_naming(text):
    """Command lines of running processes that have this text in them."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                line = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if text in line:
            found.append(line)
    return found


def stop_bench(build, number):
    """A bench that gets a signal takes its daemon and its folder with it."""
    with tempfile.TemporaryDirectory(prefix="kvferry-stop-") as folder, \
            tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen([sys.executable, RUN, "local", "--build", build, "--seconds", "600"],
                              env={**os.environ, "TMPDIR": folder}, stdout=subprocess.DEVNULL,
                              stderr=errors) as bench:
            while bench.poll() is None and not processes_naming(f"{folder}/"):
                time.sleep(0.01)
            bench.send_signal(number)
            code = bench.wait()
        if code != 128 + number:
            errors.seek(0)
            return f"signal {number}: exit code {code}\n{errors.read()}"
        left = processes_naming(f"{folder}/") + os.listdir(folder)
        return f"signal {number} leaves {left}" if left else None


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--stop":
        sys.exit(stop_bench(sys.argv[2], signal.SIGTERM) or
                 stop_bench(sys.argv[2], signal.SIGINT))
    if len(sys.argv) == 4 and sys.argv[1] == "--run":
        sys.exit(run_bench(sys.argv[2], sys.argv[3]))
    unittest.main()
