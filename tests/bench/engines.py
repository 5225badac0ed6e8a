# SPDX-License-Identifier: Apache-2.0
"""The bench engines: kvferry beside other stores of KV, all on this machine, at one boundary.

Put: a block begins in memory of the client's process, and the store has answered for it. Get: it
lies in memory of another client's process and has been read there once. Each store has a process
that puts and one that gets, blocks of 1 or 8 MiB, the same bytes and the same reader. Sides follow
one another in pairs; who is first alternates. Throughput and CPU, of the client and of all of the
store's processes, with 8 blocks in flight (in one call or request where a client has that); the
times of single blocks with one.

The other stores' Python packages are in virtual environments of their own, in --venvs, a folder
that tests/bench/engines_venvs.sh has made."""
import contextlib
import os
import re
import shutil
import socket as socketlib
import statistics
import subprocess
import sys
import time

import figures
import machine

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
GIB = 1 << 30
DEPTH = 8
SIZES = {"1m": MIB, "8m": 8 * MIB}
SLICE_BLOCKS = {"1m": 32, "8m": 32}  # at least so many blocks in each side of a pair
SLICE_BLOCKS_QUICK = {"1m": 8, "8m": 4}
WORKING_SET_CACHES = 8
# Two stores have this many working sets at once: each client's blocks, and what a store may hold.
WORKING_SETS = 12
MEMORY_SHARE = 0.6  # of the machine's, for those
READY_S = 300
MANY, SINGLE = 0, 1  # serial numbers of what is there to be got: by many at once, one by one
MAKE = "tests/bench/engines_venvs.sh FOLDER makes it, then --venvs FOLDER"


class Failure(Exception):
    """kvferry cannot be measured; the text says why."""


class Missing(Exception):
    """Another store is not installed here, or does not work; the text says what is wrong."""


def free_port():
    with socketlib.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def cpu_s(pid):
    """Seconds of CPU of a process, of all its threads: the clock that clock_getcpuclockid names."""
    return time.clock_gettime((~pid << 3) | 2)


def tail_of(path):
    with open(path, encoding="utf-8", errors="replace") as log:
        return log.read()[-4000:]


def wait_until(is_ready, process, what, log_path):
    deadline = time.monotonic() + READY_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Missing(f"{what} does not start:\n{tail_of(log_path)}")
        time.sleep(0.05)


def listens(port):
    def is_ready():
        with socketlib.socket() as found:
            return found.connect_ex(("127.0.0.1", port)) == 0
    return is_ready


# --- stores --------------------------------------------------------------------------------------

class Store:
    """Processes of a store, and how its two drivers are started. capacity: bytes that it may hold,
    twice what is ever in it."""

    def __init__(self, bench, capacity):
        self.bench = bench
        self.capacity = capacity
        self.servers = []
        self.logs = []

    def start(self, name, command, is_ready, **options):
        """A process of the store, its output in a log, until it is ready."""
        path = os.path.join(self.bench.folder, f"{name}.log")
        with open(path, "w", encoding="utf-8") as log:
            process = self.bench.children.start(command, stdout=log, stderr=log, **options)
        self.servers.append(process)
        self.logs.append(path)
        wait_until(is_ready, process, name, path)

    def command(self, role, size, blocks):
        raise NotImplementedError

    def environment(self):
        return None

    def close(self):
        for process in reversed(self.servers):
            self.bench.children.stop(process)


class OfProgram(Store):
    """A store whose driver is bench_engines."""

    driver, socket = "", None

    def command(self, role, size, blocks):
        return [os.path.join(self.bench.build, "tests", "bench", "bench_engines"), "--store",
                self.driver, "--role", role, "--block", str(size), "--blocks", str(blocks),
                *(["--socket", self.socket] if self.socket else [])]


class Copy(OfProgram):
    driver = "copy"


class Kvferry(OfProgram):
    driver = "kvferry"

    def __init__(self, bench, capacity):
        super().__init__(bench, capacity)
        daemon, self.socket = bench.start_daemon(
            bench.options, bench.folder, capacity // 4, f"dram.bytes={capacity // MIB}MiB")
        self.servers.append(daemon)


class Valkey(OfProgram):
    """valkey-server, or redis-server, its ancestor, where there is none."""

    driver = "resp"

    def __init__(self, bench, capacity):
        super().__init__(bench, capacity)
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            raise Missing("no valkey-server or redis-server: apt-get install redis-server")
        version = subprocess.run([program, "--version"], capture_output=True, text=True,
                                 check=False).stdout
        found = re.search(r"v=([0-9.]+)", version)
        self.version = f"{os.path.basename(program)} {found.group(1) if found else version}"
        self.socket = os.path.join(bench.folder, "valkey.sock")
        self.start("valkey", [program, "--port", "0", "--unixsocket", self.socket, "--save", "",
                              "--appendonly", "no", "--daemonize", "no", "--dir", bench.folder,
                              "--maxmemory", str(capacity), "--maxmemory-policy", "allkeys-lru"],
                   lambda: os.path.exists(self.socket))


class OfPython(Store):
    """A store whose driver is a Python program, of a virtual environment."""

    venv = script = package = ""

    def __init__(self, bench, capacity):
        super().__init__(bench, capacity)
        venvs = bench.options.venvs
        self.python = os.path.join(venvs, self.venv, "bin", "python") if venvs else ""
        if not os.access(self.python, os.X_OK):
            raise Missing(f"no {self.package} in {venvs}: {MAKE}" if venvs
                          else f"no {self.package}: {MAKE}")
        done = subprocess.run(
            [self.python, "-c", "import importlib.metadata as m, sysconfig; "
             f"print(m.version('{self.package}'), sysconfig.get_path('platlib'))"],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Missing(f"{self.python} has no {self.package}: {MAKE}")
        version, self.packages = done.stdout.split()
        self.version = f"{self.package} {version}"

    def address(self, size):
        raise NotImplementedError

    def command(self, role, size, blocks):
        library = os.path.join(self.bench.build, "tests", "bench", "libbench_reader.so")
        words = [f"--address={name}={value}" for name, value in self.address(size).items()]
        return [self.python, "-B", os.path.join(HERE, self.script), "--library", library, "--role",
                role, "--block", str(size), "--blocks", str(blocks), *words]


class Mooncake(OfPython):
    """A master, and a mooncake_client process that owns the memory; clients bring none."""

    venv, script = "mooncake", "engines_mooncake.py"
    package = "mooncake-transfer-engine-non-cuda"

    def __init__(self, bench, capacity):
        super().__init__(bench, capacity)
        folder = os.path.join(self.packages, "mooncake")
        port, pool_port = free_port(), free_port()
        self.master = f"127.0.0.1:{port}"
        self.start("mooncake_master",
                   [os.path.join(folder, "mooncake_master"), f"--rpc_port={port}",
                    f"--metrics_port={free_port()}"],
                   listens(port), env=self.environment(), cwd=bench.folder)
        self.start("mooncake_client",
                   [os.path.join(folder, "mooncake_client"), "--host=127.0.0.1",
                    f"--port={pool_port}", f"--global_segment_size={capacity}",
                    "--local_buffer_size=67108864", f"--master_server_address={self.master}",
                    "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"],
                   listens(pool_port), env=self.environment(), cwd=bench.folder)

    def environment(self):
        folder = os.path.join(self.packages, "mooncake")
        return {**os.environ, "LD_LIBRARY_PATH": folder, "MC_LOG_LEVEL": "ERROR",
                "GLOG_minloglevel": "2", "MC_TCP_ENABLE_CONNECTION_POOL": "1"}

    def address(self, size):
        return {"master": self.master, "port": free_port()}


class Lmcache(OfPython):
    """LMCache's own server, without a GPU: clients copy to and from its shared memory."""

    venv, script, package = "lmcache", "engines_lmcache.py", "lmcache"

    def __init__(self, bench, capacity):
        super().__init__(bench, capacity)
        self.port = free_port()
        self.start("lmcache_server",
                   [os.path.join(os.path.dirname(self.python), "lmcache"), "server", "--host",
                    "127.0.0.1", "--port", str(self.port), "--http-host", "127.0.0.1",
                    "--http-port", str(free_port()), "--supported-transfer-mode", "engine_driven",
                    "--l1-size-gb", str(capacity / GIB), "--no-l1-use-lazy", "--shm-name",
                    f"kvferry-bench-{os.getpid()}", "--eviction-policy", "LRU", "--max-workers",
                    "2"],
                   listens(self.port), env=self.environment(), cwd=bench.folder)

    def environment(self):
        return {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}

    def address(self, size):
        return {"url": f"tcp://127.0.0.1:{self.port}"}


OTHERS = {"copy": Copy, "valkey": Valkey, "mooncake": Mooncake, "lmcache_server": Lmcache}


# --- drivers -------------------------------------------------------------------------------------

class Driver:
    """The process of a store's client, which puts or gets."""

    def __init__(self, store, role, size, blocks):
        self.store = store
        self.children = store.bench.children
        path = os.path.join(store.bench.folder, f"{type(store).__name__}-{role}.log")
        with open(path, "w", encoding="utf-8") as log:
            self.process = self.children.start(
                store.command(role, size, blocks), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env=store.environment(), cwd=store.bench.folder)
        self.log_path = path
        self.ask(None, "ready")

    def ask(self, request, wanted=None):
        """Words of the answer."""
        if request is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and does not answer
                self.process.stdin.write(request + "\n")
                self.process.stdin.flush()
        # what a library says on standard output is no answer
        for line in self.process.stdout:
            words = line.split()
            if words and (words[0] == wanted or wanted is None and
                          all(word.isdigit() for word in words)):
                return words
        self.process.wait(READY_S)
        logs = "\n".join(tail_of(path) for path in (self.log_path, *self.store.logs))
        kind = Failure if isinstance(self.store, Kvferry) else Missing
        raise kind(f"the client of {type(self.store).__name__} failed; its log, and those of the "
                   f"store:\n{logs}")

    def cpu_s(self):
        pids = [self.process.pid, *(process.pid for process in self.store.servers)]
        return sum(cpu_s(pid) for pid in pids)

    def move(self, serial, n, depth):
        """(bytes, seconds, seconds of CPU, microseconds of each block with depth 1)."""
        began = self.cpu_s()
        words = self.ask(f"move {serial} {n} {depth}")
        used = self.cpu_s() - began
        return int(words[0]), int(words[1]) / 1e9, used, [int(word) / 1e3 for word in words[2:]]

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.children.wait(self.process)


class Clients:
    """The two drivers of a store for one size of blocks."""

    def __init__(self, store, size, blocks):
        self.putter = Driver(store, "put", size, blocks)
        self.getter = Driver(store, "get", size, blocks)
        self.serial = SINGLE

    def side(self, what, depth, seconds, n):
        """One side of a pair: {"rate": GB/s, "cpu": s/GB} with many in flight, else percentiles."""
        size = elapsed = used = 0
        times = []
        while elapsed < seconds:
            if what == "put":
                self.serial += 1
                moved = self.putter.move(self.serial, n, depth)
                self.putter.ask(f"drop {self.serial}", "ok")
            else:
                moved = self.getter.move(MANY if depth > 1 else SINGLE, n, depth)
            size, elapsed, used = size + moved[0], elapsed + moved[1], used + moved[2]
            times += moved[3]
        if depth > 1:
            return {"": size / elapsed / 1e9, "_cpu": used / size * 1e9}
        times.sort()
        return {"_p50": statistics.median(times), "_p99": times[int(0.99 * (len(times) - 1))]}

    def fill(self, blocks):
        self.putter.move(MANY, blocks, DEPTH)
        self.putter.move(SINGLE, blocks, 1)

    def close(self):
        self.putter.close()
        self.getter.close()


# --- the bench -----------------------------------------------------------------------------------

def close_all(things):
    for thing in things.values():
        thing.close()


class Bench:
    def __init__(self, options, samples, children, start_daemon, folder):
        self.options, self.samples, self.children = options, samples, children
        self.start_daemon, self.build = start_daemon, options.build
        self.folder = self.top = folder
        self.working_set = 32 * MIB
        if not options.quick:
            caches = WORKING_SET_CACHES * -(-machine.llc_bytes() // MIB)
            room = int(MEMORY_SHARE * machine.memory_bytes() / WORKING_SETS) // MIB
            self.working_set = min(caches, room) * MIB
        self.flipped = False

    def names(self, what, label, depth, other):
        """Of the figures that a pair gives, those that are asked for."""
        only = self.options.only
        tails = figures.ENGINE_TAILS[depth > 1]
        return {tail: f"{what}_{label}{tail}_vs_{other}" for tail in tails
                if only in (None, f"{what}_{label}{tail}_vs_{other}")}

    def all_names(self, label, other):
        return [name for what in ("put", "get") for depth in (DEPTH, 1)
                for name in self.names(what, label, depth, other).values()]

    def pair(self, what, label, depth, clients, other):
        """One pair of each figure that this depth gives."""
        names = self.names(what, label, depth, other)
        if not names:
            return
        n = SLICE_BLOCKS_QUICK[label] if self.options.quick else SLICE_BLOCKS[label]
        order = (other, "kvferry") if self.flipped else ("kvferry", other)
        sides = {store: clients[store].side(what, depth, self.options.seconds, n)
                 for store in order}
        self.flipped = not self.flipped
        for tail, name in names.items():
            self.samples.add_pair(name, sides["kvferry"][tail], sides[other][tail])

    def measure_beside(self, other, label):
        """kvferry beside one other store, which both begin empty: no more than two are there at
        once, since each has copies of the working set."""
        size = SIZES[label]
        blocks = self.working_set // size
        blocks -= blocks % min(DEPTH, blocks)  # whole requests: some stores give no part of one
        capacity = max(4 * self.working_set, GIB)
        self.folder = os.path.join(self.top, f"{other}-{label}")
        os.mkdir(self.folder)
        stores, clients = {}, {}
        try:
            stores[other] = OTHERS[other](self, capacity)
            stores["kvferry"] = Kvferry(self, capacity)
            if hasattr(stores[other], "version"):
                self.samples.software[other] = stores[other].version
            for name, store in stores.items():
                clients[name] = Clients(store, size, blocks)
            for what in ("put", "get"):
                if what == "get":
                    for name in clients:
                        clients[name].fill(blocks)
                for _ in range(self.options.pairs):
                    for depth in (DEPTH, 1):
                        self.pair(what, label, depth, clients, other)
        finally:
            close_all(clients)
            close_all(stores)

    def measure(self):
        for other in OTHERS:
            for label in SIZES:
                names = self.all_names(label, other)
                if not names:
                    continue
                try:
                    self.measure_beside(other, label)
                except Missing as missing:
                    why, _, logs = str(missing).partition("\n")
                    if logs:
                        print(f"{why}\n{logs}", file=sys.stderr)
                    for name in names:
                        self.samples.pairs.pop(name, None)
                        self.samples.skipped[name] = why
