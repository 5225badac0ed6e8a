#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry-llama over a stand-in for llama.cpp, with a real daemon: hits are of the right tokens,
whatever becomes of the daemon every request ends with the answer that it would have without it, and
what is not served is refused in words.

    test_llama.py KVFERRYD KVFERRY_LLAMA
"""
import os
import re
import socket
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))

from llama_server import Server  # noqa: E402
from logged import SMALL, DaemonCase  # noqa: E402

KVFERRYD, PROGRAM = sys.argv[1:3]
CHUNK = 16
BUDGET_MS = 60_000  # no verdict depends on how fast the machine is
WAIT_S = 150


def ids(n, seed=0):
    return [(seed * 89 + i * 7 + i * i) % 250 for i in range(n)]


class LlamaCase(DaemonCase):
    FOLDER = "kvferry-llama-"
    SMALL = (*SMALL, "clients.max=32")

    def setUp(self):
        super().setUp()
        self.server_log = os.path.join(self.folder, "server.log")
        self.settings = os.environ.copy()

    def start(self, *sets):
        self.daemon = self.start_daemon(KVFERRYD, *sets)

    def kill(self):
        self.daemon.kill()
        self.daemon.wait()

    def model(self, text="salt 1\n", name="m.gguf"):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def until(self, attempt, server):
        """Attempt again and again until it is true: a daemon that has not been able to run for some
        seconds is a miss."""
        end = time.monotonic() + WAIT_S
        while not (good := attempt()):
            self.assertLess(time.monotonic(), end, server.said() + self.log_text())
            time.sleep(0.02)
        return good

    def serve_attached(self, *arguments, model=None):
        """A server that knows that the daemon is there."""
        server = self.serve(*arguments, model=model)
        self.until(lambda: server.complete([1], 0)["profile"] != "", server)
        return server

    def serve(self, *arguments, model=None):
        server = Server(PROGRAM, self.server_log, "--model", model or self.model(), "--socket",
                        self.socket, "--chunk-tokens", str(CHUNK), "--ctx-tokens", "256",
                        "--threads", "1", "--load-budget-ms", str(BUDGET_MS), *arguments)
        self.addCleanup(server.kill)
        return server

    def refused(self, *arguments, model=None, env=None):
        """(exit code, what it says) of one that does not start."""
        done = subprocess.run(
            [PROGRAM, "--listen", "127.0.0.1:0", "--model", model or self.model(), *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={**os.environ, **(env or {})})
        return done.returncode, done.stdout + done.stderr

    def alone(self, server, prompt, n=8):
        """The answer without the daemon and without the slot."""
        server.forget()
        return server.complete(prompt, n, load=False, store=False)

    def hit(self, server, prompt, wanted, n=8):
        """Ask until so many tokens are hit; the answer is right each time."""
        right = self.alone(server, prompt, n)

        def ask():
            server.forget()
            answer = server.complete(prompt, n, store=False)
            self.assertEqual(answer["tokens"], right["tokens"])
            self.assertEqual(answer["logprobs"], right["logprobs"])
            return answer if answer["hit_tokens"] == wanted else None

        return self.until(ask, server)


class TestHits(LlamaCase):
    def test_prefixes(self):
        self.start()
        server = self.serve_attached()
        prompt = ids(100)
        first = server.complete(prompt, 8)
        self.assertEqual((first["hit_tokens"], first["local_tokens"], first["tier"]), (0, 0, ""))
        self.assertEqual(first["prompt_tokens"], 100)
        answer = self.hit(server, prompt, 96)
        self.assertEqual((answer["tier"], answer["profile"]), ("dram", "exact"))
        # whole chunks of another prompt that begins so; and the last token of a prompt is computed
        self.hit(server, prompt[:50] + ids(30, 5), 48)
        self.hit(server, prompt[:64], 63)
        self.hit(server, prompt[:16], 15)
        self.hit(server, prompt[:15], 0)
        self.hit(server, [9] + prompt, 0)
        facts = server.request("/health")[1]
        self.assertEqual((facts["stored_chunks"], facts["refused_chunks"]), (6, 0))
        self.assertEqual(server.stop(), 0)

    def test_slot_goes_before(self):
        self.start()
        server = self.serve_attached()
        prompt = ids(90)
        right = self.alone(server, prompt)["tokens"]
        server.forget()
        server.complete(prompt, 8)
        self.hit(server, prompt, 80)

        def ask(kept, asked):
            """(from the daemon, from the slot) of a prompt when the slot has another one."""
            server.forget()
            server.complete(kept, 0, load=False, store=False)
            answer = server.complete(asked, 8, store=False)
            if asked == prompt:
                self.assertEqual(answer["tokens"], right)
            return answer["hit_tokens"], answer["local_tokens"]

        self.until(lambda: ask(prompt, prompt) == (0, 89), server)
        # the slot has less than the daemon
        self.until(lambda: ask(prompt[:20] + [3], prompt) == (80, 0), server)
        # and more
        self.until(lambda: ask(prompt, prompt + ids(4, 3)) == (0, 90), server)

    def test_slots(self):
        """Prompts in turns, each in a slot of its own."""
        self.start()
        server = self.serve_attached("--slots", "3")
        prompts = [ids(70, seed) for seed in range(3)]
        for prompt in prompts:
            self.assertEqual(server.complete(prompt, 4)["local_tokens"], 0)
        for prompt in prompts:
            self.assertEqual(server.complete(prompt, 4)["local_tokens"], 69)
        right = self.alone(self.serve(), prompts[0], 4)["tokens"]

        def ask():
            """Others take all slots; then the first one, which the daemon has."""
            for seed in (7, 8, 9):
                server.complete(ids(70, seed), 4)
            answer = server.complete(prompts[0], 4)
            self.assertEqual(answer["tokens"], right)
            return (answer["hit_tokens"], answer["local_tokens"]) == (64, 0)

        self.until(ask, server)

    def test_what_is_stored(self):
        self.start()
        prompt = ids(40)
        none = self.serve_attached("--store", "none")
        none.complete(prompt, 30)
        none.forget()
        self.assertEqual(none.request("/health")[1]["stored_chunks"], 0)
        every = self.serve_attached("--store", "all")
        answer = every.complete(prompt, 30)
        self.hit(every, prompt + answer["tokens"], 64)
        every.forget()
        asked = every.complete(ids(40, 4), 2, store=False)
        self.assertEqual(asked["hit_tokens"], 0)
        self.hit(every, ids(40, 4), 0)

    def test_names(self):
        """Other weights in a file of the same name, other labels, chunks or types: no hit."""
        self.start()
        prompt = ids(70)
        self.serve_attached().complete(prompt, 1)
        self.hit(self.serve_attached(), prompt, 64)
        self.hit(self.serve_attached(model=self.model("salt 2\n")), prompt, 0)
        self.hit(self.serve_attached("--namespace", "another"), prompt, 0)
        self.hit(self.serve_attached("--chunk-tokens", "8"), prompt, 0)
        self.hit(self.serve_attached("--kv-type", "bf16"), prompt, 0)
        self.hit(self.serve_attached(), prompt, 64)

    def test_many_at_once(self):
        self.start()
        server = self.serve_attached("--slots", "2")
        rights = [self.alone(server, ids(60, seed), 4)["tokens"] for seed in range(4)]
        answers = []

        def run(seed):
            for _ in range(4):
                answers.append(server.complete(ids(60, seed), 4)["tokens"] == rights[seed])

        threads = [threading.Thread(target=run, args=(i % 4,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(answers, [True] * 32)


class TestDaemon(LlamaCase):
    def test_comes_and_goes(self):
        server = self.serve()
        prompt = ids(70)
        right = self.alone(server, prompt)["tokens"]
        self.assertIn("requests are computed meanwhile", server.said())

        def ask(**more):
            server.forget()
            answer = server.complete(prompt, 8, **more)
            self.assertEqual(answer["tokens"], right)
            return answer

        self.assertEqual(ask()["hit_tokens"], 0)
        self.start()
        self.until(lambda: ask() and server.request("/health")[1]["stored_chunks"] == 4, server)
        self.hit(server, prompt, 64)
        for _ in range(2):
            self.kill()
            self.assertEqual(ask()["hit_tokens"], 0)
            self.start()
            self.until(lambda: ask()["hit_tokens"] == 64, server)

    def engine_tokens(self):
        """What the daemon has been told of tokens of prompts, by source."""
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(self.socket + ".admin")
            link.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = b"".join(iter(lambda: link.recv(1 << 16), b"")).decode()
        return {source: int(re.search(
            rf"^kvferry_engine_prompt_tokens_{source}_total (\d+)$", text, re.MULTILINE)[1])
            for source in ("computed", "cached", "loaded")}

    def test_the_daemon_is_told(self):
        self.start()
        server = self.serve_attached()
        prompt = ids(70)
        server.complete(prompt, 1)
        self.hit(server, prompt, 64)
        server.complete(prompt, 1)

        def told():
            server.forget()
            tokens = self.engine_tokens()
            return tokens["computed"] >= 76 and tokens["cached"] >= 69 and (
                tokens["loaded"] >= 64 and tokens["loaded"] % 64 == 0)

        self.until(told, server)

    def serve_loaded(self, prompt, profile):
        """A server whose slot has a prompt, the first 64 tokens loaded by a profile with loss."""
        self.start("allow_uncalibrated=true")
        server = self.serve_attached("--profile", profile, "--allow-uncalibrated",
                                     model=self.model("dim 64\n"))
        server.complete(prompt, 1)

        def load():
            server.forget()
            answer = server.complete(prompt, 1, store=False)
            return (answer["hit_tokens"], answer["profile"]) == (64, profile)

        self.until(load, server)
        return server

    def test_taint(self):
        """What is computed behind a lossy prefix is no block of a profile without loss."""
        prompt = ids(70)
        server = self.serve_loaded(prompt, "saw8")
        # the daemon comes back without that profile; the slot still has the prefix
        self.kill()
        self.start()

        def extend():
            answer = server.complete(prompt + ids(40, 3), 1)
            self.assertGreaterEqual(answer["local_tokens"], 70)
            return answer["profile"] == "exact"

        self.until(extend, server)
        before = server.request("/health")[1]["stored_chunks"]
        server.complete(prompt + ids(40, 3), 1)
        server.complete(prompt + ids(40, 4), 1)
        server.forget()
        self.assertEqual(server.request("/health")[1]["stored_chunks"], before)

        def anew():
            """Computed from its first token on it is one."""
            server.forget()
            server.complete(prompt + ids(40, 3), 1, load=False)
            server.forget()
            return server.request("/health")[1]["stored_chunks"] == before + 6

        self.until(anew, server)

    def test_what_was_loaded_is_not_stored_again(self):
        """It would lose more each time: the daemon that has lost it gets what was computed."""
        prompt = ids(70)
        server = self.serve_loaded(prompt, "balanced")
        self.kill()
        os.remove(os.path.join(self.folder, "nvme.store"))
        self.start("allow_uncalibrated=true")

        def stored(asked):
            """(what the slot had, chunks stored) of a prompt that begins as the slot does."""
            before = server.request("/health")[1]["stored_chunks"]
            answer = server.complete(asked, 1)
            server.complete(asked, 0, load=False, store=False)  # behind the store
            return answer["local_tokens"], server.request("/health")[1]["stored_chunks"] - before

        chunks = self.until(lambda: stored(prompt + ids(40, 3))[1], server)
        self.assertEqual(chunks, 2)  # of 6
        # a prefix that ends inside of what was loaded is left where a chunk ends
        self.assertEqual(stored(prompt[:40] + ids(40, 5)), (32, 3))


class TestRefusals(LlamaCase):
    def test_models(self):
        for text, words in (
                ("swa 512\n", "sliding windows of 512 tokens"),
                ("recurrent 1\n", "recurrent layers"), ("hybrid 1\n", "recurrent layers"),
                ("encoder 1\n", "no decoder"), ("diffusion 1\n", "no decoder"),
                ("rope 8\n", "M-RoPE"), ("rope 40\n", "M-RoPE"),
                ("parts 3\n", "in 3 files: merge them"),
                ("no_memory 1\n", "keeps no K and V"),
                ("type 8\n", "of ggml's type 8"),
                ("transposed 1\n", "turn flash attention on"),
                ("no_v 1\n", "MLA is not served"),
                ("behind 40\n", "40 bytes follow K and V"),
                ("odd_row 1\n", "not those of 2 heads"),
                ("ubatch 7\n", "computes 7 tokens at once"),
                ("fail_at 1\n", "llama_decode answers -3"),
                ("forgets 1\n", "does not read as it was written")):
            code, said = self.refused("--chunk-tokens", "16", model=self.model(text))
            self.assertEqual(code, 1, said)
            self.assertIn(words, said)
            self.assertEqual(said.count("error: "), 1, said)
        code, said = self.refused(model=os.path.join(self.folder, "none.gguf"))
        self.assertEqual(code, 1)
        self.assertIn("cannot load it as a model", said)

    def test_versions(self):
        code, said = self.refused(env={"KVF_STANDIN_VERSION": "0.6.0"})
        self.assertEqual(code, 1)
        self.assertIn("llama.cpp 0.6.0 has not been tested", said)
        self.assertIn("--allow-untested", said)
        os.environ["KVF_STANDIN_VERSION"] = "0.6.0"
        self.addCleanup(os.environ.pop, "KVF_STANDIN_VERSION")
        server = self.serve("--allow-untested")
        self.assertIn("has not been tested", server.said())
        self.assertEqual(server.stop(), 0)

    def test_options(self):
        for arguments, words in (
                (("--slots", "0"), "--slots 0: a number from 1 to 64"),
                (("--slots", "2x"), "--slots 2x"),
                (("--chunk-tokens", "257"), "a number from 1 to 256"),
                (("--chunk-tokens", "-1"), "a number from 1 to 256"),
                (("--threads", "99999999999999999999"), "a number from"),
                (("--store", "some"), "prompt, all or none"),
                (("--kv-type", "q8_0"), "quantized are not served"),
                (("--listen", "8080"), "127.0.0.1:8080"),
                (("--listen", "localhost:8080"), "127.0.0.1:8080"),
                (("--listen", "127.0.0.1:65536"), "127.0.0.1:8080"),
                (("--nothing",), "try --help"), (("something",), "an option is wanted")):
            code, said = self.refused(*arguments)
            self.assertEqual(code, 2, said)
            self.assertIn(words, said)
        done = subprocess.run([PROGRAM], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--model is needed", done.stderr)
        for option, words in (("--help", "usage: kvferry-llama"), ("--version", "kvferry-llama ")):
            done = subprocess.run([PROGRAM, option], capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(words, done.stdout)

    def test_port_in_use(self):
        server = self.serve()
        address = server.url[len("http://"):]
        code, said = self.refused("--listen", address)
        self.assertEqual(code, 1)
        self.assertIn(f"--listen {address}: Address already in use", said)


class TestHttp(LlamaCase):
    def test_bad_requests(self):
        server = self.serve()
        good = {"prompt": [1, 2, 3], "n_predict": 1}
        for body, words in (
                ([], "no JSON object"), ({}, "prompt is missing"),
                ({**good, "prompt": 7}, "a text or a list of tokens"),
                ({**good, "prompt": []}, "the prompt has no tokens"),
                ({**good, "prompt": [1, -1]}, "prompt: a whole number"),
                ({**good, "prompt": [1, "a"]}, "prompt: a whole number"),
                ({**good, "prompt": [1, 300]}, "token 1 of the prompt is 300, not 0 to 299"),
                ({**good, "n_predict": 1.5}, "n_predict: a whole number"),
                ({**good, "n_predict": 254}, "more than the 256 of a slot"),
                ({**good, "temperature": 0.7}, "temperature: only 0"),
                ({**good, "load": 1}, "load: true or false"),
                ({**good, "budget_ms": -1}, "budget_ms: a whole number"),
                ({**good, "stream": True}, "stream: not known")):
            status, answer = server.request("/completion", body)
            self.assertEqual(status, 400, answer)
            self.assertIn(words, answer["error"])
        self.assertEqual(server.request("/completion", {**good, "temperature": 0.0})[0], 200)
        self.assertEqual(server.request("/nothing")[0], 404)
        self.assertEqual(server.request("/completion")[0], 405)
        self.assertEqual(server.request("/health", {})[0], 405)
        self.assertEqual(server.request("/tokenize", {"text": 5})[0], 400)
        self.assertEqual(server.request("/completion", {"prompt": "x" * (17 << 20)})[0], 413)
        self.assertEqual(server.complete([1, 2, 3], 1)["prompt_tokens"], 3)

    def test_text(self):
        server = self.serve()
        self.assertEqual(server.tokens("hi"), [256, 104, 105])
        a, b = server.complete("hi there", 20), server.complete(server.tokens("hi there"), 20)
        self.assertEqual((a["tokens"], a["text"]), (b["tokens"], b["text"]))
        # a byte that is no character is a '?'
        self.assertEqual(len(a["text"].encode()), len(a["tokens"]))
        self.assertEqual(server.request("/completion", {"prompt": "hi"})[1].get("logprobs"), None)

    def test_llama_fails(self):
        """A request that llama.cpp cannot compute ends with an error, the next one does not."""
        server = self.serve(model=self.model("fail_at 40\n"))
        status, answer = server.request("/completion", {"prompt": ids(60)})
        self.assertEqual(status, 500)
        self.assertIn("llama_decode answers -3 at token 32", answer["error"])
        self.assertEqual(len(server.complete(ids(30), 4)["tokens"]), 4)

    def test_ends_under_way(self):
        """SIGTERM: the request that runs and those that wait are answered, and the exit is 0."""
        server = self.serve(model=self.model("sleep_ms 20\n"))
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(
            server.request("/completion", {"prompt": ids(20), "n_predict": 230})))
            for _ in range(3)]
        for thread in threads:
            thread.start()
        while not answers and server.request("/health")[1]["waiting"] < 2:
            time.sleep(0.01)
        self.assertEqual(server.stop(), 0)
        for thread in threads:
            thread.join()
        self.assertEqual(len(answers), 3)
        for status, answer in answers:
            self.assertTrue(status == 200 or (status == 503 and "ends" in answer["error"]), answer)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
