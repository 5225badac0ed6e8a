#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry inspect and kvferry calibrate as people meet them: captures of real models for the first,
captures of a made-up one for both, since committed captures have norms of queries and no queries.

usage: test_calibrate_cli.py KVFERRY [unittest arguments]
"""
import array
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KVFERRY = sys.argv[1]
SMOLLM2, QWEN = (os.path.join(ROOT, "tests", "data", "kv", name)
                 for name in ("smollm2-135m", "qwen2.5-coder-0.5b"))
DEADLINE_S = 240
SEED = 20261130
LAYERS, HEADS, Q_HEADS, TOKENS, DIM, QUERIES = 2, 1, 2, 256, 64, 8
BIAS = 200.0  # of a channel of the second layer's K, which varies by 1
WEIGHTS = "ab" * 32


def run(*arguments):
    """Run kvferry to its end: (exit code, stdout, stderr)."""
    done = subprocess.run([KVFERRY, *arguments], capture_output=True, timeout=DEADLINE_S,
                          check=False, text=True)
    return done.returncode, done.stdout, done.stderr


def bf16(values):
    """The upper halves of floats."""
    words = array.array("I", array.array("f", values).tobytes())
    halves = array.array("H", (min(word + 0x8000, 0xFFFFFFFF) >> 16 for word in words))
    return halves.tobytes()


def make_capture(folder, seed, n_tokens=TOKENS):
    """K, V and Q of two layers; the second one's K has a bias as Qwen2.5's first layers have."""
    os.makedirs(folder)
    generator = random.Random(seed)
    lines = []
    for name, heads, tokens in (("k_post", HEADS, n_tokens), ("v", HEADS, n_tokens),
                                ("q", Q_HEADS, QUERIES)):
        values = [generator.gauss(0, 1) for _ in range(LAYERS * heads * tokens * DIM)]
        if name == "k_post":
            for i in range(len(values) // 2 + 5, len(values), DIM):
                values[i] += BIAS
        raw = bf16(values)
        with open(os.path.join(folder, name + ".bf16"), "wb") as file:
            file.write(raw)
        lines.append(f"{name} 0 {LAYERS} {heads} {tokens} {DIM} bf16 {len(raw)} {name}.bf16\n")
    with open(os.path.join(folder, "index.txt"), "w", encoding="utf-8") as file:
        file.writelines(lines)
    facts = {"model": "made <up>", "weights_digest": WEIGHTS, "workload": "code",
             "q_tokens": [(i + 1) * n_tokens // QUERIES - 1 for i in range(QUERIES)]}
    with open(os.path.join(folder, "manifest.json"), "w", encoding="utf-8") as file:
        json.dump(facts, file)


class Inspect(unittest.TestCase):
    def inspect(self, *arguments):
        code, out, err = run("inspect", *arguments)
        self.assertEqual((code, err), (0, ""))
        return out

    def heads(self, *arguments):
        report = json.loads(self.inspect("-o", "json", *arguments))
        return report, {(row["layer"], row["head"]): row for row in report["heads"]}

    def test_a_profile_for_x_is_refused(self):
        code, out, err = run("inspect", "--profile", "x4", SMOLLM2)
        self.assertEqual((code, out), (2, ""))
        self.assertIn("'x4' is for X and XG, and captures hold K and V", err)

    def test_real_models(self):
        report, smollm2 = self.heads(SMOLLM2)
        self.assertEqual((report["profile"], report["queries"]), ("balanced", "captured"))
        self.assertEqual(len(smollm2), 30 * 3)
        for row in smollm2.values():
            # 4 bits of rotated data: as much as codecs.md's theory says, or a little less
            self.assertLess(row["v"]["relative_error"], 0.0095)
            self.assertLess(row["k"]["relative_error_centred"], 0.0095)
            self.assertGreater(row["v"]["cosine"], 0.995)
            self.assertLess(row["k"]["kurtosis_rotated"], 4)
            self.assertAlmostEqual(row["norm_ratio"], row["k"]["norm"] / row["v"]["norm"], 4)
            self.assertEqual(row["v_bits"], 4)
        _, qwen = self.heads(QWEN)
        self.assertEqual(len(qwen), 24 * 2)
        # the norms that tests/data/kv/README.md tells
        self.assertGreater(qwen[0, 0]["norm_ratio"], 1400)
        self.assertEqual(qwen[0, 0]["k_bits_by_ratio"], 8)
        self.assertGreaterEqual(qwen[0, 1]["k_bits"], 8)
        # errors of K and of V are far apart in absolute terms, and alike in relative ones
        self.assertGreater(qwen[1, 0]["k"]["mse"], 20 * qwen[1, 0]["v"]["mse"])
        self.assertLess(qwen[1, 0]["k"]["relative_error_centred"],
                        2 * qwen[1, 0]["v"]["relative_error"])

    def test_means_left_in_are_noise(self):
        _, centred = self.heads(QWEN)
        _, plain = self.heads(QWEN, "--profile", "saw4-paper")
        for place in ((0, 0), (1, 1), (2, 1), (8, 0)):
            self.assertGreater(plain[place]["sigma_median"], 0.5)
            self.assertGreater(plain[place]["sigma_median"], 3 * centred[place]["sigma_median"])

    def test_profiles_and_table(self):
        text = self.inspect(SMOLLM2, "--profile", "exact")
        rows = [line.split() for line in text.splitlines() if line[:5].strip().isdigit()]
        self.assertEqual(len(rows), 90)
        for row in rows:
            self.assertEqual((float(row[9]), float(row[12]), float(row[15])), (0, 0, 0))

    def test_drawing(self):
        with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
            capture = os.path.join(folder, "a")
            make_capture(capture, SEED)
            path = os.path.join(folder, "out.svg")
            self.inspect(capture, "--svg", path)
            root = xml.etree.ElementTree.parse(path).getroot()
            cells = [rect for rect in root if len(rect) == 1]
            self.assertEqual(len(cells), 8 * LAYERS * HEADS)
            self.assertIn("made <up>", root[1].text)
            code, _, err = run("inspect", capture, "--svg", os.path.join(folder, "no", "out.svg"))
            self.assertEqual(code, 1)
            self.assertIn("No such file", err)

    def test_usage(self):
        for arguments, what in (((), "captures"), ((SMOLLM2, "--profile", "bytes"), "bytes"),
                                ((SMOLLM2, "--profile", "none"), "none"),
                                ((SMOLLM2, "--socket", "x"), "--socket")):
            code, out, err = run("inspect", *arguments)
            self.assertEqual((code, out), (2, ""))
            self.assertIn(what, err)
        code, _, err = run("inspect", os.path.join(ROOT, "tests", "integration"))
        self.assertEqual(code, 1)
        self.assertIn("index.txt", err)


class Calibrate(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvferry-test-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.captures = os.path.join(self.folder, "captures")
        self.heldout = os.path.join(self.folder, "heldout")
        for i in range(2):
            make_capture(os.path.join(self.captures, f"window{i}"), SEED + i)
        make_capture(self.heldout, SEED + 2)
        self.file = os.path.join(self.folder, "profile.json")
        print(f"seed {SEED}")

    def calibrate(self, *arguments):
        return run("calibrate", "--heldout", self.heldout, *arguments)

    def made(self, *arguments):
        code, out, err = self.calibrate("--capture", self.captures, "--write", self.file,
                                        "--output-error", "0.1", "--top1", "0.5", "--codecs",
                                        "saw", *arguments)
        self.assertEqual((code, err), (0, ""), out)
        with open(self.file, encoding="utf-8") as file:
            return json.load(file), out

    def test_a_profile_is_found(self):
        profile, out = self.made("--name", "made-up")
        self.assertIn("passed", out)
        self.assertEqual(profile["name"], "made-up")
        self.assertEqual(profile["weights_digest"], WEIGHTS)
        self.assertEqual(profile["workload"], ["code"])
        self.assertEqual(len(profile["layers"]), LAYERS)
        self.assertEqual(profile["sink_tokens"], 4)
        evidence = profile["evidence"]
        self.assertTrue(evidence["passed"])
        self.assertEqual(evidence["mode"], "ladder")
        self.assertEqual(evidence["thresholds"]["output_error"], 0.1)
        self.assertEqual([row["name"] for row in evidence["captures"]], ["window0", "window1"])
        self.assertEqual(evidence["heldout"][0]["tokens"], TOKENS)
        self.assertEqual(evidence["queries_compared"], LAYERS * Q_HEADS * QUERIES)
        self.assertLessEqual(evidence["output_error_worst_layer"], 0.1)
        self.assertGreater(evidence["ratio_to_16_bits"], 2)
        digest = hashlib.sha256()
        for name in ("index.txt", "k_post.bf16", "v.bf16", "q.bf16"):
            with open(os.path.join(self.heldout, name), "rb") as file:
                digest.update(file.read())
        self.assertEqual(evidence["heldout"][0]["sha256"], digest.hexdigest())

    def test_same_captures_same_profile(self):
        first, _ = self.made("--threads", "1")
        second, _ = self.made("--threads", "2")
        self.assertEqual(first, second)

    def test_a_budget_is_divided(self):
        profile, _ = self.made("--target-bits", "6.5", "--output-error", "0.2",
                               "--sigma-median", "1", "--sigma-p99", "2")
        self.assertEqual(profile["evidence"]["mode"], "target-bits")
        # held-out captures are first chunks, whose sinks come on top
        self.assertLessEqual(profile["evidence"]["bits_a_value"], 6.6)
        self.assertGreater(profile["evidence"]["bits_a_value"], 5)

    def test_nothing_is_written_unless_it_passes(self):
        code, out, err = self.calibrate("--capture", self.captures, "--write", self.file,
                                        "--target-bits", "3.7", "--codecs", "saw")
        self.assertEqual(code, 1)
        self.assertIn("FAILS: ", out)
        self.assertIn("nothing was written", err)
        self.assertFalse(os.path.exists(self.file))

    def test_profiles_of_the_release_are_checked(self):
        limits = ("--output-error", "0.2", "--top1", "0.5")
        code, out, _ = self.calibrate("--profile", "saw4-paper", "--write", self.file, *limits)
        self.assertEqual(code, 1)
        self.assertIn("logit noise", out.splitlines()[2])  # layer 1
        self.assertNotIn("logit noise", out.splitlines()[1])
        self.assertFalse(os.path.exists(self.file))
        code, out, _ = self.calibrate("--profile", "safe", "--write", self.file, "-o", "json",
                                      *limits)
        self.assertEqual(code, 0, out)
        self.assertTrue(json.loads(out)["passed"])
        with open(self.file, encoding="utf-8") as file:
            profile = json.load(file)
        self.assertEqual(profile["name"], "safe")
        self.assertNotIn("kinds", profile)
        self.assertEqual(profile["evidence"]["mode"], "check")

    def test_the_model_is_named_by_a_file(self):
        weights = os.path.join(self.folder, "weights")
        with open(weights, "wb") as file:
            file.write(b"weights")
        profile, _ = self.made("--weights", weights, "--workload", "chat")
        self.assertEqual(profile["weights_digest"], hashlib.sha256(b"weights").hexdigest())
        self.assertEqual(profile["workload"], ["chat"])

    def test_usage(self):
        wrong = (
            (("--capture", self.heldout), "other texts"),
            ((), "--capture is missing"),
            (("--capture", self.captures, "--profile", "safe"), "--heldout alone"),
            (("--profile", "exact"), "no lossy profile"),
            (("--profile", "bytes"), "no lossy profile"),
            (("--profile", "xcl3"), "'xcl3' is for X, and captures hold K and V"),
            (("--profile", "xgcl2"), "allow_uncalibrated with the flag of attach"),
            (("--capture", self.captures, "--workload", "poems"), "poems"),
            (("--capture", self.captures, "--name", "balanced"), "--name"),
            (("--capture", self.captures, "--codecs", "zip"), "--codecs"),
            (("--capture", self.captures, "--top1", "1.5"), "--top1"),
            (("--capture", self.captures, "--weights-digest", "12"), "--weights-digest"),
        )
        for arguments, what in wrong:
            code, _, err = self.calibrate(*arguments)
            self.assertEqual(code, 2, err)
            self.assertIn(what, err)
        code, _, err = run("calibrate", "--capture", self.captures)
        self.assertEqual(code, 2)
        self.assertIn("--heldout is missing", err)

    def test_what_cannot_be_checked_does_not_pass(self):
        short = os.path.join(self.folder, "short")
        make_capture(short, SEED, TOKENS - 1)
        code, _, err = run("calibrate", "--profile", "safe", "--heldout", short)
        self.assertEqual(code, 1)
        self.assertIn("255 tokens; a block has 256", err)
        code, _, err = run("calibrate", "--profile", "safe", "--heldout", SMOLLM2, "--workload",
                           "other", "--weights-digest", WEIGHTS)
        self.assertEqual(code, 1)
        self.assertIn("without queries", err)
        code, _, err = self.calibrate("--capture", self.captures, "--rope-state", "pre")
        self.assertEqual(code, 1)
        self.assertIn("K before RoPE", err)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
