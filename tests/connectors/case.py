# SPDX-License-Identifier: Apache-2.0
"""case.py: a test case with a daemon in a folder of its own, and what connectors have warned of."""
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))

import logged  # noqa: E402
from standin import Engine, Request  # noqa: E402

import kvferry.vllm as connector  # noqa: E402
from kvferry import session  # noqa: E402
from kvferry.vllm import worker  # noqa: E402

# Time for a busy machine: no test's verdict is to depend on how fast it is.
session.CONNECT_TIMEOUT_MS = 60_000
session.RETRY_S = 0.05
worker.ROOM_S = 60.0
connector.HASH_BUDGET_MS = 60_000

DIGEST = "11" * 32


class DaemonCase(logged.DaemonCase):
    """self.start() starts the program that is the first argument; self.warnings has lines."""

    FOLDER = "kvferry-connectors-"
    SMALL = (*logged.SMALL, "clients.max=32")

    def setUp(self):
        super().setUp()
        self.hear("vllm.kvferry")

    def start(self, *more):
        self.daemon = self.start_daemon(sys.argv[1], *more)

    def kill(self):
        self.daemon.kill()
        self.daemon.wait()

    def settings(self, **changes):
        """kv_connector_extra_config, with chunks of four pages and time for a busy machine."""
        return {"socket": self.socket, "chunk_tokens": 4 * Engine.BLOCK, "weights_digest": DIGEST,
                "lookup_budget_ms": 60_000, "load_budget_ms": 30_000, **changes}

    @staticmethod
    def request(name, n, seed=0, **more):
        """A request for n tokens; those of one seed have one text."""
        return Request(name, [seed * 100_000 + i for i in range(n)], Engine.BLOCK, **more)


class EngineCase(DaemonCase):
    """Of the vLLM connector under its stand-in."""

    def engine(self, tp=1, changes=None, **settings):
        engine = Engine(self.settings(**settings), tp, **(changes or {}))
        self.addCleanup(engine.close)
        return engine

    def stored(self, n=200, seed=0, **settings):
        """An engine that has computed and stored a prompt, and has forgotten it."""
        engine = self.engine(**settings)
        request = self.request("first", n, seed)
        self.assertEqual(engine.load(request), 0)
        engine.prefill(request)
        engine.finish(request)
        return engine
