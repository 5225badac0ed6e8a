#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The native plug-in for LMCache, with a real daemon and without LMCache: what LMCache asks of it
is in lmcache_interface.json, read from LMCache's source. run_lmcache.py has LMCache itself.

usage: test_lmcache.py KVFERRYD PACKAGE_FOLDER [unittest arguments]
"""
import inspect
import json
import os
import select
import sys
import tempfile
import threading
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
KVFERRYD, PACKAGE = sys.argv[1:3]
sys.path.insert(0, PACKAGE)

from logged import DaemonCase  # noqa: E402

import kvferry  # noqa: E402
from kvferry import identity, session  # noqa: E402
from kvferry import lmcache as plugin  # noqa: E402

session.CONNECT_TIMEOUT_MS = 60_000
session.RETRY_S = 0.05
plugin.IDLE_S = 0.05
WAIT_MS = 120_000
VERSIONS = os.path.join(PACKAGE, "kvferry", "tested_versions.json")
with open(os.path.join(HERE, "lmcache_interface.json"), encoding="utf-8") as file:
    INTERFACE = json.load(file)


def pretend(folder, version):
    """What importlib.metadata finds where LMCache is installed."""
    name = os.path.join(folder, f"lmcache-{version}.dist-info")
    os.mkdir(name)
    with open(os.path.join(name, "METADATA"), "w", encoding="utf-8") as metadata:
        metadata.write(f"Metadata-Version: 2.1\nName: lmcache\nVersion: {version}\n")


def tested():
    with open(VERSIONS, encoding="utf-8") as versions:
        return json.load(versions)["lmcache"][0]


def key(number, model="a model"):
    """As LMCache makes them."""
    return f"{model}@00000001@0@{number:064x}"


def block(number, size=300_000):
    return bytearray((b"chunk %d of LMCache " % number * (size // 16))[:size])


class Case(DaemonCase):
    FOLDER = "kvferry-lmcache-"
    SMALL = ("dram.bytes=64MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=64MiB",
             "staging.total=64MiB", "staging.client=4MiB", "nvme.0.bytes=128MiB",
             "nvme.0.segment_bytes=8MiB")

    def setUp(self):
        super().setUp()
        sites = tempfile.TemporaryDirectory(prefix="kvferry-lmcache-")
        self.addCleanup(sites.cleanup)
        self.sites = sites.name
        sys.path.insert(0, self.sites)
        self.addCleanup(sys.path.remove, self.sites)
        pretend(self.sites, tested())

    def connect(self, **params):
        connector = plugin.KvferryConnector(
            socket=self.socket, **{"lookup_budget_ms": WAIT_MS, "load_budget_ms": WAIT_MS,
                                   "store_budget_ms": WAIT_MS, **params})
        self.addCleanup(connector.close)
        return connector

    def finish(self, connector, *numbers):
        """Answers by number, as LMCache takes them: when the descriptor says so."""
        poller = select.poll()
        poller.register(connector.event_fd(), select.POLLIN)
        found = {}
        while set(numbers) - set(found):
            self.assertTrue(poller.poll(WAIT_MS), "no answer")
            for answer in connector.drain_completions():
                self.assertEqual(len(answer), len(INTERFACE["completion"][0]))
                found[answer[0]] = answer[1:]
        self.assertEqual(poller.poll(0), [])
        return [found[number] for number in numbers]

    def until(self, is_true):
        end = time.monotonic() + WAIT_MS / 1000
        while not is_true():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def store(self, connector, numbers):
        views = [memoryview(block(number)) for number in numbers]
        return self.finish(connector, connector.submit_batch_set(
            [key(number) for number in numbers], views))[0]

    def exists(self, connector, numbers):
        number = connector.submit_batch_exists([key(number) for number in numbers])
        return self.finish(connector, number)[0]

    def load(self, connector, numbers, size=300_000):
        buffers = [bytearray(size) for _ in numbers]
        answer, = self.finish(connector, connector.submit_batch_get(
            [key(number) for number in numbers], [memoryview(buffer) for buffer in buffers]))
        return answer, buffers


class Interface(Case):
    def test_methods_are_those_that_lmcache_calls(self):
        names = {*INTERFACE["required"], *INTERFACE["optional"], *INTERFACE["calls"]}
        for name in names:
            parameters = inspect.signature(getattr(plugin.KvferryConnector, name)).parameters
            for count in INTERFACE["calls"].get(name, [len(parameters) - 1]):
                self.assertEqual(len(parameters) - 1, count, name)

    def test_a_key_of_the_store_is_every_part_of_lmcaches(self):
        names = {plugin.key_bytes(key(1)), plugin.key_bytes(key(2)),
                 plugin.key_bytes(key(1, "another")), plugin.key_bytes(key(1) + "@salt")}
        self.assertEqual({len(name) for name in names}, {32})
        self.assertEqual(len(names), 4)

    def test_versions_and_settings_are_checked(self):
        with self.assertRaisesRegex(ValueError, "adapter_params: 'sockets' is not known"):
            plugin.KvferryConnector(sockets="x")
        with self.assertRaisesRegex(ValueError, "weights_digest is not 64"):
            plugin.KvferryConnector(weights_digest="12")
        pretend(self.sites, "99.0.0")
        os.rename(os.path.join(self.sites, f"lmcache-{tested()}.dist-info"),
                  os.path.join(self.sites, "gone"))
        with self.assertRaisesRegex(RuntimeError, "tested with lmcache .*and this is 99.0.0"):
            plugin.KvferryConnector()
        self.connect(allow_untested=True)


class Chunks(Case):
    def test_chunks_come_back_as_they_were_stored(self):
        self.start_daemon(KVFERRYD)
        connector = self.connect()
        self.assertEqual(self.exists(connector, range(3)), (True, "", [False] * 3))
        self.assertEqual(self.store(connector, range(5)), (True, "", [True] * 5))
        self.assertEqual(self.exists(connector, range(5)), (True, "", [True] * 5))
        # another one, as of a server that has been started again
        other = self.connect()
        answer, buffers = self.load(other, range(5))
        self.assertEqual(answer, (True, "", [True] * 5))
        self.assertEqual(buffers, [block(number) for number in range(5)])
        self.assertEqual((other.counters.loaded, other.counters.failed), (5, 0))

    def test_what_is_missing_is_said_key_by_key(self):
        self.start_daemon(KVFERRYD)
        connector = self.connect()
        self.store(connector, (0, 1, 3))
        found = [True, True, False, True, False]
        # of a lookup that did not succeed LMCache takes no answers
        self.assertIn("ok and result_bools is not None", INTERFACE["needs_ok"])
        self.assertEqual(self.exists(connector, range(5)), (True, "", found))
        answer, buffers = self.load(connector, range(5))
        self.assertEqual(answer[::2], (False, found))
        for number, is_there in enumerate(found):
            self.assertEqual(buffers[number], block(number) if is_there else bytearray(300_000))

    def test_a_chunk_of_another_size_is_no_hit(self):
        self.start_daemon(KVFERRYD)
        connector = self.connect()
        self.store(connector, (0,))
        answer, buffers = self.load(connector, (0,), size=299_999)
        self.assertEqual((answer[2], buffers), ([False], [bytearray(299_999)]))

    def test_namespaces_and_weights_are_apart(self):
        self.start_daemon(KVFERRYD)
        self.store(self.connect(), (0,))
        for more in ({"namespace": "b"}, {"weights_digest": "22" * 32}):
            self.assertEqual(self.exists(self.connect(**more), (0,))[2], [False])

    def test_deleted_chunks_are_gone(self):
        self.start_daemon(KVFERRYD)
        connector = self.connect()
        self.store(connector, range(2))
        answer, = self.finish(connector, connector.submit_batch_delete([key(0), key(7)]))
        self.assertEqual(answer[2], [True, False])
        self.assertEqual(self.exists(connector, range(2))[2], [False, True])

    def test_requests_in_flight_are_answered_each(self):
        self.start_daemon(KVFERRYD)
        connector = self.connect()
        numbers = [connector.submit_batch_set([key(i)], [memoryview(block(i))]) for i in range(20)]
        self.assertEqual(len(set(numbers)), 20)
        self.assertTrue(all(answer[0] for answer in self.finish(connector, *numbers)))


class Weights(Case):
    """Keys name a model; what is its, by that name, depends on its files."""

    def model(self, weights, config="{}"):
        """A folder of a model, made or changed."""
        folder = os.path.join(self.sites, "model")
        os.makedirs(folder, exist_ok=True)
        for name, text in (("model.safetensors", weights), ("config.json", config)):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        return folder

    def setUp(self):
        super().setUp()
        cache = os.environ.get("XDG_CACHE_HOME")
        self.addCleanup(lambda: os.environ.pop("XDG_CACHE_HOME") if cache is None
                        else os.environ.update(XDG_CACHE_HOME=cache))
        os.environ["XDG_CACHE_HOME"] = os.path.join(self.sites, "cache")
        self.start_daemon(KVFERRYD)

    def server(self, model, **params):
        """A connector that has read what there is of the model: until then nothing is stored."""
        connector = self.connect(**params)
        self.until(lambda: connector._models.keys([key(0, model)]) is not None)
        return connector

    def store_one(self, connector, model):
        number = connector.submit_batch_set([key(0, model)], [memoryview(block(0))])
        return self.finish(connector, number)[0][2]

    def has_one(self, connector, model):
        return self.finish(connector, connector.submit_batch_exists([key(0, model)]))[0][2]

    def test_other_weights_in_a_folder_find_nothing(self):
        model = self.model("weights")
        self.assertEqual(self.store_one(self.server(model), model), [True])
        self.assertEqual(self.has_one(self.server(model), model), [True])
        self.model("others!")
        self.assertEqual(self.has_one(self.server(model), model), [False])
        for config in ('{"rope_theta": 7}', '{"dtype": "float16"}'):
            self.model("weights", config)
            self.assertEqual(self.has_one(self.server(model), model), [False])
        # whoever names the weights is believed, but not that the rest is the same
        digest = {"weights_digest": "22" * 32}
        self.model("weights", '{"rope_theta": 7}')
        self.assertEqual(self.store_one(self.server(model, **digest), model), [True])
        self.model("others!", '{"rope_theta": 7}')
        self.assertEqual(self.has_one(self.server(model, **digest), model), [True])
        self.model("weights", '{"rope_theta": 8}')
        self.assertEqual(self.has_one(self.server(model, **digest), model), [False])

    def test_weights_that_change_under_a_server_that_runs_are_others(self):
        model = self.model("weights")
        connector = self.server(model)
        self.assertEqual(self.store_one(connector, model), [True])
        self.assertEqual(self.has_one(connector, model), [True])
        self.model("others!")
        self.until(lambda: self.has_one(connector, model) == [False])
        self.until(lambda: self.store_one(connector, model) == [True])
        self.model("weights")
        self.until(lambda: connector._models.keys([key(0, model)]) is not None
                   and self.has_one(connector, model) == [True])

    def test_a_folder_that_may_not_be_read_is_known_by_its_name(self):
        model = self.model("weights")
        listed = os.scandir

        def refused(folder):
            if str(folder) == model:
                raise PermissionError(13, "Permission denied")
            return listed(folder)

        self.addCleanup(setattr, os, "scandir", listed)
        os.scandir = refused
        with self.assertLogs("lmcache.kvferry", "WARNING"):
            connector = self.server(model)
        self.assertEqual(self.store_one(connector, model), [True])

    def test_weights_that_are_being_read_are_waited_for_by_nobody(self):
        model = self.model("weights")
        reading, digest = threading.Event(), identity.folder_digest
        self.addCleanup(setattr, identity, "folder_digest", digest)
        self.addCleanup(reading.set)

        def slow(folder):
            self.assertTrue(reading.wait(WAIT_MS / 1000))
            return digest(folder)

        identity.folder_digest = slow
        connector = self.connect()
        self.assertEqual(self.store_one(connector, model), [False])
        self.assertEqual(self.has_one(connector, model), [False])
        answer = self.finish(connector, connector.submit_batch_get(
            [key(0, model)], [memoryview(bytearray(300_000))]), connector.submit_batch_delete(
                [key(0, model)]))
        self.assertEqual([each[2] for each in answer], [[False], [False]])
        reading.set()
        self.until(lambda: self.store_one(connector, model) == [True])

    def test_a_model_that_is_known_by_its_name_alone_is_warned_about_once(self):
        empty = os.path.join(self.sites, "empty")
        os.mkdir(empty)
        for name in ("a/model", "/nowhere/model", empty):
            with self.assertLogs("lmcache.kvferry", "WARNING") as logged:
                connector = self.server(name)
                self.assertEqual(self.store_one(connector, name), [True])
                self.assertEqual(self.has_one(connector, name), [True])
            self.assertEqual([f"the weights of '{name}' are not known here" in line
                              for line in logged.output], [True])
        for params in ({"namespace": "b"}, {"weights_digest": "22" * 32}):
            with self.assertNoLogs("lmcache.kvferry", "WARNING"):
                self.assertEqual(self.store_one(self.server("a/model", **params), "a/model"),
                                 [True])


class Daemon(Case):
    def test_without_a_daemon_nothing_is_there_and_all_is_answered(self):
        connector = self.connect(store_budget_ms=100, load_budget_ms=100, lookup_budget_ms=100)
        self.assertEqual(self.store(connector, range(2)), (False, "", [False] * 2))
        self.assertEqual(self.exists(connector, range(2)), (True, "", [False] * 2))
        self.assertEqual(self.load(connector, range(2))[0], (False, "", [False] * 2))
        self.assertEqual(connector.counters.not_stored, 2)

    def test_a_daemon_that_dies_and_comes_back(self):
        daemon = self.start_daemon(KVFERRYD)
        connector = self.connect()
        self.store(connector, range(2))
        daemon.kill()
        daemon.wait()
        self.finish(connector, connector.submit_batch_exists([key(0)]))
        self.start_daemon(KVFERRYD)
        # an attach that takes longer than a call waits for it goes on meanwhile
        self.until(lambda: self.store(connector, (5,))[2] == [True])
        self.until(lambda: self.load(connector, (5,)) == ((True, "", [True]), [block(5)]))

    def test_handles_that_rest_let_go_of_a_dead_daemons_memory(self):
        daemon = self.start_daemon(KVFERRYD, "nvme.0.admission=all")
        connector = self.connect()
        self.store(connector, range(20))
        self.exists(connector, range(20))
        self.load(connector, range(20))
        with kvferry.Client(self.socket) as client:
            self.until(lambda: client.stat()["namespace_nvme_bytes"] >= 20 * 300_000)
        daemon.kill()
        daemon.wait()
        self.start_daemon(KVFERRYD)
        # nothing is asked of the connector, and the daemon has room for what another one loads
        other = self.connect(load_budget_ms=1000)
        self.until(lambda: self.load(other, range(20))[0][0])

    def test_closing_ends_what_was_submitted(self):
        self.start_daemon(KVFERRYD)
        connector = self.connect()
        connector.submit_batch_set([key(0)], [memoryview(block(0))])
        connector.close()
        connector.close()
        self.assertEqual(connector.counters.stored, 1)
        with self.assertRaisesRegex(RuntimeError, "closed"):
            connector.submit_batch_exists([key(0)])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
