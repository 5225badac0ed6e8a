# SPDX-License-Identifier: Apache-2.0
"""chart.py: what the tests of the chart share: the tools, rendering, and reading what came out.

Tools are looked for in the folder that get_tools.sh fills (argument --tools) and on PATH.
"""
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHART = os.path.join(ROOT, "charts", "kvferry")
CI = os.path.join(CHART, "ci")
MONITORING = "monitoring.coreos.com/v1"
SKIP = 77
DEADLINE_S = 300


def skip(reason):
    print(f"skipped: {reason}; tests/charts/get_tools.sh DIR brings it")
    sys.exit(SKIP)


def use_tools(folder):
    """The modules that get_tools.sh has installed. Returns (yaml, kubernetes_validate or None)."""
    sys.path.append(os.path.join(folder, "python"))
    try:
        import yaml
    except ImportError:
        skip("no PyYAML")
    try:
        import kubernetes_validate
    except ImportError:
        kubernetes_validate = None
    return yaml, kubernetes_validate


class Helm:
    def __init__(self, path, version):
        self.path = path
        self.version = version  # "v4.1.4"

    def __str__(self):
        return f"Helm {self.version}"

    def run(self, *arguments):
        done = subprocess.run([self.path, *arguments], capture_output=True, text=True, check=False,
                              timeout=DEADLINE_S)
        return done.returncode, done.stdout, done.stderr

    def template(self, *arguments, kubernetes="1.31", namespace="kv", chart=CHART):
        """(exit code, stdout, stderr) of rendering release "k"."""
        return self.run("template", "k", chart, "--namespace", namespace, "--kube-version",
                        kubernetes, "--api-versions", MONITORING, *arguments)


def find_helms(folder):
    """One of each major version, oldest first."""
    helms = {}
    for path in (os.path.join(folder, "helm-3"), os.path.join(folder, "helm-4"),
                 shutil.which("helm")):
        if path is None or not os.access(path, os.X_OK):
            continue
        done = subprocess.run([path, "version", "--short"], capture_output=True, text=True,
                              check=False, timeout=DEADLINE_S)
        found = re.match(r"(v(\d+)\.[\d.]+)", done.stdout)
        if found and found.group(2) not in helms:
            helms[found.group(2)] = Helm(path, found.group(1))
    return [helms[major] for major in sorted(helms)]


def ci_values():
    return sorted(name for name in os.listdir(CI) if name.endswith("-values.yaml"))


def documents(yaml, text):
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, Loader=loader) if document is not None]


def of_kind(objects, kind):
    return [one for one in objects if one["kind"] == kind]


def the(objects, kind):
    found, = of_kind(objects, kind)
    return found


def configuration(objects):
    """The files of the ConfigMap that the daemon mounts."""
    found, = (one["data"] for one in of_kind(objects, "ConfigMap")
              if "kvferryd.yaml" in one["data"])
    return found


def as_user(security):
    """subprocess' words for a securityContext, pod's and container's together."""
    groups = security.get("supplementalGroups", []) + (
        [security["fsGroup"]] if "fsGroup" in security else [])
    return {"user": security["runAsUser"], "group": security["runAsGroup"], "extra_groups": groups}


def moved(text, places):
    """Paths of containers as they are here; places: {in the container: here}."""
    inside = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
    # what begins a path, and no path of ours, which may begin with /tmp
    return re.sub(rf"(?<![\w/-])({inside})(?=[/'\s]|$)(?!/kvf-node-)",
                  lambda found: places[found.group(1)], text)


def mebibytes(quantity):
    if not quantity.endswith("Mi"):
        raise AssertionError(f"{quantity} is not in Mi")
    return int(quantity.removesuffix("Mi"))
