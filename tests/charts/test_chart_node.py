#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the chart renders, done on this machine in place of a node: the daemon takes every
configuration and fits into its memory limit; init containers, daemon and the pod of `helm test` run
with the users, groups and files of their manifests, and the pod gets its hit.

usage: test_chart_node.py --tools DIR KVFERRYD KVFERRY [unittest arguments]
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import chart

sys.path.insert(0, os.path.join(chart.ROOT, "tests", "support"))
from logged import LoggedCase

TOOLS, KVFERRYD, KVFERRY = sys.argv[2:5]
yaml, _ = chart.use_tools(TOOLS)
HELMS = chart.find_helms(TOOLS)


def objects(name, *more):
    code, out, error = HELMS[-1].template("--values", os.path.join(chart.CI, name), *more)
    if code != 0:
        raise AssertionError(error)
    return chart.documents(yaml, out)


def config_of(rendered):
    return chart.configuration(rendered)["kvferryd.yaml"]


def pod_of(rendered):
    return chart.the(rendered, "DaemonSet")["spec"]["template"]["spec"]


class Case(LoggedCase):
    maxDiff = None

    def setUp(self):
        # short and open to others: sockets have short paths, and pods are other users
        self.folder = tempfile.mkdtemp(prefix="kvf-node-")
        os.chmod(self.folder, 0o755)
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path


class Taken(Case):
    def daemon(self, *arguments):
        done = subprocess.run([KVFERRYD, *arguments], capture_output=True, text=True, check=False,
                              timeout=chart.DEADLINE_S)
        return done.returncode, done.stdout, done.stderr

    def test_version(self):
        with open(os.path.join(chart.CHART, "Chart.yaml"), encoding="utf-8") as file:
            about = yaml.safe_load(file)
        _, out, _ = self.daemon("--version")
        self.assertEqual(out, f"kvferryd {about['appVersion']}\n")

    def test_every_configuration(self):
        for name in chart.ci_values():
            with self.subTest(values=name):
                rendered = objects(name)
                path = self.write("kvferryd.yaml", config_of(rendered))
                words = pod_of(rendered)["containers"][0]["command"][3:]
                ip = "fd00::7" if any("[$(POD_IP)]" in word for word in words) else "10.0.0.7"
                code, _, error = self.daemon("--config", path, "--print-config", *(
                    word.replace("$(POD_IP)", ip) for word in words))
                self.assertEqual(code, 0, error)

    def test_sidecar(self):
        with open(os.path.join(chart.CHART, "examples", "sidecar.yaml"), encoding="utf-8") as file:
            example = chart.documents(yaml, file.read())
        sidecar, = chart.the(example, "Deployment")["spec"]["template"]["spec"]["initContainers"]
        config = yaml.safe_load(config_of(example))
        code, _, error = self.daemon("--print-config", "--config",
                                     self.write("kvferryd.yaml", yaml.safe_dump(config)))
        self.assertEqual(code, 0, error)
        self.assertEqual(sidecar["resources"]["limits"]["memory"], "10Gi")
        self.assertLessEqual(self.total_mebibytes(config), 10 * 1024 - 1000)

    def total_mebibytes(self, config, mode="serve"):
        """What the daemon sums up; it prints the sum even if it is more than this machine has."""
        config["sockets"] = [{**one, "path": os.path.join(self.folder, one.get("tenant", "s"))}
                             for one in config["sockets"]]
        config.setdefault("admin", {})["socket"] = os.path.join(self.folder, "admin.sock")
        config.pop("calibration", None)
        if "cluster_key" in config:
            config["cluster_key"] = self.write("key", "k" * 32)
        if "password_file" in config.get("directory", {}):
            config["directory"]["password_file"] = self.write("password", "secret")
        config["mode"] = mode  # turning it on changes no limit
        store = config.pop("nvme", None)
        if store:
            # a store as large as the node's has no room here: a small one, and the index of a large
            bytes_ = int(re.match(r"\d+", store[0]["bytes"])[0]) << (
                40 if "TiB" in store[0]["bytes"] else 30)
            arena = int(config["dram"]["bytes"].removesuffix("B"))
            entries = (arena >> 15) + min(bytes_ >> 15, 1 << 20) + (bytes_ >> 20)
            config["nvme"] = [{**store[0], "path": os.path.join(self.folder, "store"),
                               "bytes": "600MiB"}]
            config.setdefault("index", {}).setdefault("entries", entries)
        code, out, error = self.daemon("--check", "--config",
                                       self.write("kvferryd.yaml", yaml.safe_dump(config)))
        found = re.search(r"^total +([\d.]+)$", out, re.MULTILINE)
        self.assertIsNotNone(found, f"exit {code}: {out}{error}")
        return float(found.group(1))

    def test_memory_limit_holds_what_the_daemon_takes(self):
        sizes = [("default-values.yaml", "--set",
                  f"node.memory={4 * size}GiB,arena.bytes={size}GiB") for size in (1, 16, 512)]
        sizes.append(("default-values.yaml", "--set", "config.clients.max=4096"))
        for name, *more in [(name,) for name in chart.ci_values()] + sizes:
            with self.subTest(values=name, more=more):
                rendered = objects(name, *more)
                limits = pod_of(rendered)["containers"][0]["resources"]["limits"]
                limit = chart.mebibytes(limits["memory"])
                total = self.total_mebibytes(yaml.safe_load(config_of(rendered)))
                # resources.extraMemory, a GiB, stays for what is no table
                self.assertLessEqual(total, limit - 1000)
                self.assertLessEqual(
                    self.total_mebibytes(yaml.safe_load(config_of(rendered)), "observe"), limit)
                self.assertLessEqual(limit, 1.1 * total + 2048)


class OneNode(Case):
    """One node: the release with two tenants, a store and the profile, all below one folder."""
    MODE = "serve"

    def setUp(self):
        super().setUp()
        place = {"/var/lib/kvferry": "store", "/run/kvferry-admin": "admin", "/tmp": "tmp",
                 "/etc/kvferry": "etc", "/seccomp": "seccomp"}
        self.places = {inside: os.path.join(self.folder, here) for inside, here in place.items()}
        for path in self.places.values():
            os.mkdir(path)
        for inside in ("/run/kvferry-admin", "/tmp"):  # as emptyDir makes them
            os.chmod(self.places[inside], 0o777)
        self.programs = os.path.join(self.folder, "bin")
        os.mkdir(self.programs)
        for program in (KVFERRYD, KVFERRY):  # where other users can read them
            shutil.copy(program, self.programs)
        self.rendered = objects(
            "default-values.yaml", "--set", f"mode={self.MODE}",
            "--set", f"socket.hostPath={self.folder}/sockets",
            "--set", "tenants[0].name=a,tenants[0].gid=20001",
            "--set", "tenants[1].name=b,tenants[1].gid=20002",
            "--set", "nvme.enabled=true,nvme.bytes=1GiB,security.seccomp=Localhost",
            "--set", "arena.bytes=96MiB,config.staging.total=96MiB,config.dram.piece_bytes=32MiB")
        self.pod = pod_of(self.rendered)
        for name, text in chart.configuration(self.rendered).items():
            self.write(os.path.join("etc", name), self.moved(text))

    def moved(self, text):
        """Paths of containers as they are below our folder."""
        return chart.moved(text, self.places)

    def run_script(self, container, pod, **env):
        security = {**pod["securityContext"], **container["securityContext"]}
        shell, flags, script = container["command"]
        self.assertEqual((shell, flags), ("/bin/sh", "-ec"))
        path = f"{self.programs}:{os.environ['PATH']}"
        return subprocess.run([shell, flags, self.moved(script)], capture_output=True, text=True,
                              check=False, timeout=chart.DEADLINE_S, cwd=self.folder,
                              env={**os.environ, "PATH": path, **env}, **chart.as_user(security))

    def prepare(self):
        for container in self.pod["initContainers"]:
            done = self.run_script(container, self.pod)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def start(self):
        container, = self.pod["containers"]
        command = [self.moved(word) for word in container["command"]]
        self.log = os.path.join(self.folder, "log")
        # no port: another test may have it; small segments: less to write
        return self.start_logged(
            [os.path.join(self.programs, command[0]), *command[1:], "--set", "admin.listen=",
             "--set", "nvme.0.bytes=96MiB", "--set", "nvme.0.segment_bytes=8MiB"],
            cwd=self.folder, **chart.as_user(self.pod["securityContext"]))

    def helm_test(self):
        """What the pod of `helm test` says; its container, pod and socket."""
        pod = chart.the(self.rendered, "Pod")
        test, = pod["spec"]["containers"]
        socket = f"{self.folder}/sockets/a/kvferryd.sock"
        spec = {**pod["spec"], "securityContext": pod["spec"]["securityContext"]}
        done = self.run_script(test, spec, KVFERRY_SOCKET=socket)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + self.log_text())
        self.assertIn("hit: 1 MiB came back as it was stored", done.stdout)
        return done.stdout, test, spec, socket


@unittest.skipUnless(os.geteuid() == 0, "skipped: only root can be several users")
class Observing(OneNode):
    """As it is by default: the node's daemon keeps nothing, and a hit comes from the pod's own."""
    MODE = "observe"

    def test_hit(self):
        self.prepare()
        self.start()
        said, test, spec, socket = self.helm_test()
        self.assertIn("has taken a block and kept nothing, as it should", said)
        # a node whose daemon serves, where the release says that it observes, is found out
        test = {**test, "command": [*test["command"][:2], test["command"][2].replace(
            "kvferry put /tmp/put", "export KVFERRY_SOCKET=/tmp/other\nkvferry put /tmp/put", 1)]}
        self.assertNotEqual(self.run_script(test, spec, KVFERRY_SOCKET=socket).returncode, 0)


@unittest.skipUnless(os.geteuid() == 0, "skipped: only root can be several users")
class Node(OneNode):
    def test_hit(self):
        self.prepare()
        self.check_profile()
        self.start()
        said, test, spec, socket = self.helm_test()
        self.assertNotIn("observe", said)
        self.check_others(test, spec, socket)

    def check_profile(self):
        """It is where the kubelet is told to look, and whole."""
        profile = self.pod["containers"][0]["securityContext"]["seccompProfile"]
        path = os.path.join(self.places["/seccomp"], profile["localhostProfile"])
        with open(path, encoding="utf-8") as file, \
                open(os.path.join(chart.CHART, "files", "seccomp-io-uring.json"),
                     encoding="utf-8") as ours:
            self.assertEqual(file.read().rstrip(), ours.read().rstrip())

    def check_others(self, test, spec, socket):
        """Another tenant's engine is kept out of this one's folder, and everybody of admin's."""
        other = {**spec, "securityContext": {**spec["securityContext"],
                                             "supplementalGroups": [20002]}}
        done = self.run_script(test, other, KVFERRY_SOCKET=socket)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no permission for socket", done.stderr)
        done = self.run_script(test, other, KVFERRY_SOCKET=socket.replace("/a/", "/b/"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        admin = os.path.join(self.places["/run/kvferry-admin"], "admin.sock")
        for who, wanted in ((chart.as_user(spec["securityContext"]), 0), (chart.as_user(
                self.pod["securityContext"]), 1)):
            done = subprocess.run([os.path.join(self.programs, "kvferry"), "stat",
                                   "--admin-socket", admin], capture_output=True, check=False,
                                  timeout=chart.DEADLINE_S, cwd=self.folder, **who)
            self.assertEqual(done.returncode == 0, bool(wanted), done)

    def test_the_store_outlives_the_pod(self):
        self.prepare()
        process = self.start()
        socket = f"{self.folder}/sockets/b/kvferryd.sock"
        kvferry = [os.path.join(self.programs, "kvferry")]
        words = ["--key-text", "k", "--socket", socket]
        subprocess.run([*kvferry, "put", *words, "--durable"], input=b"kept", check=True,
                       capture_output=True,
                       timeout=chart.DEADLINE_S)
        process.kill()
        process.wait()
        os.unlink(os.path.join(self.places["/run/kvferry-admin"], "admin.sock"))  # an emptyDir
        self.prepare()
        self.start()
        done = subprocess.run([*kvferry, "get", *words], capture_output=True, check=True,
                              timeout=chart.DEADLINE_S)
        self.assertEqual(done.stdout, b"kept")


if __name__ == "__main__":
    if not HELMS:
        chart.skip("no Helm")
    unittest.main(argv=[sys.argv[0], *sys.argv[5:]])
