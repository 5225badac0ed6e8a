# SPDX-License-Identifier: Apache-2.0
"""What a figure was measured on: facts of this machine that a reader needs, and none that name
it."""
import glob
import os
import platform
import subprocess
import time


def read(path, otherwise=""):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return otherwise


def size_of(text):
    """'32768K' in bytes."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    if text and text[-1] in units:
        return int(text[:-1]) * units[text[-1]]
    return int(text or 0)


def llc_bytes():
    """The largest cache of the highest level; 32 MiB where the kernel does not say."""
    caches = []
    for folder in glob.glob("/sys/devices/system/cpu/cpu*/cache/index*"):
        caches.append((int(read(os.path.join(folder, "level"), "0") or 0),
                       size_of(read(os.path.join(folder, "size")))))
    size = max(caches)[1] if caches else 0
    return size if size > 0 else 32 << 20


def cpu_facts():
    """(name, family and model, widest vectors)."""
    fields = {}
    for line in read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    vectors = next((name for name in ("avx512bw", "avx2", "asimd") if name in flags), "none")
    return (fields.get("model name", platform.machine()),
            f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}", vectors,
            "hypervisor" in flags)


def memory_bytes():
    for line in read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 0


def drive_facts(folder):
    """File system and block device under a folder."""
    best = ("", "", "")
    folder = os.path.realpath(folder)
    for line in read("/proc/self/mounts").splitlines():
        device, point, kind = line.split()[:3]
        point = point.replace("\\040", " ")
        if (folder + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[1]):
            best = (device, point, kind)
    device = os.path.basename(os.path.realpath(best[0]))
    queue = f"/sys/class/block/{device}/queue"
    if not os.path.isdir(queue):  # a partition: the disk's
        queue = os.path.join(os.path.dirname(os.path.realpath(f"/sys/class/block/{device}")),
                             "queue")
    model = read(f"/sys/class/block/{device}/device/model")
    scheduler = read(os.path.join(queue, "scheduler"))
    if "[" in scheduler:
        scheduler = scheduler.split("[")[1].split("]")[0]
    return {"fs": best[2], "drive": model or device, "scheduler": scheduler}


class Quietness:
    """How much of the CPUs others take between the two calls: processes that are neither we nor
    children of ours that have been waited for, and the host of a virtual machine."""

    def __init__(self):
        self.began = self.now()

    @staticmethod
    def now():
        """(seconds since boot, ours, everybody's, stolen by the host), all but the first of CPU."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = [int(word) / tick for word in read("/proc/stat").splitlines()[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, steal = fields
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        return time.monotonic(), ours, user + nice + system + irq + softirq, steal

    def shares(self):
        """(others, host), of all the CPUs there are."""
        elapsed, ours, busy, steal = (end - begin for begin, end in zip(self.began, self.now()))
        capacity = elapsed * (os.cpu_count() or 1)
        return round(max(0.0, busy - ours) / capacity, 3), round(steal / capacity, 3)


def gpu_facts():
    """Of the first GPU."""
    fields = ("name", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    try:
        done = subprocess.run(["nvidia-smi", "--id=0", "--format=csv,noheader",
                               f"--query-gpu={','.join(fields)}"], capture_output=True, text=True,
                              check=False)
    except OSError:
        return {}
    words = [word.strip() for word in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(words) != len(fields):
        return {}
    return {"gpu": words[0], "gpu_driver": words[1], "gpu_link": f"PCIe {words[2]} x{words[3]}"}


def facts(drive_folder, has_gpu=False):
    """drive_folder: None if no drive was measured."""
    cpu, model, vectors, is_virtual = cpu_facts()
    result = {
        "cpu": cpu,
        "cpu_model": model,
        "vectors": vectors,
        "virtual": is_virtual,
        "cores": len(os.sched_getaffinity(0)),
        "llc_bytes": llc_bytes(),
        "memory": memory_bytes(),
        "kernel": platform.release(),
        "hugepages": {
            "anonymous": chosen(read("/sys/kernel/mm/transparent_hugepage/enabled")),
            "shared": chosen(read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        },
    }
    if drive_folder is not None:
        result.update(drive_facts(drive_folder))
    if has_gpu:
        result.update(gpu_facts())
    return result


def chosen(text):
    """The word in brackets."""
    return text.split("[")[1].split("]")[0] if "[" in text else text


def commit(root):
    """The commit that was measured, with '-dirty' if files of the product differ from it."""
    try:
        done = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty",
                               "--abbrev=12", "--exclude=*"], capture_output=True, text=True,
                              check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
