#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Completions: made anew from --help they are as they are in the tree, and bash completes by them.

usage: test_completion.py KVFERRYD KVFERRY [unittest arguments]
"""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "packaging", "completion")
KVFERRYD, KVFERRY = sys.argv[1:3]
DEADLINE_S = 120


def bash(*words):
    """What bash offers for the last of these words."""
    script = ('. "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvferry; '
              'printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-euc", script, "bash", os.path.join(FOLDER, "kvferry"), *words],
                          capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout.split()


class Completion(unittest.TestCase):
    def test_fresh(self):
        done = subprocess.run(
            [sys.executable, "-B", os.path.join(FOLDER, "gen_completion.py"), "--check",
             "--kvferry", KVFERRY, "--kvferryd", KVFERRYD], capture_output=True, text=True,
            check=False, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_bash(self):
        self.assertEqual(bash("kvferry", "dis"), ["disable"])
        self.assertGreater(len(bash("kvferry", "")), 20)
        self.assertEqual(bash("/usr/bin/kvferry", "get", "--key-"), ["--key-text"])
        self.assertNotIn("--keep", bash("kvferry", "get", "--"))
        self.assertEqual(bash("kvferry", "stat", "--output", ""), ["text", "json"])
        self.assertEqual(bash("kvferry", "log-level", "d"), ["debug"])
        self.assertEqual(bash("kvferryd", "--print-o"), ["--print-options"])
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.yaml"), "w", encoding="utf-8"):
                pass
            self.assertEqual(bash("kvferryd", "--config", folder + "/c"), [folder + "/config.yaml"])
            self.assertEqual(bash("kvferry", "put", folder + "/c"), [folder + "/config.yaml"])

    @unittest.skipUnless(shutil.which("zsh"), "skipped: no zsh")
    def test_zsh(self):
        done = subprocess.run(["zsh", "-n", os.path.join(FOLDER, "_kvferry")], check=False,
                              capture_output=True, text=True, timeout=DEADLINE_S)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
