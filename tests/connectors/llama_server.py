# SPDX-License-Identifier: Apache-2.0
"""llama_server.py: kvferry-llama as a process, asked over HTTP; and states of llama.cpp, read by
code that shares nothing with the server's."""
import json
import struct
import subprocess
import time
import urllib.error
import urllib.request

READY_S = 300
ANSWER_S = 1800


class Server:
    """A kvferry-llama at a port of its own; what it says is in the file log."""

    def __init__(self, program, log, *arguments, env=None):
        self.log = log
        with open(log, "ab") as file:
            begin = file.tell()
            self.process = subprocess.Popen([program, "--listen", "127.0.0.1:0", *arguments],
                                            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                            env=env)
        end = time.monotonic() + READY_S
        while True:
            said = self.said(begin)
            if "answers at http://" in said:
                break
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(said)
            time.sleep(0.02)
        self.url = said.split("answers at ")[1].split()[0]

    def said(self, begin=0):
        with open(self.log, "rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    def request(self, path, body=None):
        """(HTTP status, answer)"""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data),
                                        timeout=ANSWER_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def complete(self, prompt, n_predict, **more):
        """The answer, with the seconds that it took here."""
        begin = time.monotonic()
        status, answer = self.request(
            "/completion", {"prompt": prompt, "n_predict": n_predict, "logprobs": True, **more})
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        answer["seconds"] = time.monotonic() - begin
        return answer

    def tokens(self, text):
        status, answer = self.request("/tokenize", {"text": text})
        if status != 200:
            raise RuntimeError(answer)
        return answer["tokens"]

    def forget(self):
        """Have the one slot hold something else, so that the next prompt finds nothing there."""
        self.complete([1], 0, load=False, store=False)

    def stop(self):
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(READY_S)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class State:
    """A state of one sequence. rows[("K", layer)] is where its rows begin, and the bytes of one."""

    def __init__(self, data):
        self.data = data
        self.at = 0
        self.rows = {}
        magic, _, streams = self._take("<IiI")
        assert magic == 0xaf143cd8, hex(magic)
        self.n_tokens = 0
        for _ in range(streams):
            cells, = self._take("<I")
            if cells == 0:
                continue
            assert self.n_tokens == 0
            self.n_tokens = cells
            self.positions = [self._take("<iIi")[0] for _ in range(cells)]
            self.transposed, self.n_layers = self._take("<II")
            for tensor in "KV":
                for layer in range(self.n_layers):
                    self._section(tensor, layer)
        assert self.at == len(data), (self.at, len(data))

    def _take(self, form):
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def _section(self, tensor, layer):
        _, row = self._take("<iQ")
        self.rows[tensor, layer] = self.at, row
        self.at += row * self.n_tokens

    def chunk(self, first, end):
        """The rows of these tokens, of all layers."""
        return b"".join(self.data[at + first * row:at + end * row]
                        for at, row in self.rows.values())
