#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rounds of faults between two daemons: each get ends as a hit with the right bytes, or as a miss.

usage: peers_rounds.py KVFERRYD KVFERRY [--clock SHIM] [--rounds N] [--seed N] [--json FILE]

The daemons are in two network namespaces, with a wire of our own between them (wire.py). A round
puts blocks on the first, waits until the second has heard of them, gets them there while a fault
goes on, mends it, and waits until a get is a hit again. The faults, one after the other in an order
by lot: the owner is killed and starts again; the wire is parted; every packet takes 200 ms; packets
are held and let go; connections are reset in the middle of what they carry; the wall clock of the
owner, or of the one that asks, jumps by days (SHIM, a library that is preloaded: wall_clock.c).

With --json the result is written and limits of time and growth are judged too: a get takes no more
than the second's timeout, a heartbeat, and what a ping at the same time took (so much is the busy
machine's) with SLACK_S; from round WARM on its memory, descriptors, connections and leases do not
grow. Without it (in ctest) no speed decides anything. In both cases all slots are free in the end:
nothing is left in memory once all namespaces have been purged.
Exit code 77: this user, or this machine, cannot make such a wire.
"""
import argparse
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from wire import Wire  # noqa: E402

ADDRESSES = ["10.199.18.1", "10.199.18.2"]
PORT = 7171
WAIT_S = 120
TIMEOUT_S, HEARTBEAT_S = 2, 1
SLACK_S = 0.5
WARM = 20
PASSING = 2  # connections that come or go while they are counted; what leaks does so in each round
BLOCKS = 4
SMALL = ["dram.bytes=64MiB", "dram.area_bytes=1MiB", "nvme.0.bytes=64MiB",
         "nvme.0.segment_bytes=4MiB", f"peers.timeout={TIMEOUT_S}s",
         f"peers.heartbeat={HEARTBEAT_S}s"]
FAULTS = ["kill", "part", "delay", "hold", "cut", "clock-owner", "clock-asker", "none"]


class Failure(Exception):
    """What must not be."""


class Clock:
    """An offset of a process's wall clock, in seconds, which may change while it runs."""

    def __init__(self, path):
        self.path = path
        with open(path, "wb") as file:
            file.write(bytes(8))

    def set(self, seconds):
        with open(self.path, "r+b") as file:  # in place: it is mapped
            file.write(struct.pack("<q", seconds))


class Rounds:
    def __init__(self, arguments, folder, wire):
        self.arguments = arguments
        self.folder = folder
        self.wire = wire
        self.random = random.Random(arguments.seed)
        self.number = 0
        self.processes = [None, None]
        self.clocks = [Clock(os.path.join(folder, f"clock{side}")) for side in (0, 1)]
        self.times = {}
        self.net_times = {}
        self.ping_s = 0.0
        self.hits = self.misses = 0
        self.samples = []
        with open(os.path.join(folder, "key"), "wb") as file:
            file.write(bytes(range(32)))

    # --- daemons ------------------------------------------------------------------------------

    def start(self, side):
        folder = os.path.join(self.folder, str(side))
        os.makedirs(folder, exist_ok=True)
        command = ["ip", "netns", "exec", self.wire.names[side], self.arguments.kvferryd, "--dir",
                   folder]
        for value in [*SMALL, f"cluster_key={self.folder}/key",
                      f"peers.listen={ADDRESSES[side]}:{PORT}",
                      f"peers.nodes={ADDRESSES[1 - side]}:{PORT}"]:
            command += ["--set", value]
        env = {**os.environ, "UCX_TLS": "tcp"}
        if self.arguments.clock:
            env.update(LD_PRELOAD=self.arguments.clock, KVF_TEST_CLOCK=self.clocks[side].path)
        with open(os.path.join(self.folder, f"log{side}"), "ab") as log:
            self.processes[side] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                                    stderr=log, env=env)
        self.wait_for(lambda: self.kvferry(side, "ping", "--count", "1").returncode == 0,
                      f"daemon {side} to start")

    def end(self):
        for side in (0, 1):
            self.end_process(side)

    def kvferry(self, side, *arguments, data=b""):
        socket = os.path.join(self.folder, str(side), "kvferryd.sock")
        return subprocess.run([self.arguments.kvferry, *arguments, "--socket", socket], input=data,
                              capture_output=True, timeout=WAIT_S, check=False)

    def wait_for(self, is_so, what):
        end = time.monotonic() + WAIT_S
        while not is_so():
            for process in self.processes:
                if process is not None and process.poll() is not None:
                    raise Failure(f"a daemon ended ({process.returncode}), waiting for {what}")
            if time.monotonic() > end:
                raise Failure(f"waited for {what}")
            time.sleep(0.02)

    # --- blocks -------------------------------------------------------------------------------

    @staticmethod
    def payload(number):
        seed = hashlib.sha256(str(number).encode()).digest()
        return seed * (3000 + 10000 * (number % 4))

    def put(self, number):
        done = self.kvferry(0, "put", "--key-text", f"round block {number}", "--durable",
                            data=self.payload(number))
        if done.returncode != 0:
            raise Failure(f"put: {done.stderr.decode()}")

    def is_hit(self, number, done):
        if done.returncode == 0:
            if done.stdout != self.payload(number):
                raise Failure(f"block {number} has wrong bytes")
            return True
        if b"miss" not in done.stdout + done.stderr:
            raise Failure(f"block {number}: {done.stdout.decode()}{done.stderr.decode()}")
        return False

    def get(self, number):
        return self.is_hit(number, self.kvferry(1, "get", "--key-text", f"round block {number}"))

    def get_all(self, numbers, meanwhile):
        """Get blocks at the same time. Returns how many were hits, and the seconds of the slowest.
        """
        socket = os.path.join(self.folder, "1", "kvferryd.sock")
        begin = time.monotonic()
        ping = threading.Thread(target=self.ping, args=(begin,))
        ping.start()
        gets = [subprocess.Popen([self.arguments.kvferry, "get", "--key-text",
                                  f"round block {number}", "--socket", socket],
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE) for number in numbers]
        meanwhile()
        hits = 0
        for number, get in zip(numbers, gets):
            out, err = get.communicate(timeout=WAIT_S)
            hits += self.is_hit(number, subprocess.CompletedProcess([], get.returncode, out, err))
        seconds = time.monotonic() - begin
        ping.join()
        return hits, seconds

    def ping(self, begin):
        """How long a command takes now that waits for no other node."""
        self.kvferry(1, "ping", "--count", "1")
        self.ping_s = time.monotonic() - begin

    # --- rounds -------------------------------------------------------------------------------

    def asked(self):
        done = self.kvferry(1, "peers", "-o", "json")
        return [row for row in json.loads(done.stdout)["peers"] if row["asked"]]

    def stat(self):
        return json.loads(self.kvferry(1, "stat", "-o", "json").stdout)

    def begin_fault(self, fault):
        if fault == "kill":
            pid = self.processes[0].pid
            os.kill(pid, signal.SIGKILL)
            self.processes[0].wait()
        elif fault == "part":
            self.wire.part()
        elif fault == "delay":
            self.wire.delay(0.2)
        elif fault == "hold":
            self.wire.hold()
        elif fault == "cut":
            self.wire.cut(2)
        elif fault.startswith("clock"):
            days = self.random.choice([-3000, -1, 1, 3000])
            self.clocks[fault == "clock-asker"].set(days * 86400)

    def end_fault(self, fault):
        self.wire.mend()
        for clock in self.clocks:
            clock.set(0)
        if fault == "kill":
            self.start(0)

    def round(self, fault):
        numbers = list(range(self.number, self.number + BLOCKS))
        self.number += BLOCKS + 2
        for number in [*numbers, self.number - 2, self.number - 1]:
            self.put(number)
        # word of blocks comes in order
        self.wait_for(lambda: self.get(self.number - 1), "a hit before the fault")
        pause_s = self.random.random() * 0.06

        def meanwhile():
            time.sleep(pause_s)
            self.begin_fault(fault)
            if fault == "hold":
                time.sleep(self.random.choice([0.3, 1, 3]))
                self.wire.mend()

        hits, seconds = self.get_all(numbers, meanwhile)
        self.hits += hits
        self.misses += BLOCKS - hits
        self.times.setdefault(fault, []).append(seconds)
        self.net_times.setdefault(fault, []).append(seconds - self.ping_s)
        self.end_fault(fault)
        self.wait_for(lambda: self.get(self.number - 2), f"a hit after {fault}")

    def sample(self, number):
        """What must not grow, of the one that asks."""
        inner = subprocess.run(["ip", "netns", "pids", self.wire.names[1]], capture_output=True,
                               check=True).stdout.split()
        pid = int(inner[0])
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            rss_kib = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        sockets = subprocess.run(["ip", "netns", "exec", self.wire.names[1], "cat",
                                  "/proc/net/tcp"], capture_output=True, check=True).stdout
        stat = self.stat()
        self.samples.append({"round": number, "rss_kib": rss_kib,
                             "fds": len(os.listdir(f"/proc/{pid}/fd")),
                             "connections": sockets.count(b" 01 "),
                             "links": len(json.loads(self.kvferry(1, "peers", "-o", "json")
                                                     .stdout)["peers"]),
                             "leased_bytes": stat["metrics"]["leased_bytes"],
                             "stored_bytes": stat["dram"]["stored_bytes"]})

    def purge(self):
        """All slots of the one that asks are free, once nothing is stored any more."""
        self.end_process(0)
        rows = json.loads(self.kvferry(1, "ls", "-o", "json").stdout)["namespaces"]
        for row in rows:
            self.kvferry(1, "purge", "--namespace", row["namespace_id"])
        self.wait_for(lambda: self.stat()["dram"]["stored_blocks"] == 0, "all slots to be free")

    def end_process(self, side):
        if self.processes[side] is not None:
            self.processes[side].kill()
            self.processes[side].wait()
            self.processes[side] = None

    def judge(self):
        """With --json: limits. Returns what is beyond them."""
        bad = []
        limit_s = TIMEOUT_S + HEARTBEAT_S + SLACK_S
        for fault, times in self.net_times.items():
            if max(times) > limit_s:
                bad.append(f"{fault}: a get took {max(times):.2f} s more than a ping, the limit is "
                           f"{limit_s} s")
        warm = [s for s in self.samples if s["round"] >= WARM]
        if len(warm) > 1:
            first, last = warm[0], warm[-1]
            if last["rss_kib"] > first["rss_kib"] * 1.05 + 1024:
                bad.append(f"memory grew from {first['rss_kib']} to {last['rss_kib']} KiB")
            for name in ("fds", "connections", "links", "leased_bytes"):
                if last[name] > first[name] + PASSING:
                    bad.append(f"{name} grew from {first[name]} to {last[name]}")
        return bad

    def run(self):
        self.start(0)
        self.start(1)
        self.wait_for(lambda: self.asked() != [], "the first link")
        faults = [f for f in FAULTS if self.arguments.clock or not f.startswith("clock")]
        for number in range(self.arguments.rounds):
            if number % len(faults) == 0:
                self.random.shuffle(faults)
            fault = faults[number % len(faults)]
            try:
                self.round(fault)
            except (Failure, subprocess.TimeoutExpired) as problem:
                for side in (0, 1):
                    with open(os.path.join(self.folder, f"log{side}"), encoding="utf-8") as log:
                        print(f"--- log of daemon {side}:\n{log.read()[-3000:]}")
                raise SystemExit(f"round {number}, {fault}, seed {self.arguments.seed}: "
                                 f"{problem}") from problem
            if number % WARM == WARM - 1 or number == self.arguments.rounds - 1:
                self.sample(number + 1)
        self.purge()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kvferryd")
    parser.add_argument("kvferry")
    parser.add_argument("--clock")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {arguments.seed}")
    wire = Wire([f"kvf{os.getpid()}{side}" for side in "ab"], ADDRESSES)
    bad = []
    with tempfile.TemporaryDirectory(prefix="kvferry-rounds-") as folder:
        rounds = None
        try:
            if not wire.make():
                print("no network namespaces or TUN devices here: skipped")
                sys.exit(77)
            rounds = Rounds(arguments, folder, wire)
            rounds.run()
            bad = rounds.judge() if arguments.json else []
        finally:
            if rounds is not None:
                rounds.end()
            wire.drop()
    result = {"rounds": arguments.rounds, "seed": arguments.seed, "hits": rounds.hits,
              "misses": rounds.misses, "packets": wire.packets, "bytes": wire.bytes,
              "limit_s": TIMEOUT_S + HEARTBEAT_S + SLACK_S,
              "slowest_s": {fault: round(max(times), 2) for fault, times in rounds.times.items()},
              "slowest_more_than_ping_s": {fault: round(max(times), 2)
                                           for fault, times in rounds.net_times.items()},
              "samples": rounds.samples, "beyond_limits": bad}
    if arguments.json:
        with open(arguments.json, "w", encoding="ascii") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    print(json.dumps(result))
    sys.exit("\n".join(bad) if bad else 0)


if __name__ == "__main__":
    main()
