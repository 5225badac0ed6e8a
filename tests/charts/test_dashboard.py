#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The chart's dashboard: a real Prometheus scrapes a daemon under load, and answers each question
of each panel with data.

usage: test_dashboard.py --tools DIR KVFERRYD KVFERRY [unittest arguments]
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

import chart

sys.path.insert(0, os.path.join(chart.ROOT, "tests", "support"))
from logged import READY_S, LoggedCase

TOOLS, KVFERRYD, KVFERRY = sys.argv[2:5]
yaml, _ = chart.use_tools(TOOLS)
HELMS = chart.find_helms(TOOLS)
PROMETHEUS = shutil.which("prometheus", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
SETS = ["dram.bytes=96MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=96MiB", "staging.total=96MiB",
        "staging.client=4MiB", "nvme.0.bytes=128MiB", "nvme.0.segment_bytes=8MiB", "clients.max=16"]
LABELS = {"namespace": "kv", "node": "n1", "pod": "kvferry-x", "container": "kvferryd"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rendered():
    code, out, error = HELMS[-1].template("--set", "image.repository=registry.example/kvferry",
                                          "--set", "metrics.dashboard=true")
    if code != 0:
        raise AssertionError(error)
    maps = [one for one in chart.documents(yaml, out) if one["kind"] == "ConfigMap"]
    found, = (one for one in maps if "kvferry.json" in one["data"])
    return found


class Dashboard(LoggedCase):
    @classmethod
    def setUpClass(cls):
        cls.map = rendered()
        cls.dashboard = json.loads(cls.map["data"]["kvferry.json"])
        cls.panels = [one for one in cls.dashboard["panels"] if one["type"] != "row"]

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvf-dashboard-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def test_form(self):
        self.assertEqual(self.map["metadata"]["labels"]["grafana_dashboard"], "1")
        self.assertEqual(self.dashboard["uid"], "kvferry")
        ids = [one["id"] for one in self.dashboard["panels"]]
        self.assertEqual(len(set(ids)), len(ids))
        self.assertGreater(len(self.panels), 20)
        taken = set()
        for one in self.dashboard["panels"]:
            place = one["gridPos"]
            cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"])}
            self.assertFalse(cells & taken, one["title"])
            self.assertLessEqual(place["x"] + place["w"], 24)
            taken |= cells
        for one in self.panels:
            self.assertTrue(one["description"].endswith("."), one["title"])
            self.assertEqual(one["datasource"]["uid"], "${datasource}")

    def start_daemon(self, port):
        self.log = os.path.join(self.folder, "kvferryd.log")
        command = [KVFERRYD, "--dir", self.folder]
        for one in [*SETS, f"admin.listen=127.0.0.1:{port}"]:
            command += ["--set", one]
        self.start_logged(command)

    def start_prometheus(self, port, scraped):
        self.log = os.path.join(self.folder, "prometheus.log")
        config = os.path.join(self.folder, "prometheus.yml")
        with open(config, "w", encoding="utf-8") as file:
            yaml.safe_dump({
                "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
                "scrape_configs": [{"job_name": "kvferry", "static_configs": [
                    {"targets": [f"127.0.0.1:{scraped}"], "labels": LABELS}]}]}, file)
        self.start_logged([PROMETHEUS, f"--config.file={config}",
                           f"--storage.tsdb.path={self.folder}/data",
                           f"--web.listen-address=127.0.0.1:{port}"],
                          lambda said: "Server is ready to receive web requests" in said)

    @staticmethod
    def load(kvferryd_socket):
        """Puts and gets of more than fits into memory, so that each tier has something to do."""
        subprocess.run([KVFERRY, "bench", "--count", "800", "--size", "256KiB", "--socket",
                        kvferryd_socket], stdout=subprocess.DEVNULL, check=True,
                       timeout=chart.DEADLINE_S)

    def query(self, port, kind, **arguments):
        url = f"http://127.0.0.1:{port}/api/v1/{kind}?{urllib.parse.urlencode(arguments, True)}"
        try:
            with urllib.request.urlopen(url, timeout=chart.DEADLINE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    @staticmethod
    def filled(question):
        for name, value in (("$__rate_interval", "1m"), ("$namespace", LABELS["namespace"]),
                            ("$node", ".*")):
            question = question.replace(name, value)
        return question

    @unittest.skipUnless(PROMETHEUS, "skipped: no prometheus (Debian package prometheus)")
    def test_each_question_has_an_answer(self):
        ports = free_port(), free_port()
        self.start_daemon(ports[0])
        self.start_prometheus(ports[1], ports[0])
        self.load(os.path.join(self.folder, "kvferryd.sock"))
        questions = {self.filled(target["expr"]): (one["title"], target["legendFormat"])
                     for one in self.panels for target in one["targets"]}
        self.assertGreater(len(questions), 40)
        silent = questions
        end = time.monotonic() + READY_S
        while silent and time.monotonic() < end:
            silent = {question: where for question, where in silent.items()
                      if not self.query(ports[1], "query", query=question)["result"]}
            time.sleep(0.1)
        self.assertEqual(silent, {})
        self.load(os.path.join(self.folder, "kvferryd.sock"))
        moved = self.filled('sum(rate(kvferry_get_bytes_total{namespace="$namespace", '
                            'node=~"$node"}[$__rate_interval]))')
        self.assertIn(moved, questions)
        while float(self.query(ports[1], "query", query=moved)["result"][0]["value"][1]) <= 0:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)
        for one in self.dashboard["templating"]["list"][1:]:
            label = one["query"]["query"].rstrip(")").split(", ")[-1]
            self.assertEqual(label, one["name"])
            self.assertEqual(self.query(ports[1], f"label/{label}/values",
                                        **{"match[]": "kvferry_build_info"}), [LABELS[label]])


if __name__ == "__main__":
    if not HELMS:
        chart.skip("no Helm")
    unittest.main(argv=[sys.argv[0], *sys.argv[5:]])
