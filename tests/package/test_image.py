#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The image: packages.txt names the packages of all libraries that the programs load. And, if the
variable KVF_ROOTFS names a folder that packaging/image/rootfs.sh has made, the chart's containers
run in it with the commands, users, volumes and paths of their manifests, and `helm test` passes.

usage: test_image.py TOOLS KVFERRYD KVFERRY KVFERRYD_GPU [unittest arguments]
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOLS = sys.argv[1]
PROGRAMS = sys.argv[2:5]
ROOTFS = os.environ.get("KVF_ROOTFS")
DEADLINE_S = 120

sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from logged import LoggedCase

SMALL = ("arena.bytes=96MiB", "config.staging.total=96MiB", "config.dram.piece_bytes=32MiB",
         "nvme.enabled=true", "nvme.bytes=1GiB", "image.repository=registry.example/kvferry")

# In a mount namespace: the image's root read-only with volumes in it, and a command in there.
# Words: root, then "SOURCE TARGET MODE" for each volume, "--", command.
ENTER = r"""
root=$1
shift
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
    set -- $1 "$@"
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    mount -o "remount,bind,$3" "$root$2"
    shift 4
done
shift
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -o remount,bind,ro "$root"
exec "$@"
"""


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False,
                          timeout=DEADLINE_S)


def is_debian_12():
    try:
        with open("/etc/os-release", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return False
    return "ID=debian" in text and 'VERSION_ID="12"' in text and shutil.which("readelf")


class Packages(unittest.TestCase):
    @unittest.skipUnless(is_debian_12(), "skipped: this is not Debian 12 with binutils")
    def test_list(self):
        needed = set()
        for program in PROGRAMS:
            direct = set(re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", program).stdout))
            for name, path in re.findall(r"(\S+) => (\S+)", run("ldd", program).stdout):
                if name in direct:
                    needed.add(os.path.realpath(path))
        packages = set()
        for path in needed:
            done = run("dpkg-query", "--search", path)
            if done.returncode != 0:  # /lib is /usr/lib, and packages may say either
                done = run("dpkg-query", "--search", "*/" + "/".join(path.split("/")[-2:]))
            packages |= {line.split(":")[0] for line in done.stdout.splitlines()}
        with open(os.path.join(ROOT, "packaging", "image", "packages.txt"),
                  encoding="utf-8") as file:
            listed = set(file.read().split())
        # what every system has; UCX is opened at run time, where peers are configured
        self.assertEqual(packages - {"libc6", "libgcc-s1"} | {"libucx0"}, listed)


@unittest.skipUnless(ROOTFS, "skipped: KVF_ROOTFS names no root of packaging/image/rootfs.sh")
class Image(LoggedCase):
    def setUp(self):
        sys.path.insert(0, os.path.join(ROOT, "tests", "charts"))
        import chart
        self.chart = chart
        self.yaml, _ = chart.use_tools(TOOLS)
        self.folder = tempfile.mkdtemp(prefix="kvf-image-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        helms = chart.find_helms(TOOLS)
        if not helms:
            self.skipTest("skipped: no Helm; tests/charts/get_tools.sh DIR brings it")
        sets = [word for one in SMALL for word in ("--set", one)]
        code, out, error = helms[-1].template(*sets)
        self.assertEqual(code, 0, error)
        self.rendered = chart.documents(self.yaml, out)

    def volume(self, name, volume):
        """The folder that stands for a volume: one for each path of the node."""
        path = volume.get("hostPath", {}).get("path", "/" + name)
        inner = self.folder + path
        os.makedirs(inner, exist_ok=True)
        if "emptyDir" in volume:
            os.chmod(inner, 0o777)
        if "configMap" in volume:
            for file_name, text in self.chart.configuration(self.rendered).items():
                with open(os.path.join(inner, file_name), "w", encoding="utf-8") as file:
                    file.write(text)
        return inner

    def command(self, pod, container):
        security = {**pod["securityContext"], **container["securityContext"]}
        volumes = {one["name"]: self.volume(one["name"], one) for one in pod["volumes"]}
        words = [f"{volumes[one['name']]} {one['mountPath']} "
                 f"{'ro' if one.get('readOnly') else 'rw'}" for one in container["volumeMounts"]]
        caps = ["-all", *(f"+{name.lower()}" for name in security["capabilities"].get("add", []))]
        # chroot itself, and becoming the user, need three more, which no exec as that user keeps
        bounding = ",".join([*caps, "+sys_chroot", "+setuid", "+setgid"])
        groups = ",".join(map(str, security.get("supplementalGroups", [])))
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private",
                "sh", "-ec", ENTER, "sh", ROOTFS, *words, "--", "setpriv", "--no-new-privs",
                f"--bounding-set={bounding}", "--inh-caps=-all", "chroot",
                f"--userspec={security['runAsUser']}:{security['runAsGroup']}",
                f"--groups={groups}", ROOTFS, "env", "-i", "PATH=/usr/sbin:/usr/bin",
                *(f"{one['name']}={one['value']}" for one in container.get("env", [])),
                *container["command"]]

    def test_hit(self):
        pod = self.chart.the(self.rendered, "DaemonSet")["spec"]["template"]["spec"]
        for container in pod["initContainers"]:
            done = run(*self.command(pod, container))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.log = os.path.join(self.folder, "log")
        self.start_logged(self.command(pod, pod["containers"][0]), start_new_session=True)
        test = self.chart.the(self.rendered, "Pod")["spec"]
        done = run(*self.command(test, test["containers"][0]))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + self.log_text())
        self.assertIn("hit: 1 MiB came back as it was stored", done.stdout)

    @staticmethod
    def end(process):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[5:]])
