# SPDX-License-Identifier: Apache-2.0
"""The pilot's processes, each in a session of its own with a log, and facts about the machine."""
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from importlib import metadata

END_S = 60
LOG_BYTES = 2000
CAUSE_LOG_BYTES = 8 << 20
CAUSE_CHARACTERS = 400
# What Python says of an exception, at the start of a line or behind what a logger puts there. The
# first one in a log is the cause of those behind it.
EXCEPTION = re.compile(r"(?:^|[\])] )((?:[A-Za-z_][\w.]*)?(?:Error|Exception): \S.*)$",
                       re.MULTILINE)
PACKAGES = ("vllm", "torch", "lmcache", "kvferry", "transformers")


class Failed(Exception):
    """A process does not start, or ended; the text says which, and why as far as its log does, on
    the first line, with the end of its log behind it."""


class Group:
    """Processes that end, with all their children, at the end of a with block."""

    def __init__(self, folder, start_s):
        self.folder, self.start_s = folder, start_s
        self.running = {}
        self.peaks = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name, process in reversed(self.running.items()):
            self.note_peak(name)
            end(process)

    def start(self, name, command, is_ready):
        path = os.path.join(self.folder, f"{name}.log")
        try:
            with open(path, "w", encoding="utf-8") as log:
                self.running[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                                      stderr=log, cwd=self.folder,
                                                      start_new_session=True)
        except OSError as error:
            raise Failed(f"{name}: {command[0]}: {error.strerror}") from error
        deadline = time.monotonic() + self.start_s
        while not is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise Failed(f"{name} is not ready within {self.start_s} s: {self.why(name)}")
            time.sleep(0.2)
        self.check()

    def check(self):
        for name, process in self.running.items():
            self.note_peak(name)
            if process.poll() is not None:
                raise Failed(f"{name} has ended with code {process.returncode}: {self.why(name)}")

    def why(self, name):
        """The first exception in a log, or else its last line; then the end of the log."""
        path = os.path.join(self.folder, f"{name}.log")
        with open(path, "rb") as log:
            text = log.read(CAUSE_LOG_BYTES).decode(errors="replace")
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
            end_of_log = log.read().decode(errors="replace").strip()
        found = EXCEPTION.search(text)
        last = end_of_log.splitlines()[-1] if end_of_log else "it has said nothing"
        cause = (found.group(1) if found else last)[:CAUSE_CHARACTERS]
        return f"{cause}\nThe end of {path}:\n{end_of_log}"

    def note_peak(self, name):
        """The most memory that a process had resident, its children not counted."""
        try:
            with open(f"/proc/{self.running[name].pid}/status", encoding="utf-8") as status:
                for line in status:
                    if line.startswith("VmHWM:"):
                        self.peaks[name] = int(line.split()[1]) << 10
        except OSError:
            pass  # it has ended

    def peak_bytes(self, name):
        return self.peaks.get(name)


def end(process):
    """A process and its children: asked first, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def memory_available():
    with open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def output(command):
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def facts():
    """What a figure is worth nothing without."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cpu = ""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    gpus = output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version,pcie.link.gen.max,"
                   "pcie.link.width.max", "--format=csv,noheader"])
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_free_bytes": memory_available(),
            "kernel": platform.release(), "python": platform.python_version(),
            "gpus": gpus.splitlines() if gpus else [], "versions": versions,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
