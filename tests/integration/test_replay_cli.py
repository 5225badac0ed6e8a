#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry replay and plan --trace, as people call them.

usage: test_replay_cli.py KVFERRY [unittest arguments]
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRACE = os.path.join(ROOT, "tests", "data", "trace", "mooncake-conversation-600.jsonl")
KVFERRY = sys.argv[1]
SHAPE = ["--layers", "32", "--d-model", "4096", "--heads", "8", "--query-heads", "32", "--dim",
         "128", "--ffn", "14336"]
DEADLINE_S = 120


def run(*arguments, data=""):
    done = subprocess.run([KVFERRY, *arguments], input=data, capture_output=True, text=True,
                          timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr


def rows(*arguments, data=""):
    code, out, err = run(*arguments, "-o", "json", data=data)
    if code != 0:
        raise AssertionError(err)
    return json.loads(out)


class Unbounded:
    """What leading blocks have been seen before, by a set."""

    def __init__(self):
        self.blocks = self.hits = self.tokens = self.hit_tokens = 0
        seen = set()
        with open(TRACE, encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                ids = line["hash_ids"]
                run_ = 0
                while run_ < len(ids) and ids[run_] in seen:
                    run_ += 1
                seen.update(ids)
                self.blocks += len(ids)
                self.hits += run_
                self.tokens += line["input_length"]
                self.hit_tokens += min(run_ * 512, line["input_length"])


class Replay(unittest.TestCase):
    def test_a_store_that_holds_all_hits_what_was_seen(self):
        truth = Unbounded()
        out = rows("replay", TRACE, "--bytes-a-token", "1000", "--dram", "16GiB")
        row = out["rows"][0]
        self.assertEqual(out["requests"], 600)
        self.assertEqual((out["blocks"], out["tokens"]), (truth.blocks, truth.tokens))
        self.assertEqual((row["hits_dram"], row["hits_nvme"]), (truth.hits, 0))
        self.assertEqual(row["tokens_dram"], truth.hit_tokens)
        self.assertGreater(truth.hits, 0)

    def test_a_drive_holds_what_memory_does_not(self):
        truth = Unbounded()
        row = rows("replay", TRACE, "--bytes-a-token", "1000", "--dram", "64MiB", "--nvme",
                   "16GiB")["rows"][0]
        self.assertLessEqual(row["hits_dram"] + row["hits_nvme"], truth.hits)
        self.assertGreater(row["hits_dram"] + row["hits_nvme"], 0.95 * truth.hits)
        self.assertGreater(row["hits_nvme"], 0)
        # all is written but the end of a prompt or two that are larger than memory
        self.assertLessEqual(row["writes"], row["puts"])
        self.assertGreater(row["writes"], 0.99 * row["puts"])
        self.assertEqual(row["written_bytes"], row["writes"] * row["record_bytes"])

    def test_smaller_records_hit_more(self):
        out = rows("replay", TRACE, *SHAPE, "--profiles", "raw,balanced", "--dram", "16GiB,256GiB")
        self.assertEqual([row["profile"] for row in out["rows"]],
                         ["raw", "raw", "balanced", "balanced"])
        raw, raw_more, balanced, _ = [row["tokens_dram"] for row in out["rows"]]
        self.assertGreater(balanced, raw)
        self.assertGreaterEqual(raw_more, raw)

    def test_a_budget_bounds_writes(self):
        free = rows("replay", TRACE, "--bytes-a-token", "100000", "--dram", "2GiB", "--nvme",
                    "2TiB")["rows"][0]
        for admission in ("auto", "all", "second-sight"):
            row = rows("replay", TRACE, "--bytes-a-token", "100000", "--dram", "2GiB", "--nvme",
                       "2TiB", "--write-budget", "10MiB", "--admission", admission)["rows"][0]
            self.assertLess(row["writes"], free["writes"])
            self.assertGreater(row["rejected"], 0)

    def test_standard_input_and_text(self):
        with open(TRACE, encoding="utf-8") as file:
            text = file.read()
        code, out, _ = run("replay", "-", "--bytes-a-token", "1000", "--dram", "1GiB", data=text)
        self.assertEqual(code, 0)
        self.assertIn("600 prompts", out)
        self.assertIn("hit dram", out)

    def test_a_plan_for_a_store(self):
        rates = ["--link", "50", "--tflops", "500", "--fixed", "2", "--drive", "10"]
        store = ["--trace", TRACE, "--dram", "16GiB", "--nvme", "1TiB"]
        out = rows("plan", *SHAPE, *rates, *store, "--profiles", "raw,balanced")
        raw, balanced = out["stores"]
        replayed = rows("replay", TRACE, *SHAPE, "--profiles", "balanced", *store[2:])["rows"][0]
        for name in ("tokens_dram", "tokens_nvme"):
            self.assertEqual(balanced[name], replayed[name])
        self.assertTrue(balanced["is_worth_it"])
        self.assertGreater(balanced["saved_s"], raw["saved_s"])
        self.assertLess(balanced["saved_s"], balanced["prefill_s"])
        self.assertGreater(balanced["hours_dram"], raw["hours_dram"])
        self.assertAlmostEqual(balanced["dwpd"],
                               balanced["written_tb_a_day"] * 1e12 / (1 << 40), places=3)
        self.assertGreater(raw["break_even_nvme_tokens"], raw["break_even_dram_tokens"])
        # a link that is slower than computing
        slow = rows("plan", *SHAPE, "--link", "0.001", "--tflops", "500", *store[:4],
                    "--profiles", "raw")["stores"][0]
        self.assertEqual((slow["is_worth_it"], slow["saved_s"]), (False, 0))
        self.assertIsNone(slow["hours_nvme"])
        text = run("plan", *SHAPE, "--link", "0.001", "--tflops", "500", *store[:4])[1]
        self.assertIn("not worth it", text)
        text = run("plan", *SHAPE, *rates, *store, "--dwpd", "0.001")[1]
        self.assertIn("wears the drive out", text)

    def test_plans_refused(self):
        plan = ["plan", *SHAPE, "--link", "50", "--tflops", "500", "--trace", TRACE]
        for code, text, arguments in (
                (2, "--trace needs --dram", []),
                (2, "--nvme needs --drive", ["--dram", "1GiB", "--nvme", "1TiB"]),
                (2, "replay takes lists", ["--dram", "1GiB,2GiB"])):
            got, _, err = run(*plan, *arguments)
            self.assertEqual(got, code, err)
            self.assertIn(text, err)
        plan = ["plan", "--link", "50", "--tflops", "500"]
        for code, text, arguments in (
                (2, "name one by --trace", [*SHAPE, "--dram", "1GiB"]),
                (2, "name one by --trace", [*SHAPE, "--dwpd", "3"]),
                (2, "8 K/V heads", [*SHAPE, "--heads", "8", "--query-heads", "3"]),
                (2, "--d-model", ["--layers", "4", "--heads", "4", "--dim", "64"])):
            got, _, err = run(*plan, *arguments)
            self.assertEqual(got, code, err)
            self.assertIn(text, err)

    def test_refusals(self):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as bad, \
                tempfile.NamedTemporaryFile("w", suffix=".jsonl") as far:
            far.write('{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}\n'
                      '{"timestamp": 1e15, "input_length": 600, "hash_ids": [1, 2]}\n')
            far.flush()
            bad.write('{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}\n'
                      '{"timestamp": 1, "input_length": 600, "hash_ids": [1]}\n')
            bad.flush()
            cases = [
                (2, "name a trace", []),
                (2, "--dram is needed", [TRACE]),
                (2, "name a model", [TRACE, "--dram", "1GiB"]),
                (2, "16 to ", [TRACE, "--dram", "1MiB", "--bytes-a-token", "1000"]),
                (2, "leave one of them out", [TRACE, "--dram", "1GiB", "--bytes-a-token", "1",
                                              "--profiles", "raw"]),
                (2, "neither auto", [TRACE, "--dram", "1GiB", "--admission", "never"]),
                (2, "no profile", [TRACE, "--dram", "1GiB", *SHAPE, "--profiles", "nothing"]),
                (1, bad.name + ":2: ", [bad.name, "--dram", "1GiB", "--bytes-a-token", "1000"]),
                (1, "hundred years", [far.name, "--dram", "1GiB", "--bytes-a-token", "1000"]),
                (1, "No such file", ["/nowhere", "--dram", "1GiB", "--bytes-a-token", "1000"]),
            ]
            for code, text, arguments in cases:
                got, _, err = run("replay", *arguments)
                self.assertEqual(got, code, (arguments, err))
                self.assertIn(text, err)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[2:])
