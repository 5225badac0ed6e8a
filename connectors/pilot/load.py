# SPDX-License-Identifier: Apache-2.0
"""The pilot's prompts, and what a server makes of them: times to the first token and between
tokens, hits, and what was answered."""
import hashlib
import http.client
import json
import queue
import random
import threading
import time
import urllib.request

REQUEST_S = 600
FIRST_TOKEN = 1000
COUNTERS = {"queried_tokens": "vllm:prefix_cache_queries",
            "gpu_hit_tokens": "vllm:prefix_cache_hits",
            "external_hit_tokens": "vllm:external_prefix_cache_hits"}


class Failed(Exception):
    """The server does not answer as it should; the text says how."""


def prompts(options):
    """(round, document, tokens) in the order in which they are asked; the same for every run."""
    generator = random.Random(options.seed + 1)

    def tokens(n):
        return [generator.randrange(FIRST_TOKEN, options.vocabulary) for _ in range(n)]
    documents = [tokens(options.document_tokens) for _ in range(options.documents)]
    asked = []
    for number in range(options.rounds + 1):
        order = list(range(options.documents))
        if number > 0:
            generator.shuffle(order)
        asked.append([(number, document, documents[document] + tokens(options.question_tokens))
                      for document in order])
    return asked


def ask(port, options, tokens):
    """One request: seconds to the first token, seconds between tokens, a digest of the answer."""
    body = json.dumps({"model": options.model, "prompt": tokens, "stream": True, "temperature": 0,
                       "max_tokens": options.answer_tokens, "ignore_eos": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_S)
    times, text = [time.monotonic()], []
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failed(f"HTTP {answer.status}: {answer.read(500).decode(errors='replace')}")
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            piece = json.loads(line[len(b"data: "):])
            if "choices" not in piece:
                raise Failed(f"an answer broke off: {json.dumps(piece)[:500]}")
            times.append(time.monotonic())
            text.append(piece["choices"][0]["text"] if piece["choices"] else "")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed(f"a request failed: {error!r}") from error
    finally:
        connection.close()
    if len(times) < 2:
        raise Failed("an answer without a token")
    digest = hashlib.sha256("".join(text).encode()).hexdigest()[:16]
    return times[1] - times[0], [b - a for a, b in zip(times[1:], times[2:])], digest


def ask_all(port, options, requests):
    """All of a round, so many at a time; the first failure ends it."""
    waiting, rows, failures = queue.SimpleQueue(), [], []
    for request in requests:
        waiting.put(request)

    def work():
        while not failures:
            try:
                number, document, tokens = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                first, between, digest = ask(port, options, tokens)
            except Failed as failed:
                failures.append(failed)
                return
            rows.append({"round": number, "document": document, "first_s": first,
                         "between_s": between, "answer": digest})
    threads = [threading.Thread(target=work) for _ in range(options.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return rows


def counters(port):
    """vLLM's own counts of tokens, summed over its labels."""
    found = dict.fromkeys(COUNTERS, 0.0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError) as error:
        raise Failed(f"no metrics: {error!r}") from error
    for line in lines:
        name = line.split("{")[0].split(" ")[0]
        for counter, metric in COUNTERS.items():
            if name in (metric, metric + "_total"):
                found[counter] += float(line.rsplit(" ", 1)[1])
    return found


def run(options, port, check):
    """Warm up, then every round. check() raises if a process has ended."""
    generator = random.Random(options.seed + 2)
    ask(port, options, [generator.randrange(FIRST_TOKEN, options.vocabulary)
                        for _ in range(options.question_tokens)])
    rounds = []
    before = counters(port)
    for requests in prompts(options):
        began = time.monotonic()
        rows = ask_all(port, options, requests)
        check()
        after = counters(port)
        rounds.append({"seconds": time.monotonic() - began, "requests": rows,
                       **{name: after[name] - before[name] for name in COUNTERS}})
        before = after
    return {"rounds": rounds}
