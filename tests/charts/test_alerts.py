#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The chart's alerts: promtool takes the rules, each alert fires and keeps silent as
alerts_test.yaml says, and every metric in them is one that the daemon has.

usage: test_alerts.py --tools DIR KVFERRYD [unittest arguments]
"""
import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import chart

TOOLS, KVFERRYD = sys.argv[2:4]
yaml, _ = chart.use_tools(TOOLS)
HELMS = chart.find_helms(TOOLS)
PROMTOOL = shutil.which("promtool", path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
CASES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "alerts_test.yaml")


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("kvferryd", timeout=chart.DEADLINE_S)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(chart.DEADLINE_S)
        self.sock.connect(self.path)


class Alerts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="kvf-alerts-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        code, out, error = HELMS[-1].template(
            "--set", "image.repository=registry.example/kvferry", "--set", "metrics.alerts=true",
            "--set", "peers.enabled=true,clusterKey.secretName=key")
        assert code == 0, error
        rule = chart.the(chart.documents(yaml, out), "PrometheusRule")
        cls.alerts = [one for group in rule["spec"]["groups"] for one in group["rules"]]
        cls.rules = os.path.join(cls.folder, "rules.yaml")
        with open(cls.rules, "w", encoding="utf-8") as file:
            yaml.safe_dump(rule["spec"], file)
        cls.cases = shutil.copy(CASES, cls.folder)

    def promtool(self, *arguments, text=None):
        done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False,
                              input=text, timeout=chart.DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    @unittest.skipUnless(PROMTOOL, "skipped: no promtool (Debian package prometheus)")
    def test_rules(self):
        self.assertIn(f"{len(self.alerts)} rules found", self.promtool("check", "rules",
                                                                       self.rules))
        self.promtool("test", "rules", self.cases)

    def test_each_has_a_case_and_a_cure(self):
        with open(self.cases, encoding="utf-8") as file:
            cases = yaml.safe_load(file)["tests"]
        tried = {}
        for one in (one for case in cases for one in case["alert_rule_test"]):
            tried.setdefault(one["alertname"], set()).add(bool(one.get("exp_alerts")))
        self.assertEqual(tried, {one["alert"]: {False, True} for one in self.alerts})
        for one in self.alerts:
            self.assertEqual(sorted(one["annotations"]), ["cure", "summary"])
            self.assertIn("node", one["annotations"]["summary"])

    def metrics(self):
        """What a daemon that has just started says."""
        path = os.path.join(self.folder, "kvferryd.sock")
        process = subprocess.Popen(
            [KVFERRYD, "--dir", self.folder, "--set", "dram.bytes=96MiB", "--set",
             "nvme.0.bytes=128MiB", "--set", "nvme.0.segment_bytes=8MiB"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + chart.DEADLINE_S
            while True:
                connection = UnixConnection(path + ".admin")
                try:
                    connection.request("GET", "/metrics")
                    answer = connection.getresponse()
                    if answer.status == http.client.OK:  # else it still starts
                        return answer.read().decode()
                except OSError:
                    pass
                finally:
                    connection.close()
                self.assertIsNone(process.poll())
                self.assertLess(time.monotonic(), end)
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()

    def test_metrics_are_the_daemons(self):
        text = self.metrics()
        known = set(re.findall(r"^(kvferry_\w+)(?:\{| )", text, re.MULTILINE))
        for one in self.alerts:
            for name in re.findall(r"\b(\w+)\{", one["expr"]):
                self.assertIn(name, known | {"up"}, one["alert"])
        if PROMTOOL:
            self.promtool("check", "metrics", text=text)


if __name__ == "__main__":
    if not HELMS:
        chart.skip("no Helm")
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
