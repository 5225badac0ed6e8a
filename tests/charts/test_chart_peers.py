#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peers of the chart, on a network of our own: three daemons with the command, configuration,
variables, keys and users that the chart renders, each in a network namespace, find each other by
the name of the headless Service or by a directory, and fetch blocks of each other through the
rendered NetworkPolicy, which keeps others out.

usage: test_chart_peers.py --tools DIR KVFERRYD KVFERRY [unittest arguments]
Exit code 77: this user, or this machine, cannot make network namespaces.
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import chart
from network import Names, Policy

sys.path.insert(0, os.path.join(chart.ROOT, "tests", "support"))
from logged import LoggedCase
from wire import Wire

TOOLS, KVFERRYD, KVFERRY = sys.argv[2:5]
yaml, _ = chart.use_tools(TOOLS)
HELMS = chart.find_helms(TOOLS)
# what Debian calls redis-check-rdb (of redis-tools, which starts no service) is the server by name
REDIS = (shutil.which("valkey-server") or shutil.which("redis-server") or
         shutil.which("redis-check-rdb"))
NODES = "abc"
ENDS = (*NODES, "client", "stranger", "valkey", "dns")
SPACES = {name: f"kvf{os.getpid()}{name}" for name in ENDS}
ADDRESSES = {name: f"10.199.23.{number}" for number, name in enumerate(ENDS, 1)}
WAIT_S = 120
SMALL = ("arena.bytes=32MiB,config.staging.total=32MiB,config.staging.client=4MiB,"
         "config.clients.max=8,config.peers.timeout=60s,config.peers.heartbeat=60s")
RESOLV = ("search kv.svc.cluster.local svc.cluster.local cluster.local\n"
          f"nameserver {ADDRESSES['dns']}\noptions ndots:5\n")


class AnyPolicy:
    """Which policy the wire keeps: that of the test that runs."""
    now = staticmethod(lambda packet: True)

    def __call__(self, packet):
        return self.now(packet)


POLICY = AnyPolicy()


def payload(number):
    return hashlib.sha256(str(number).encode()).digest() * (400 + 3000 * (number % 3))


def inside(end, *command):
    return ["ip", "netns", "exec", SPACES[end], *command]


class Peers(LoggedCase):
    maxDiff = None

    def setUp(self):
        # short and open to others: sockets have short paths, and pods are other users
        self.folder = tempfile.mkdtemp(prefix="kvf-node-")
        os.chmod(self.folder, 0o755)
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.log = os.path.join(self.folder, "log")
        for program in (KVFERRYD, KVFERRY):  # where other users can read them
            shutil.copy(program, self.folder)
        self.key = self.write("cluster.key", bytes(range(32)))

    def write(self, name, data):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        return path

    # --- what the chart says ------------------------------------------------------------------

    def render(self, name, *more):
        code, out, error = HELMS[-1].template(
            "--values", os.path.join(chart.CI, name), "--set", SMALL, *more)
        self.assertEqual(code, 0, error)
        self.objects = chart.documents(yaml, out)
        daemons = chart.the(self.objects, "DaemonSet")["spec"]["template"]
        self.labels = daemons["metadata"]["labels"]
        self.pod = daemons["spec"]
        self.container, = self.pod["containers"]

    def keep_policy(self, **others):
        """From now on. others: labels of namespace and pod of ends that are no nodes."""
        pods = {name: ({"kubernetes.io/metadata.name": "kv"}, self.labels) for name in NODES}
        pods["dns"] = ({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"})
        pods["stranger"] = ({"kubernetes.io/metadata.name": "elsewhere"}, self.labels)
        pods.update(others)
        policy = Policy(chart.the(self.objects, "NetworkPolicy"),
                        {ADDRESSES[name]: pod for name, pod in pods.items()},
                        {one["name"]: one["containerPort"] for one in self.container["ports"]})
        POLICY.now = policy
        return policy

    def serve_names(self, *services):
        names = {name: [ADDRESSES[end] for end in ends] for name, ends in services}
        server = Names(SPACES["dns"], ADDRESSES["dns"], names)
        self.addCleanup(server.close)
        return server

    # --- what a node does with it -------------------------------------------------------------

    def start(self, node, without=()):
        """The daemon's container, as the kubelet would start it on a node."""
        fields = {"status.podIP": ADDRESSES[node]}
        env = {one["name"]: one["value"] if "value" in one else
               fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
               for one in self.container["env"] if one["name"] not in without}
        command = [re.sub(r"\$\((\w+)\)", lambda found: env[found.group(1)], word)
                   for word in self.container["command"]]
        places = self.make_places(node)
        for name, text in chart.configuration(self.objects).items():
            self.write(f"{node}/etc/{name}", chart.moved(text, places).encode())
        user = chart.as_user({**self.pod["securityContext"], **self.container["securityContext"]})
        groups = ",".join(map(str, [user["group"], *user["extra_groups"]]))
        return self.start_logged(
            inside(node, "setpriv", f"--reuid={user['user']}", f"--regid={user['group']}",
                   f"--groups={groups}", "--no-new-privs", os.path.join(self.folder, "kvferryd"),
                   *(chart.moved(word, places) for word in command[1:])),
            env={"PATH": os.environ["PATH"], **{name: chart.moved(value, places)
                                                for name, value in env.items()}})

    def make_places(self, node):
        """The pod's volumes, as folders: {path in the container: here}."""
        uid, gid = (self.pod["securityContext"][word] for word in ("runAsUser", "fsGroup"))
        folders = {"config": "etc", "admin": "admin", "tmp": "tmp", "sockets": "sockets",
                   "cluster-key": "key", "directory": "directory"}
        places = {one["mountPath"]: os.path.join(self.folder, node, folders[one["name"]])
                  for one in self.container["volumeMounts"]}
        for path in places.values():
            os.makedirs(path, exist_ok=True)
            os.chown(path, uid, gid)
        tenant = os.path.join(self.folder, node, "sockets", "default")
        os.makedirs(tenant, exist_ok=True)
        os.chown(tenant, uid, gid)
        for volume, data in (("cluster-key", bytes(range(32))), ("directory", b"tell-nobody\n")):
            for one in self.pod["volumes"]:
                if one["name"] == volume:
                    item, = one["secret"]["items"]
                    path = self.write(f"{node}/{folders[volume]}/{item['path']}", data)
                    os.chown(path, 0, gid)
                    os.chmod(path, one["secret"]["defaultMode"])
        return places

    def socket(self, node):
        return os.path.join(self.folder, node, "sockets", "default", "kvferryd.sock")

    def kvferry(self, *arguments, end=None, env=None, data=b""):
        command = [os.path.join(self.folder, "kvferry"), *arguments]
        return subprocess.run(inside(end, *command) if end else command, input=data,
                              capture_output=True, timeout=chart.DEADLINE_S, check=False,
                              env={**os.environ, **(env or {})})

    def put(self, number, socket, **how):
        done = self.kvferry("put", "--key-text", f"block number {number:06}", "--socket", socket,
                            data=payload(number), **how)
        self.assertEqual(done.returncode, 0, done.stderr.decode() + self.log_text())

    def get(self, number, socket, **how):
        """True: a hit, whose bytes are right. False: a miss."""
        done = self.kvferry("get", "--key-text", f"block number {number:06}", "--socket", socket,
                            **how)
        if done.returncode == 0:
            self.assertEqual(done.stdout, payload(number))
            return True
        self.assertIn(b"miss", done.stdout + done.stderr)
        return False

    def wait_for(self, is_so, what):
        end = time.monotonic() + WAIT_S
        while not is_so():
            self.assertLess(time.monotonic(), end, f"waited for {what}; log:\n{self.log_text()}")
            time.sleep(0.05)

    def links(self, node):
        admin = os.path.join(self.folder, node, "admin", "admin.sock")
        done = self.kvferry("peers", "-o", "json", "--admin-socket", admin)
        self.assertEqual(done.returncode, 0, done.stderr)
        return sum(row["asked"] and row["state"] == "ready"
                   for row in json.loads(done.stdout)["peers"])

    def check_each_has_what_others_have(self, nodes):
        for number, node in enumerate(nodes):
            self.put(number, self.socket(node))
        for node in nodes:
            for number in range(len(nodes)):
                self.wait_for(lambda n=number, at=node: self.get(n, self.socket(at)),
                              f"block {number} on node {node}")

    # ------------------------------------------------------------------------------------------

    def test_service_and_policy(self):
        self.render("peers-values.yaml")
        service, = (one for one in chart.of_kind(self.objects, "Service")
                    if one["spec"].get("publishNotReadyAddresses"))
        self.assertLessEqual(service["spec"]["selector"].items(), self.labels.items())
        name = f"{service['metadata']['name']}.kv.svc.cluster.local"
        names = self.serve_names((name, NODES))
        engine = ({"kubernetes.io/metadata.name": "engines"}, {"kvferry/remote-client": "true"})
        policy = self.keep_policy(client=engine)
        daemons = {node: self.start(node) for node in NODES}
        for node in NODES:
            self.wait_for(lambda at=node: self.links(at) == 2, f"two links of {node}")
        self.check_each_has_what_others_have(NODES)
        self.assertIn(name, names.asked)
        self.assertEqual(policy.refused, set(), self.log_text())
        self.check_restart(daemons["c"])
        self.check_others(policy)
        self.check_data_ports(policy)

    def check_restart(self, daemon):
        """A container that is started again in its pod has the address and the ports of before."""
        daemon.kill()
        daemon.wait()
        self.start("c")
        self.put(40, self.socket("c"))
        self.wait_for(lambda: self.get(40, self.socket("a")), "a block of the node that came back")
        self.wait_for(lambda: self.get(0, self.socket("c")), "a block on the node that came back")

    def check_others(self, policy):
        """A client's pod that peers.others names is let in; others reach the metrics alone."""
        made = self.kvferry("client-key", "--tenant", "default", self.key)
        client = self.write("client.key", made.stdout)
        env = {one["name"]: one["value"] for one in self.container["env"]
               if one["name"].startswith("UCX_")}
        address = f"tcp://{ADDRESSES['a']}:7171?key={client}"
        self.assertTrue(self.get(1, address, end="client", env=env))
        self.put(50, address, end="client", env=env)
        self.wait_for(lambda: self.get(50, self.socket("b")), "the client's block")
        self.assertEqual(policy.refused, set(), self.log_text())

        knock = ("import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), "
                 "float(sys.argv[3])).close()")
        for port, is_open in ((9394, True), (7171, False), (7172, False)):
            done = subprocess.run(
                inside("stranger", sys.executable, "-c", knock, ADDRESSES["a"], str(port),
                       str(WAIT_S if is_open else 0.5)), capture_output=True, check=False)
            self.assertEqual(done.returncode == 0, is_open, done.stderr)
        self.assertEqual({refused[1:] for refused in policy.refused},
                         {(ADDRESSES["a"], 7171), (ADDRESSES["a"], 7172)})

    def check_data_ports(self, policy):
        """Without the range UCX would take any port, which the policy does not let through."""
        policy.refused.clear()
        self.start("client", without=("UCX_TCP_PORT_RANGE",))
        self.wait_for(lambda: any(to == ADDRESSES["client"] and port not in range(7171, 7180)
                                  for _, to, port in policy.refused),
                      "data to a port that is not let through")

    @unittest.skipUnless(REDIS, "skipped: no valkey-server or redis-server")
    def test_directory(self):
        self.render("peers-directory-values.yaml", "--set", "peers.ipFamily=IPv4",
                    "--set", "peers.rdma.resource=,peers.rdma.devices=",
                    "--set", "metrics.address=0.0.0.0,config.directory.lease=60s")
        self.assertEqual(len(chart.of_kind(self.objects, "Service")), 1)
        self.serve_names(("valkey.kv.svc.cluster.local", ["valkey"]))
        policy = self.keep_policy(valkey=({"kubernetes.io/metadata.name": "kv"},
                                          {"app": "valkey"}))
        users = self.write("users.acl", b"user default off\n"
                           b"user kvferry on >tell-nobody ~* &* +@all\n")
        server = os.path.join(self.folder, "redis-server")
        os.symlink(REDIS, server)
        self.start_logged(
            inside("valkey", server, "--port", "6379", "--bind", ADDRESSES["valkey"], "--save", "",
                   "--appendonly", "no", "--dir", self.folder, "--aclfile", users),
            is_ready=lambda said: "eady to accept connections" in said)
        for node in NODES[:2]:
            self.start(node)
        self.check_each_has_what_others_have(NODES[:2])
        self.assertEqual(policy.refused, set(), self.log_text())


def lay_wire():
    """The network. None: not here."""
    wire = Wire(list(SPACES.values()), list(ADDRESSES.values()), may=POLICY)
    for space in SPACES.values():
        os.makedirs(f"/etc/netns/{space}")
        with open(f"/etc/netns/{space}/resolv.conf", "w", encoding="ascii") as file:
            file.write(RESOLV)
    if wire.make():
        return wire
    wire.drop()
    return None


def main():
    if not HELMS:
        chart.skip("no Helm")
    wire = None
    try:
        wire = lay_wire() if os.geteuid() == 0 else None
        if wire is None:
            print("no network namespaces here: skipped")
            return chart.SKIP
        return not unittest.main(argv=[sys.argv[0], *sys.argv[5:]],
                                 exit=False).result.wasSuccessful()
    finally:
        if wire is not None:
            wire.drop()
        for space in SPACES.values():
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
