#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""mode: observe, and kvferry trace record, with a client that looks prompts up as engines do.

usage: test_observe.py KVFERRYD KVFERRY PROMPTS [unittest arguments]
"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
import logged  # noqa: E402

KVFERRYD, KVFERRY, PROMPTS = sys.argv[1:4]
DEADLINE_S = 120
BLOCK_BYTES = 20000


def wait_for(condition, what):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {DEADLINE_S} s for {what}")
        time.sleep(0.05)


class Case(logged.DaemonCase):
    FOLDER = "kvferry-observe-"
    SMALL = ["dram.bytes=64MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=64MiB",
             "staging.total=64MiB", "staging.client=4MiB", "clients.max=8", "nvme.0.bytes=64MiB",
             "nvme.0.segment_bytes=4MiB"]

    def start(self, *sets):
        return self.start_daemon(KVFERRYD, *sets)

    def prompts(self, chains, label="a"):
        """What came of each: blocks found, fetched, put."""
        lines = "".join(f"{len(chain)} {' '.join(map(str, chain))}\n" for chain in chains)
        done = subprocess.run([PROMPTS, self.socket, label, str(BLOCK_BYTES)], input=lines,
                              capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        self.assertEqual(done.returncode, 0, done.stderr + self.log_text())
        return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]

    def metrics(self):
        done = subprocess.run([KVFERRY, "stat", "--socket", self.socket, "-o", "json"],
                              capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        return json.loads(done.stdout)["metrics"]


class Observe(Case):
    def test_answers_as_if_empty_and_counts(self):
        self.start("mode=observe")
        store = os.path.join(self.folder, "nvme.store")
        chain = list(range(1, 401))
        # the first prompt is looked up before a block has said how large blocks are
        for found in self.prompts([chain] * 1 + [list(range(1000, 1010))]):
            self.assertEqual(found[:2], (0, 0))
        for _ in range(3):
            time.sleep(1.1)  # not the same prompt asked for again
            self.assertEqual(self.prompts([chain]), [(0, 0, 400)])
        wait_for(lambda: self.metrics()["observe_hit_tokens_full"] > 400 * 256, "two prompts' hits")
        metrics = self.metrics()
        self.assertEqual(metrics["put_blocks"], 0)
        self.assertEqual(metrics["observe_put_blocks"], 400 + 10 + 3 * 400)
        self.assertEqual(metrics["observe_lookup_tokens"], (400 + 10 + 3 * 400) * 256)
        self.assertEqual(metrics["get_hits_dram"], 0)
        self.assertEqual(metrics["observe_lost_prompts"], 0)
        # of three prompts after the sizes were known, two were there, as far as a sample of one in
        # five tells: names are random, and five deviations are 400 blocks
        hits = metrics["observe_hit_tokens_full"] / 256
        self.assertGreater(hits, 400)
        self.assertLess(hits, 1200)
        self.assertAlmostEqual(metrics["observe_hit_bytes_full"] / hits, BLOCK_BYTES + 4096,
                               delta=1)
        self.assertFalse(os.path.exists(store) and os.path.getsize(store) > 0)

    def test_check_counts_what_observing_takes(self):
        sets = ["mode=observe", "nvme.0.bytes=2GiB", "nvme.0.segment_bytes=64MiB"]
        command = [KVFERRYD, "--check", "--dir", self.folder]
        for value in [*self.SMALL, *sets]:
            command += ["--set", value]
        said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S,
                              check=True).stdout
        parts = dict(re.findall(r"^(\S.*?) {2,}([\d.]+)", said, re.MULTILINE))
        self.assertEqual(float(parts["arena"]), 0)
        self.assertEqual([name for name in parts if "drive" in name], ["drives"])
        self.assertRegex(said, r"nvme\.store, which mode observe leaves alone")

        process = self.start(*sets)
        before = self.resident_mebibytes(process.pid)
        # more blocks than the largest replayed arena holds, in prompts that come twice
        chains = [list(range(1000 * n, 1000 * n + 250)) for n in range(100)]
        for _ in range(2):
            self.prompts(chains)
        wait_for(lambda: self.metrics()["observe_hit_tokens_eightfold"] > 0, "replays")
        taken = self.resident_mebibytes(process.pid)
        self.assertGreater(taken, before + 20)  # there is something to count
        with open(KVFERRYD, "rb") as file:
            program = file.read()
        if b"__asan_init" in program or b"__tsan_init" in program:
            self.skipTest("sanitizers take memory of their own")
        self.assertLess(taken - before, float(parts["replays"]))
        self.assertLess(taken, float(parts["total"]))

    @staticmethod
    def resident_mebibytes(pid):
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return int(re.search(r"VmRSS:\s+(\d+) kB", file.read())[1]) / 1024

    def test_a_common_beginning_counts_once(self):
        self.start("mode=observe")
        self.prompts([[1]])
        # the first 65 prompts do not show yet that all begin alike; by a sample of one in five
        # their common block counts for five each or for nothing
        self.prompts([[7, 1000 + n] for n in range(400)])
        wait_for(lambda: self.metrics()["observe_hit_tokens_eightfold"] >= 300 * 256, "hits")
        hits = self.metrics()["observe_hit_tokens_eightfold"] / 256
        self.assertLessEqual(hits, 400 + 5 * 66)

    def test_larger_stores_hit_more(self):
        self.start("mode=observe")
        rng = random.Random(5)
        ends = [1000 * n for n in range(60)]
        self.prompts([[1]])
        # 60 prompts of 200 blocks, again and again: 4 times of what memory holds
        for _ in range(4):
            rng.shuffle(ends)
            self.prompts([list(range(end, end + 200)) for end in ends])
        wait_for(lambda: self.metrics()["observe_hit_tokens_eightfold"] >= 2 * 12000 * 256,
                 "replays")
        wait_for(lambda: self.metrics()["observe_lost_prompts"] == 0, "no prompt lost")
        metrics = self.metrics()
        hits = [metrics[f"observe_hit_tokens_{size}"] / metrics["observe_lookup_tokens"]
                for size in ("quarter", "half", "full", "double", "fourfold",
                              "eightfold")]
        self.assertGreater(hits[5], 0.5)
        self.assertLess(hits[0], 0.2)
        self.assertLess(hits[0], hits[5])
        for smaller, larger in zip(hits, hits[1:]):
            self.assertLessEqual(smaller, larger + 0.05)


class Record(Case):
    def record(self, *arguments):
        path = os.path.join(self.folder, "trace.jsonl")
        process = subprocess.Popen([KVFERRY, "trace", "record", path, "--socket", self.socket,
                                    *arguments], stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        self.assertEqual(process.stderr.readline(), "kvferry: recording\n")
        return process, path

    @staticmethod
    def n_lines(path):
        with open(path, encoding="utf-8") as file:
            return len(file.readlines())

    def test_recorded_prompts_replay(self):
        self.start()
        process, path = self.record()
        chain = list(range(1, 31))
        self.assertEqual(self.prompts([chain]), [(0, 0, 30)])
        time.sleep(1.1)
        self.assertEqual(self.prompts([chain + [77, 78]]), [(30, 30, 2)])
        wait_for(lambda: self.n_lines(path) == 3, "two prompts")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
        self.assertEqual((process.returncode, err), (0, "kvferry: 2 prompts recorded\n"))
        with open(path, encoding="utf-8") as file:
            header, first, second = map(json.loads, file)
        self.assertEqual(header, {"format": "kvferry-trace", "version": 1, "block_tokens": 256})
        self.assertEqual((first["timestamp"], first["input_length"]), (0, 30 * 256))
        self.assertGreater(second["timestamp"], 1000)
        self.assertEqual(second["hash_ids"][:30], first["hash_ids"])
        self.assertEqual(len(set(second["hash_ids"])), 32)
        done = subprocess.run([KVFERRY, "replay", path, "--bytes-a-token", "1000", "--dram",
                               "1GiB", "-o", "json"], capture_output=True, text=True,
                              timeout=DEADLINE_S, check=True)
        self.assertEqual(json.loads(done.stdout)["rows"][0]["hits_dram"], 30)

    def test_a_recording_that_is_taken_up_again_has_the_same_names(self):
        self.start()
        ids = []
        for _ in range(2):
            process, path = self.record("--size", "100")
            # the size ends it after a prompt; the salt is that of the daemon's recording, which
            # lasts for a while longer
            self.prompts([list(range(500, 520))], "b")
            process.communicate(timeout=DEADLINE_S)
            self.assertEqual(process.returncode, 0)
            with open(path, encoding="utf-8") as file:
                ids.append(json.loads(file.read().splitlines()[-1])["hash_ids"])
            time.sleep(1.1)
        self.assertEqual(ids[0], ids[1])
        self.assertNotIn(500, ids[0])

    def test_one_recording_at_a_time(self):
        self.start()
        process, _ = self.record()
        path = os.path.join(self.folder, "other.jsonl")
        other = [KVFERRY, "trace", "record", path, "--socket", self.socket, "--duration", "1s"]
        done = subprocess.run(other, capture_output=True, text=True, timeout=DEADLINE_S,
                              check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("another recording is under way", done.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
        done = subprocess.run(other, capture_output=True, text=True, timeout=DEADLINE_S,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_file_is_kept_where_there_is_no_daemon(self):
        path = os.path.join(self.folder, "before.jsonl")
        with open(path, "w", encoding="utf-8") as file:
            file.write("a day's prompts\n")
        done = subprocess.run([KVFERRY, "trace", "record", path, "--socket", self.socket],
                              capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        self.assertEqual(done.returncode, 3)
        self.assertNotIn("recorded", done.stderr)
        self.assertEqual(self.n_lines(path), 1)

    def test_refusals(self):
        for code, text, arguments in ((2, "record and a file", ["trace"]),
                                      (2, "record and a file", ["trace", "record"]),
                                      (2, "record and a file", ["trace", "play", "x"]),
                                      (3, "no daemon", ["trace", "record", "x"])):
            done = subprocess.run([KVFERRY, *arguments, "--socket", self.socket], cwd=self.folder,
                                  capture_output=True, text=True, timeout=DEADLINE_S, check=False)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[4:])
