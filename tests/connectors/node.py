# SPDX-License-Identifier: Apache-2.0
"""node.py: a kvferryd in a folder of its own, and what was seen, for scripts run by hand."""
import os
import socket
import subprocess
import time
from pathlib import Path

READY_S = 120


def metrics(socket_path):
    """What the daemon's metrics page says: {name: value} of those without labels."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(socket_path + ".admin")
        link.sendall(b"GET /metrics HTTP/1.0\r\nHost: here\r\n\r\n")
        said = b""
        while part := link.recv(1 << 16):
            said += part
    lines = [line.split(" ") for line in said.decode().splitlines() if line.startswith("kvferry_")]
    return {line[0]: float(line[1]) for line in lines if "{" not in line[0]}


class Daemon:
    """Started by start(), killed by kill(), and started again on what it has written."""

    def __init__(self, program, folder, *sets):
        self.program, self.folder, self.sets = program, Path(folder), sets
        self.folder.mkdir(exist_ok=True)
        self.socket = str(self.folder / "kvferryd.sock")
        self.where = ["--dir", str(self.folder)]
        self.process = None

    def without_drive(self):
        """Memory only."""
        config = self.folder / "kvferryd.yaml"
        config.write_text(f"sockets:\n  - path: {self.socket}\n", encoding="utf-8")
        self.where = ["--config", str(config)]
        return self

    def start(self, *more, failpoints=""):
        log = self.folder / "log"
        command = [self.program, *self.where]
        for value in (*self.sets, *more):
            command += ["--set", value]
        with open(log, "ab") as file:
            begin = file.tell()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**os.environ, "KVFERRY_FAILPOINTS": failpoints})
        end = time.monotonic() + READY_S
        while b"admin socket " not in log.read_bytes()[begin:]:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(log.read_text(errors="replace"))
            time.sleep(0.05)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def flip_bytes(self):
        """Flip a byte in every 64 KiB of the store, but for its first megabyte."""
        store = self.folder / "nvme.store"
        with open(store, "r+b") as file:
            for offset in range((1 << 20) + 40_000, store.stat().st_size, 1 << 16):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x10]))


class Run:
    """Phases of a script: say() prints what one has shown, and keeps it. corrupt: the script is to
    spoil what was loaded, and then to find it."""

    def __init__(self, daemon, corrupt):
        self.daemon, self.corrupt = daemon, corrupt
        self.results, self.bad = {}, []

    def say(self, name, good, **facts):
        self.results[name] = {"good": bool(good), **facts}
        print(f"{'ok  ' if good else 'BAD '} {name} {facts}", flush=True)
        if not good:
            self.bad.append(name)
