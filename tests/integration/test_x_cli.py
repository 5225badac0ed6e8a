#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry svd and kvferry plan as people meet them, on a small model made here.

usage: test_x_cli.py KVFERRY [unittest arguments]
"""
import array
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

KVFERRY = sys.argv[1]
DEADLINE_S = 200
LAYERS, D_MODEL, HEADS, DIM = 2, 64, 2, 8
KV_WIDTH = 2 * HEADS * DIM
CONFIG = {"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": D_MODEL,
          "num_attention_heads": 8, "num_key_value_heads": HEADS, "intermediate_size": 128}
HEADER_BYTES = 128


def run(*arguments, **environment):
    """Run kvferry to its end: (exit code, stdout, stderr)."""
    done = subprocess.run([KVFERRY, *arguments], capture_output=True, timeout=DEADLINE_S,
                          check=False, text=True, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


def make_model(folder):
    """Two layers in safetensors. Returns their matrices [W_K | W_V] as rows of kv_width."""
    generator = random.Random(20261130)
    header, data, layers = {}, b"", []
    for layer in range(LAYERS):
        rows = []
        for name in ("k_proj", "v_proj"):
            values = array.array("f", (generator.gauss(0, 1) for _ in range(HEADS * DIM * D_MODEL)))
            header[f"model.layers.{layer}.self_attn.{name}.weight"] = {
                "dtype": "F32", "shape": [HEADS * DIM, D_MODEL],
                "data_offsets": [len(data), len(data) + 4 * len(values)]}
            data += values.tobytes()
            rows += [values[i * D_MODEL:(i + 1) * D_MODEL] for i in range(HEADS * DIM)]
        layers.append(rows)
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)
    return layers


class Svd(unittest.TestCase):
    """The factors that the command writes, read as docs/x-cache.md has them."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.layers = make_model(self.folder)
        self.out = os.path.join(self.folder, "model.svd")

    def svd(self, *arguments):
        code, out, err = run("svd", self.folder, "--write", self.out, "-o", "json", *arguments)
        if code != 0 and "install OpenBLAS" in err:
            self.skipTest(err)
        self.assertEqual(code, 0, err)
        return json.loads(out)

    def test_factors_give_the_matrices_back(self):
        said = self.svd()
        with open(os.path.join(self.folder, "model.safetensors"), "rb") as file:
            digest = hashlib.sha256(file.read()).digest()
        self.assertEqual(said["weights_digest"], digest.hex())
        self.assertEqual((said["rank"], said["kv_width"]), (KV_WIDTH, KV_WIDTH))
        self.assertLess(said["orthogonality_error"], 1e-5)
        self.assertLess(said["residual"], 1e-5)
        with open(self.out, "rb") as file:
            blob = file.read()
        self.assertEqual(len(blob), said["bytes"])
        (magic, version, header_bytes, _, total, layer_bytes, n_layers, d_model, rank, kv_width,
         heads, dim_k, dim_v, dtype) = struct.unpack_from("<8sHHIQQIIIIHHHH", blob)
        self.assertEqual((magic, version, header_bytes), (b"KVFSV\0\0\0", 2, HEADER_BYTES))
        self.assertEqual((total, n_layers, d_model, rank, kv_width, heads, dim_k, dim_v, dtype),
                         (len(blob), LAYERS, D_MODEL, KV_WIDTH, KV_WIDTH, HEADS, DIM, DIM, 3))
        self.assertEqual(blob[56:88], digest)
        first = (HEADER_BYTES + 4 * LAYERS + 63) // 64 * 64
        factors = hashlib.sha256(blob[:12] + bytes(4) + blob[16:88] + bytes(40))
        for layer in range(LAYERS):
            factors.update(blob[first + layer * layer_bytes:][:4 * (D_MODEL + KV_WIDTH) * rank])
        self.assertEqual(said["factors_digest"], factors.hexdigest())
        self.assertEqual(blob[88:128], factors.digest() + bytes(8))
        for layer in range(LAYERS):
            values = array.array("f", blob[first + layer * layer_bytes:][:4 * (D_MODEL + KV_WIDTH)
                                                                         * rank])
            u, m = values[:D_MODEL * rank], values[D_MODEL * rank:]
            for i in (0, 7, D_MODEL - 1):
                for k in (0, 17, KV_WIDTH - 1):
                    product = sum(u[i * rank + r] * m[r * KV_WIDTH + k] for r in range(rank))
                    self.assertAlmostEqual(product, self.layers[layer][k][i], places=4)

    def test_a_rank_and_a_digest_can_be_said(self):
        said = self.svd("--rank", "9", "--weights-digest", "ab" * 32)
        self.assertEqual((said["rank"], said["weights_digest"]), (9, "ab" * 32))
        self.assertGreater(said["residual"], 0.1)

    def test_what_cannot_be_done_is_said(self):
        code, _, err = run("svd", self.folder, "--write", self.out, "--rank", str(KV_WIDTH + 1))
        if "install OpenBLAS" not in err:
            self.assertEqual((code, err), (2, "kvferry: --rank: at most 32: X has 64 elements, K "
                                              "and V 32\n"))
        code, _, err = run("svd", self.folder)
        self.assertEqual(code, 2)
        self.assertIn("where to --write", err)
        code, _, err = run("svd", self.folder, "--write", self.out, KVFERRY_BLAS="/nonexistent")
        self.assertEqual(code, 1)
        self.assertIn("install OpenBLAS", err)
        os.unlink(os.path.join(self.folder, "model.safetensors"))
        code, _, err = run("svd", self.folder, "--write", self.out)
        self.assertEqual(code, 1)
        self.assertEqual(os.path.exists(self.out), False)


class Plan(unittest.TestCase):
    """Sizes and times; the formulas are those of tests/unit/client/test_cost.c."""

    RATES = ("--link", "50", "--tflops", "600")
    LLAMA2 = ("--layers", "32", "--d-model", "4096", "--heads", "32", "--dim", "128", "--ffn",
              "11008")

    def plan(self, *arguments):
        code, out, err = run("plan", *self.RATES, "-o", "json", *arguments)
        self.assertEqual(code, 0, err)
        said = json.loads(out)
        return said, {row["profile"]: row for row in said["rows"]}

    def test_a_shape(self):
        said, rows = self.plan(*self.LLAMA2, "--fixed", "2")
        self.assertEqual(said["tokens"], 4096)
        self.assertEqual(said["model"]["query_heads"], 32)
        self.assertAlmostEqual(rows["raw"]["fetch_ms"], 42.95, places=2)
        self.assertEqual(rows["x4"]["stores"], "X")
        self.assertAlmostEqual(rows["x4"]["rebuild_ms"], 14.66, places=2)
        self.assertLess(rows["x4"]["total_ms"], 0.5 * rows["raw"]["total_ms"])
        self.assertNotIn("xgcl3", rows)
        least = min(said["rows"], key=lambda row: row["total_ms"])
        self.assertEqual(said["choice"], least["profile"])
        self.assertIn(said["choice_lossless"], ("raw", "exact"))

    def test_a_model_and_what_is_said_beside_it(self):
        with tempfile.TemporaryDirectory() as folder:
            make_model(folder)
            for path in (folder, os.path.join(folder, "config.json"),
                         os.path.join(folder, "model.safetensors")):
                said, rows = self.plan(path, "--profiles", "raw,balanced")
                self.assertEqual(said["model"], {"layers": LAYERS, "d_model": D_MODEL,
                                                 "query_heads": 8, "heads": HEADS, "dim_k": DIM,
                                                 "dim_v": DIM, "ffn_width": 128})
                self.assertEqual(list(rows), ["raw", "balanced"])
                self.assertEqual(rows["raw"]["bytes_a_token"], LAYERS * KV_WIDTH * 2)
            said, rows = self.plan(folder, "--heads", "8")
            self.assertEqual(said["model"]["heads"], 8)

    def test_computing_again_can_be_the_choice(self):
        code, out, err = run("plan", "--link", "0.001", "--tflops", "600", *self.LLAMA2)
        self.assertEqual(code, 0, err)
        self.assertIn("least time: recompute; without loss: recompute", out)
        self.assertIn("never", out)

    def test_what_cannot_be_planned_is_said(self):
        for arguments, words in (
                (self.LLAMA2, "--link and --tflops are needed"),
                (self.RATES, "name a model, or give --layers"),
                ((*self.RATES, *self.LLAMA2, "--profiles", "nothing"), "'nothing' is no profile"),
                ((*self.RATES, *self.LLAMA2, "--heads", "8", "--profiles", "xcl3"),
                 "X has 4096 elements a token and layer, K and V have 2048"),
                ((*self.RATES, "/nonexistent"), "No such file"),
                ((*self.RATES, "--layers", "513"), "from 1 to 512")):
            code, out, err = run("plan", *arguments)
            self.assertIn(code, (1, 2))
            self.assertEqual(out, "")
            self.assertIn(words, err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
