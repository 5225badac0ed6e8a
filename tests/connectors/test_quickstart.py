#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The quickstart without vLLM: a stand-in that stores its prompt's chunks in a real kvferryd, and
finds them the next time, or says that it has.

usage: test_quickstart.py KVFERRYD BUILD_FOLDER [unittest arguments]
"""
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
QUICKSTART = os.path.join(HERE, "..", "..", "connectors", "quickstart.sh")
BUILD = sys.argv[2]

VLLM = '''
import os
from types import SimpleNamespace
import kvferry
from vllm.config import KVTransferConfig


class SamplingParams:
    def __init__(self, **given):
        self.max_tokens = given["max_tokens"]


class LLM:
    def __init__(self, model, kv_transfer_config, **_):
        self.extra = kv_transfer_config.given["kv_connector_extra_config"]

    def generate(self, prompts, params):
        tokens = prompts[0]["prompt_token_ids"]
        size = self.extra["chunk_tokens"]
        chunks = [bytes(str(tokens[i:i + size]), "ascii") for i in
                  range(0, len(tokens) // size * size, size)]
        keys = [chunk[:64].ljust(64, b".") for chunk in chunks]
        with kvferry.Client(self.extra["socket"]) as client:
            found = client.lookup(keys).run_chunks
            client.put([kvferry.Put(key, data=chunk) for key, chunk in zip(keys, chunks)])
        hit = 0 if "no hit" in os.environ["LIE"] else found * size
        answer = [7] * params.max_tokens
        if found and "another answer" in os.environ["LIE"]:
            answer[0] = 8
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)],
                                kv_transfer_params={"kvferry.hit_tokens": hit,
                                                    "kvferry.tier": "dram" if hit else ""})]
'''
CONFIG = '''
class KVTransferConfig:
    def __init__(self, **given):
        self.given = given
'''


class Quickstart(unittest.TestCase):
    def call(self, *arguments, with_vllm=True, lie=""):
        with tempfile.TemporaryDirectory(prefix="kvferry-quickstart-") as folder:
            path = [os.path.join(BUILD, "connectors", "python")]
            if with_vllm:
                package = os.path.join(folder, "vllm")
                os.mkdir(package)
                for name, text in (("__init__.py", VLLM), ("config.py", CONFIG)):
                    with open(os.path.join(package, name), "w", encoding="utf-8") as file:
                        file.write(text)
                path.insert(0, folder)
            done = subprocess.run(
                [QUICKSTART, "--model", "m", *(arguments or ("--build", BUILD))],
                capture_output=True, text=True, check=False,
                env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ":".join(path),
                     "LIE": lie})
        return done.returncode, done.stdout, done.stderr

    def test_a_hit_is_forced_and_shown(self):
        code, said, errors = self.call()
        self.assertEqual(code, 0, said + errors)
        self.assertIn("ok    first engine: tokens from kvferry: 0, expected 0", said)
        self.assertIn("ok    second engine: tokens from kvferry: 512, expected 512", said)
        self.assertIn("kvferry works here", said)

    def test_no_hit_and_another_answer_are_failures(self):
        code, said, _ = self.call(lie="no hit, another answer")
        self.assertEqual(code, 1, said)
        self.assertIn("WRONG second engine: tokens from kvferry: 0, expected 512", said)
        self.assertIn("WRONG second engine: its answer: [8, 7", said)

    def test_what_is_missing_is_named(self):
        code, _, errors = self.call("--build", HERE)
        self.assertEqual(code, 2)
        self.assertIn("build kvferry (make build) and name the folder by --build", errors)

    @unittest.skipIf(subprocess.run([sys.executable, "-c", "import vllm"], check=False,
                                    stderr=subprocess.DEVNULL).returncode == 0, "vLLM is here")
    def test_no_vllm(self):
        code, _, errors = self.call(with_vllm=False)
        self.assertEqual(code, 2)
        self.assertIn("has no vllm: install it", errors)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
