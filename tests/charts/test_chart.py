#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The chart under Helm: lint, every set of values in ci/ on several versions of Kubernetes, what
the objects must and must not say, and wrong values, refused with their cure.

usage: test_chart.py --tools DIR [unittest arguments]

KVF_CHART_MATRIX=all renders and validates every combination of Helm, values and Kubernetes;
without it each Helm renders each set of values once, oldest and newest Kubernetes among them.
"""
import functools
import itertools
import json
import os
import re
import sys
import unittest

import chart

TOOLS = sys.argv[2]
yaml, kubernetes_validate = chart.use_tools(TOOLS)
HELMS = chart.find_helms(TOOLS)
KUBERNETES = [f"1.{minor}" for minor in range(27, 37)]
IMAGE = ("--set", "image.repository=registry.example/kvferry")


def combinations():
    names = chart.ci_values()
    if os.environ.get("KVF_CHART_MATRIX") == "all":
        return list(itertools.product(HELMS, names, KUBERNETES))
    # another version of Kubernetes for each set of values; the newest Helm has oldest and newest
    ends = (KUBERNETES[0], KUBERNETES[-1])
    return [(helm, name, ends[i % 2] if helm is HELMS[-1] else KUBERNETES[1 + i % 8])
            for helm in HELMS for i, name in enumerate(names)]


@functools.lru_cache(maxsize=None)
def render(helm, name, kubernetes="1.31", *more):
    code, out, error = helm.template("--values", os.path.join(chart.CI, name), *more,
                                     kubernetes=kubernetes)
    if code != 0:
        raise AssertionError(f"{helm}, {name}: {error}")
    return out


class Rendered(unittest.TestCase):
    """Each set of values of ci/, as objects."""
    maxDiff = None

    def objects(self, name, *more):
        return chart.documents(yaml, render(HELMS[-1], name, "1.31", *more))

    def test_lint(self):
        for helm, name in itertools.product(HELMS, chart.ci_values()):
            with self.subTest(helm=str(helm), values=name):
                code, out, error = helm.run("lint", "--strict", chart.CHART, "--namespace", "kv",
                                            "--values", os.path.join(chart.CI, name))
                self.assertEqual(code, 0, out + error)

    @unittest.skipUnless(kubernetes_validate, "skipped: no kubernetes-validate")
    def test_objects_are_what_kubernetes_takes(self):
        for helm, name, version in combinations():
            with self.subTest(helm=str(helm), values=name, kubernetes=version):
                for one in chart.documents(yaml, render(helm, name, version)):
                    if one["apiVersion"] != chart.MONITORING:
                        kubernetes_validate.validate(one, version, strict=True)

    @unittest.skipUnless(kubernetes_validate, "skipped: no kubernetes-validate")
    def test_examples_are_what_kubernetes_takes(self):
        folder = os.path.join(chart.CHART, "examples")
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                for one in chart.documents(yaml, file.read()):
                    for version in ("1.29", "1.36"):  # sidecars that start first came with 1.29
                        kubernetes_validate.validate(one, version, strict=True)

    @unittest.skipUnless(len(HELMS) > 1, "skipped: only one Helm")
    def test_helms_agree(self):
        for name in chart.ci_values():
            first, second = (chart.documents(yaml, render(helm, name)) for helm in HELMS)
            key = lambda one: (one["kind"], one["metadata"]["name"])
            self.assertEqual(sorted(first, key=key), sorted(second, key=key), name)

    def test_nothing_has_more_rights_than_it_needs(self):
        for name in chart.ci_values():
            for one in self.objects(name):
                pod = one["spec"]["template"]["spec"] if one["kind"] == "DaemonSet" else (
                    one["spec"] if one["kind"] == "Pod" else None)
                if pod is None:
                    continue
                for share in ("hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace"):
                    self.assertNotIn(share, pod)
                self.assertIs(pod["automountServiceAccountToken"], False)
                self.assertEqual(pod["securityContext"]["seccompProfile"],
                                 {"type": "RuntimeDefault"})
                self.assertIs(pod["securityContext"]["runAsNonRoot"], True)
                for volume in pod["volumes"]:
                    self.assertIn(volume.get("hostPath", {}).get("type", ""),
                                  ("", "Directory", "DirectoryOrCreate"))
                for container in pod["containers"] + pod.get("initContainers", []):
                    self.check_container(name, container)

    def check_container(self, name, container):
        rights = container["securityContext"]
        self.assertNotIn("privileged", rights)
        self.assertIs(rights["allowPrivilegeEscalation"], False)
        self.assertIs(rights["readOnlyRootFilesystem"], True)
        self.assertEqual(rights["capabilities"]["drop"], ["ALL"])
        added = rights["capabilities"].get("add", [])
        wanted = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"]
        self.assertEqual(added, wanted if container["name"] == "prepare" else [])
        if container["name"] in ("kvferryd", "hit"):
            self.assertNotIn("runAsUser", rights)  # the pod's, which is not root
        for which in ("requests", "limits"):
            self.assertNotIn("nvidia.com/gpu", container["resources"][which], name)
        self.assertIn("memory", container["resources"]["limits"])

    def test_defaults(self):
        objects = self.objects("default-values.yaml")
        self.assertEqual(sorted(one["kind"] for one in objects), [
            "ConfigMap", "DaemonSet", "NetworkPolicy", "Pod", "Service", "ServiceAccount"])
        daemon = chart.the(objects, "DaemonSet")["spec"]
        pod = daemon["template"]["spec"]
        self.assertEqual(daemon["updateStrategy"], {"type": "OnDelete"})
        self.assertEqual(pod["nodeSelector"], {"kvferry/node": "true"})
        config = yaml.safe_load(chart.configuration(objects)["kvferryd.yaml"])
        # what is not said is as config.def has it: no drive, no peers, no GPU, no lossy profile
        self.assertEqual(sorted(config), ["admin", "dram", "mode", "sockets"])
        self.assertEqual(config["mode"], "observe")
        tenth = int(config["dram"]["bytes"].removesuffix("B"))
        self.assertAlmostEqual(tenth / (64 << 30), 0.1, places=3)
        self.assertNotIn("runtimeClassName", pod)
        self.assertEqual([one["name"] for one in pod["containers"][0]["env"]], ["KVFERRY_SOCKET"])
        self.assertEqual({name: pod["containers"][0][f"{name}Probe"]["httpGet"]["path"]
                          for name in ("startup", "readiness", "liveness")},
                         {"startup": "/livez", "readiness": "/readyz", "liveness": "/livez"})
        self.assertNotIn("minReadySeconds", daemon)
        self.assertEqual(pod["containers"][0]["securityContext"]["seccompProfile"],
                         {"type": "RuntimeDefault"})
        limit = chart.mebibytes(pod["containers"][0]["resources"]["limits"]["memory"])
        # arena, staging.total, a GiB, and tables, of which test_chart_node.py knows the sum
        self.assertGreaterEqual(limit, (tenth >> 20) + 256 + 1024)
        self.assertLess(limit, (tenth >> 20) + 256 + 1024 + 400)
        policy = chart.the(objects, "NetworkPolicy")["spec"]
        self.assertEqual(policy["egress"], [])
        self.assertEqual(policy["ingress"], [{"ports": [{"port": "metrics", "protocol": "TCP"}]}])
        self.assertEqual(policy["podSelector"]["matchLabels"],
                         daemon["selector"]["matchLabels"])
        self.assertEqual(chart.the(objects, "Service")["spec"]["clusterIP"], "None")

    def test_one_client_profile_is_in_force_without_calibration(self):
        config = yaml.safe_load(chart.configuration(self.objects("default-values.yaml"))[
            "kvferryd.yaml"])
        self.assertNotIn("calibration", config)
        self.assertNotIn("allow_uncalibrated", config)

    def test_admission(self):
        for name, admission in (("nvme-hostpath", "second-sight"), ("nvme-claim", "auto")):
            config = yaml.safe_load(chart.configuration(self.objects(f"{name}-values.yaml"))[
                "kvferryd.yaml"])
            self.assertEqual(config["nvme"][0]["admission"], admission)
            self.assertEqual(config["mode"], "serve")

    def test_notes_say_how_to_turn_it_on(self):
        for mode, said in (("observe", True), ("serve", False)):
            code, out, error = HELMS[-1].run(
                "install", "k", chart.CHART, "--namespace", "kv", "--dry-run=client", *IMAGE,
                "--set", f"mode={mode}")
            if "Kubernetes cluster unreachable" in error:
                self.skipTest("skipped: this Helm renders NOTES.txt only with a cluster")
            self.assertEqual(code, 0, error)
            self.assertEqual("--set mode=serve" in out, said)
            self.assertEqual("It OBSERVES" in out, said)

    def test_gpu(self):
        pods = {how: chart.the(self.objects(f"gpu-{how}-values.yaml"), "DaemonSet")["spec"]
                ["template"] for how in ("env", "volume-mounts", "cdi")}
        env = {one["name"]: one["value"] for one in pods["env"]["spec"]["containers"][0]["env"]}
        self.assertEqual(env["NVIDIA_VISIBLE_DEVICES"], "all")
        self.assertEqual(env["NVIDIA_DRIVER_CAPABILITIES"], "compute,utility")
        self.assertEqual(pods["env"]["spec"]["runtimeClassName"], "nvidia")
        mounts = [one["mountPath"] for one in
                  pods["volume-mounts"]["spec"]["containers"][0]["volumeMounts"]
                  if one["name"] == "gpu"]
        self.assertEqual(len(mounts), 2)
        for one in mounts:
            self.assertRegex(one, r"^/var/run/nvidia-container-devices/GPU-[0-9a-f-]{36}$")
        self.assertEqual(pods["cdi"]["metadata"]["annotations"]["cdi.k8s.io/kvferry"],
                         "nvidia.com/gpu=all")

    def test_drive(self):
        kinds = {"nvme-hostpath": "hostPath", "nvme-ephemeral": "ephemeral",
                 "nvme-claim": "persistentVolumeClaim"}
        for name, kind in kinds.items():
            pod = chart.the(self.objects(f"{name}-values.yaml"), "DaemonSet")["spec"]["template"][
                "spec"]
            volume, = (one for one in pod["volumes"] if one["name"] == "nvme")
            self.assertIn(kind, volume)

    def policy(self, *where):
        return chart.the(self.objects(*where), "NetworkPolicy")["spec"]

    def test_a_way_out(self):
        policy = self.policy("options-values.yaml")
        self.assertEqual(policy["egress"], [{"ports": [{"port": 4318, "protocol": "TCP"}]}])
        self.assertEqual(len(policy["ingress"]), 1)

    def test_other_nodes(self):
        """What test_chart_peers.py, where it runs, sees at work."""
        objects = self.objects("peers-values.yaml")
        daemons = chart.the(objects, "DaemonSet")["spec"]["template"]
        container, = daemons["spec"]["containers"]
        self.assertEqual(container["command"][-2:], ["--set", "peers.listen=$(POD_IP):7171"])
        env = {one["name"]: one for one in container["env"]}
        self.assertEqual(env["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"], "status.podIP")
        self.assertEqual(env["UCX_TCP_PORT_RANGE"]["value"], "7172-7179")
        self.assertEqual(env["UCX_TLS"]["value"], "tcp")
        self.assertIn({"name": "peers", "containerPort": 7171, "protocol": "TCP"},
                      container["ports"])
        service, = (one["spec"] for one in chart.of_kind(objects, "Service")
                    if one["metadata"]["name"] == "k-kvferry-peers")
        self.assertEqual((service["clusterIP"], service["publishNotReadyAddresses"]),
                         ("None", True))
        config = yaml.safe_load(chart.configuration(objects)["kvferryd.yaml"])
        self.assertEqual(config["peers"], {
            "nodes": "k-kvferry-peers.kv.svc:7171,kv-big-kvferry-peers.kvferry.svc:7171",
            "timeout": "1s", "inflight_bytes": "256MiB"})
        policy = chart.the(objects, "NetworkPolicy")["spec"]
        ports = [{"port": port, "protocol": "TCP"} for port in range(7171, 7180)]
        who = [{"podSelector": policy["podSelector"]},
               {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "kv-big"}}},
               {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "engines"}},
                "podSelector": {"matchLabels": {"kvferry/remote-client": "true"}}}]
        self.assertEqual(policy["ingress"][1:], [{"ports": ports, "from": who}])
        self.assertEqual(policy["egress"][0], {"ports": ports, "to": who})
        self.assertEqual({(one["port"], one["protocol"]) for one in policy["egress"][1]["ports"]},
                         {(53, "UDP"), (53, "TCP")})
        self.assertEqual(len(policy["egress"]), 2)
        self.assertLessEqual(policy["podSelector"]["matchLabels"].items(),
                             daemons["metadata"]["labels"].items())

    def test_directory(self):
        objects = self.objects("peers-directory-values.yaml")
        self.assertEqual([one["metadata"]["name"] for one in chart.of_kind(objects, "Service")],
                         ["k-kvferry"])
        config = yaml.safe_load(chart.configuration(objects)["kvferryd.yaml"])
        self.assertEqual(config["directory"], {
            "address": "valkey.kv.svc:6379", "user": "kvferry", "lease": "20s",
            "password_file": "/etc/kvferry-directory/password"})
        self.assertEqual(config["peers"], {"entries": 1000000, "links": 16})
        pod = chart.the(objects, "DaemonSet")["spec"]["template"]["spec"]
        container, = pod["containers"]
        self.assertEqual(container["command"][-1], "peers.listen=[$(POD_IP)]:7200")
        self.assertIn("/etc/kvferry-directory",
                      [one["mountPath"] for one in container["volumeMounts"]])
        for which in ("requests", "limits"):
            self.assertEqual(container["resources"][which]["rdma/hca_shared_devices_a"], "1")
        env = {one["name"]: one.get("value") for one in container["env"]}
        self.assertEqual((env["UCX_TLS"], env["UCX_NET_DEVICES"], env["UCX_TCP_PORT_RANGE"]),
                         ("rc,tcp", "mlx5_0:1,eth0", "7300-7307"))
        egress = self.policy("peers-directory-values.yaml")["egress"]
        self.assertNotIn("to", egress[1])  # networkPolicy.dns is empty: DNS is anywhere
        self.assertEqual(egress[2], {"ports": [{"port": 6379, "protocol": "TCP"}], "to": [
            {"podSelector": {"matchLabels": {"app": "valkey"}}}]})
        # further daemons are asked beside those that the directory tells of
        config = yaml.safe_load(chart.configuration(self.objects(
            "peers-directory-values.yaml", "--set", "peers.nodes={a:7171,[fd00::7]:7171}"))[
                "kvferryd.yaml"])
        self.assertEqual(config["peers"]["nodes"], "a:7171,[fd00::7]:7171")

    def test_alerts_on_links_only_where_there_are_some(self):
        groups = {name: [one["name"] for one in chart.the(self.objects(
            f"{name}-values.yaml"), "PrometheusRule")["spec"]["groups"]]
                  for name in ("tenants", "peers")}
        self.assertEqual(groups, {"tenants": ["kvferry"], "peers": ["kvferry", "kvferry-peers"]})

    def test_huge_pages(self):
        pod = chart.the(self.objects("hugepages-values.yaml"), "DaemonSet")["spec"]["template"][
            "spec"]
        resources = pod["containers"][0]["resources"]
        self.assertEqual(resources["limits"]["hugepages-2Mi"], "81920Mi")
        self.assertEqual(resources["requests"]["hugepages-2Mi"], "81920Mi")
        self.assertEqual(chart.mebibytes(resources["limits"]["memory"]),
                         chart.mebibytes(resources["requests"]["memory"]) + 81920)

    def test_monitors(self):
        for name, kind, port in (("tenants", "PodMonitor", 9500),
                                 ("options", "ServiceMonitor", 9394)):
            objects = self.objects(f"{name}-values.yaml")
            monitor = chart.the(objects, kind)
            pod = chart.the(objects, "DaemonSet")["spec"]["template"]
            target = pod if kind == "PodMonitor" else chart.the(objects, "Service")
            endpoint, = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
            self.assertEqual(endpoint["port"], pod["spec"]["containers"][0]["ports"][0]["name"])
            wanted = monitor["spec"]["selector"]["matchLabels"].items()
            self.assertLessEqual(wanted, target["metadata"]["labels"].items())
            self.assertEqual(pod["spec"]["containers"][0]["ports"][0]["containerPort"], port)

    def test_stop_and_update(self):
        daemon = chart.the(self.objects("options-values.yaml"), "DaemonSet")["spec"]
        self.assertEqual(daemon["updateStrategy"]["rollingUpdate"],
                         {"maxSurge": 0, "maxUnavailable": "10%"})
        self.assertEqual(daemon["minReadySeconds"], 600)
        # drain.timeout is 5 minutes there
        self.assertEqual(daemon["template"]["spec"]["terminationGracePeriodSeconds"], 310)

    def test_a_changed_option_changes_the_pod(self):
        sums = {chart.the(self.objects("default-values.yaml", *more), "DaemonSet")["spec"][
            "template"]["metadata"]["annotations"]["checksum/config"]
                for more in ((), ("--set", "config.workers=3"))}
        self.assertEqual(len(sums), 2)

    def test_notes(self):
        # a chart's notes are shown by install, which can be tried without a cluster
        code, out, error = HELMS[-1].run("install", "k", chart.CHART, "--namespace", "kv",
                                         "--dry-run=client", *IMAGE)
        self.assertEqual(code, 0, error)
        for words in ("kubectl label node NODE kvferry/node=true", "supplementalGroups: [10001]",
                      "hostPath: {path: /run/kvferry/default, type: DirectoryOrCreate}",
                      "helm test k --namespace kv"):
            self.assertIn(words, out)
        self.assertNotIn("kvferry peers", out)
        code, out, error = HELMS[-1].run(
            "install", "k", chart.CHART, "--namespace", "kv", "--dry-run=client", *IMAGE, "--set",
            "peers.enabled=true,clusterKey.secretName=s,networkPolicy.enabled=false,"
            "peers.allowWithoutPolicy=true")
        self.assertEqual(code, 0, error)
        self.assertIn("kvferry peers --admin-socket /run/kvferry-admin/admin.sock", out)
        self.assertIn("keep strangers from ports 7171 and 7172 to 7179", out)


class Documented(unittest.TestCase):
    def leaves(self, values, path=()):
        for key, value in values.items():
            if isinstance(value, dict) and value:
                yield from self.leaves(value, (*path, key))
            else:
                yield ".".join((*path, key))

    def test_every_value_is_in_schema_and_readme(self):
        with open(os.path.join(chart.CHART, "values.yaml"), encoding="utf-8") as file:
            values = yaml.safe_load(file)
        with open(os.path.join(chart.CHART, "README.md"), encoding="utf-8") as file:
            rows = set(re.findall(r"^\| `([A-Za-z.]+)` \|", file.read(), re.MULTILINE))
        with open(os.path.join(chart.CHART, "values.schema.json"), encoding="utf-8") as file:
            schema = json.load(file)
        for name in self.leaves(values):
            words = name.split(".")
            self.assertTrue(any(".".join(words[:n]) in rows for n in range(1, len(words) + 1)),
                            f"{name} has no '# --' comment in values.yaml")
            at = schema
            for word in words:
                if "properties" in at:
                    at = at["properties"].get(word)
                    self.assertIsNotNone(at, f"{name} is not in values.schema.json")
        self.check_strict(schema, "")

    def check_strict(self, schema, path):
        """Maps of ours take no unknown keys."""
        for key, one in schema.get("properties", {}).items():
            if "properties" in one:
                self.assertIs(one.get("additionalProperties"), False, f"{path}{key}")
                self.check_strict(one, f"{path}{key}.")


class Refused(unittest.TestCase):
    """Wrong values: what is said, by the schema and by templates/validation.yaml."""

    PEERS = ("peers.enabled=true", "clusterKey.secretName=k")
    CASES = (
        # values, what the message has to say
        (["image.repository="], "image.repository is empty: build an image"),
        (["arena.bytes=40GiB"], "lower it to at most 32768MiB, .*or set arena.allowOverHalf=true"),
        (["arena.bytes=63GiB", "arena.allowOverHalf=true"], "daemon may take .*lower arena.bytes"),
        (["arena.bytes=8MiB"], "the arena is under 16MiB: set arena.bytes, or node.memory"),
        (["arena.bytes=1000000001B", "arena.hugepages=true"], "arena.bytes a multiple of 2MiB"),
        (["config.dram.bytes=4GiB"], "config.dram.bytes is decided by the chart: set arena.bytes"),
        (["config.admin.listen=0.0.0.0:80"], "set metrics.address and metrics.port"),
        (["config.cluster_key=/k"], "set clusterKey.secretName"),
        (["config.sockets[0].path=/x"], "config.sockets is decided by the chart: set tenants"),
        (["config.mode=serve"], "config.mode is decided by the chart: set mode, beside config"),
        (["config.staging.total=1MiB"], "staging.total is 1MiB, and the least is 4MiB: raise it"),
        (["config.drain.timeout=2h"], "drain.timeout is 2h, and the most is 3600s: lower it"),
        (["config.dram.piece_bytes=2GiB"], "piece_bytes is 2GiB, and the most is 1GiB: lower it"),
        (["config.staging.client=1GiB"], "config.staging.client is more than config.staging.total"),
        (["tenants[0].name=a", "tenants[0].gid=5", "tenants[1].name=a", "tenants[1].gid=6"],
         "tenants has a twice: give each tenant one entry"),
        (["socket.hostPath=/" + "d" * 90], "longer than the 107 .*shorten socket.hostPath"),
        (["nvme.enabled=true"], "nvme.enabled needs a size: set nvme.bytes"),
        (["nvme.bytes=5GiB"], "nvme.bytes is set, but nvme.enabled is not: set nvme.enabled=true"),
        (["nvme.enabled=true", "nvme.bytes=1MiB"], "nvme.bytes is under 1GiB.*raise it"),
        (["nvme.enabled=true", "nvme.bytes=65GiB"], "nvme.writeBudget is empty: set it to the byt"),
        (["nvme.enabled=true", "nvme.bytes=5GiB", "nvme.volume.type=ephemeral"],
         "needs nvme.volume.size"),
        (["nvme.enabled=true", "nvme.bytes=5GiB", "nvme.volume.type=claim"],
         "needs nvme.volume.claimName"),
        (["peers.enabled=true"], "random > key; kubectl --namespace kv create secret .*; and set"),
        ([*PEERS, "metrics.port=7171"], "peers.port and metrics.port are both 7171: move one"),
        ([*PEERS, "metrics.port=7179"], "metrics.port is 7179, one of the eight .*: move one"),
        ([*PEERS, "peers.port=7172"], "peers.port is 7172, one of the eight ports from peers.data"),
        ([*PEERS, "peers.directory.passwordSecret=s"], "peers.directory.address is not: set it to"),
        ([*PEERS, "peers.directory.user=u"], "address is not: set it to host:port of the server"),
        ([*PEERS, "peers.directory.user=u", "peers.directory.address=d:6379"],
         "passwordSecret is not: name the secret"),
        ([*PEERS, "peers.directory.to[0].ipBlock.cidr=10.0.0.0/8"], "address is not: set it to"),
        ([*PEERS, "config.directory.lease=20s"], "there is none: set peers.directory.address to"),
        ([*PEERS, "networkPolicy.enabled=false"], "set networkPolicy.enabled=true, or peers.allow"),
        ([*PEERS, "peers.others[0].podSelector.matchLabels.a=b", "networkPolicy.enabled=false",
          "peers.allowWithoutPolicy=true"],
         "networkPolicy.enabled is false: set it to true, or remove the list"),
        ([*PEERS, "peers.rdma.resource=rdma/hca"], "needs peers.rdma.devices: UCX's names of"),
        ([*PEERS, "peers.rdma.devices=eth0"], "resource is not: set it to what the device plugin"),
        (["peers.nodes={a:7171}"], "peers.nodes is set, but .* is not: set peers.enabled=true"),
        (["peers.directory.address=a:6379"], "directory.address is set, but peers.enabled is"),
        (["peers.rdma.resource=rdma/hca"], "set, but peers.enabled is not: set peers.enabled=true"),
        (["config.peers.timeout=1s"], "config.peers is set, but peers.enabled is not: set peers."),
        (["config.directory.lease=20s"], "config.directory is set, but peers.enabled is not: set"),
        (["config.peers.nodes=a:7171"], "set peers.enabled, and peers.nodes for daemons of other"),
        (["config.directory.password_file=/p"], "set peers.directory.passwordSecret"),
        (["config.gpu.hbm_bytes=1GiB"], "gpu.access=none starts none: set gpu.access to env"),
        (["gpu.runtimeClassName=nvidia"], "is none: set gpu.access, or remove the class"),
        (["metrics.monitor=ServiceMonitor", "service.enabled=false"], "set service.enabled=true"),
    )

    SCHEMA_CASES = (
        # values, where, in both Helms' words
        (["hostIPC=true"], "hostIPC"),
        (["config.dramm.bytes=1GiB"], "dramm"),
        (["config.staging.totl=1GiB"], "totl"),
        (["config.staging.total=1GB"], "config.?staging.?total"),
        (["config.workers=65"], "config.?workers"),
        (["config.log.level=loud"], "config.?log.?level"),
        (["config.allow_uncalibrated=maybe"], "config.?allow_uncalibrated"),
        (["tenants[0].name=a b", "tenants[0].gid=5"], "tenants.?0.?name"),
        (["tenants[0].name=a", "tenants[0].gid=0"], "tenants.?0.?gid"),
        (["security.uid=0"], "security.?uid"),
        (["security.seccomp=Unconfined"], "security.?seccomp"),
        (["gpu.access=privileged"], "gpu.?access"),
        (["mode=cache"], "mode"),
        (["nvme.admission=some"], "nvme.?admission"),
        (["networkPolicy.egress[0]=all"], "networkPolicy.?egress"),
        (["networkPolicy.dns[0].podSelectr.a=b"], "podSelectr"),
        (["peers.port=0"], "peers.?port"),
        (["peers.dataPort=65529"], "peers.?dataPort"),
        (["peers.ipFamily=IPv5"], "peers.?ipFamily"),
        (["peers.nodes={a}"], "peers.?nodes.?0"),
        (["peers.others[0].selector.a=b"], "selector"),
        (["peers.directory.address=/run/valkey.sock"], "peers.?directory.?address"),
        (["peers.directory.passwd=s"], "passwd"),
        (["peers.rdma.resource=hca"], "peers.?rdma.?resource"),
        (["update.strategy=Recreate"], "update.?strategy"),
        (["update.maxSurge=1"], "maxSurge"),
        (["socket.hostPath=/run/../etc"], "socket.?hostPath"),
        (["socket.hostPath=/run/'$(id)"], "socket.?hostPath"),
    )

    def refused(self, helm, sets, words, **where):
        arguments = list(IMAGE)
        for one in sets:
            arguments += ["--set", one]
        code, out, error = helm.template(*arguments, **where)
        self.assertNotEqual(code, 0, f"{helm}: {sets} taken:\n{out[:400]}")
        self.assertRegex(error, words)

    def test_messages_name_the_cure(self):
        for sets, words in self.CASES:
            with self.subTest(sets=sets):
                self.refused(HELMS[-1], sets, words)

    def test_every_option_of_the_chart(self):
        """Also those that the cases above do not name."""
        with open(os.path.join(chart.CHART, "files", "options.json"), encoding="utf-8") as file:
            owned = json.load(file)["owned"]
        for name, cure in owned.items():
            self.refused(HELMS[-1], [f"config.{name}=1"], re.escape(
                f"config.{name} is decided by the chart: {cure}"))

    def test_schema(self):
        for helm in HELMS:
            for sets, words in self.SCHEMA_CASES:
                with self.subTest(helm=str(helm), sets=sets):
                    self.refused(helm, sets, words)

    def test_namespace(self):
        self.refused(HELMS[-1], [], "install with --namespace kvferry", namespace="default")
        code, _, error = HELMS[-1].template(*IMAGE, "--set", "allowDefaultNamespace=true",
                                            namespace="default")
        self.assertEqual(code, 0, error)

    def test_monitor_without_its_api(self):
        arguments = ["template", "k", chart.CHART, "--namespace", "kv", *IMAGE, "--set",
                     "metrics.monitor=PodMonitor"]
        code, _, error = HELMS[-1].run(*arguments)
        self.assertNotEqual(code, 0)
        self.assertRegex(error, "install the Prometheus operator; .*--api-versions monitoring.core")
        code, out, error = HELMS[-1].run(*arguments, "--set", "metrics.skipApiCheck=true")
        self.assertEqual(code, 0, error)
        self.assertIn("kind: PodMonitor", out)

    def test_old_kubernetes(self):
        code, _, error = HELMS[-1].template(*IMAGE, kubernetes="1.26")
        self.assertNotEqual(code, 0)
        self.assertIn(">=1.27.0-0", error)


if __name__ == "__main__":
    if not HELMS:
        chart.skip("no Helm")
    print(", ".join(map(str, HELMS)),
          "and kubernetes-validate" if kubernetes_validate else "(skipped: no kubernetes-validate)")
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
