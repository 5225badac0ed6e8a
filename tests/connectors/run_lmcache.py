#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The native plug-in with LMCache itself, by hand: with its adapter classes, and behind its server.

usage: run_lmcache.py BUILD_FOLDER [--out FILE]

Run by the Python of a virtual environment that has lmcache (tests/bench/engines_venvs.sh makes one)
and cffi. First LMCache's own NativeConnectorL2Adapter is made from JSON by its registry, and chunks
go through it in LMCache's memory objects. Then `lmcache server` runs with the plug-in as L2, and a
client of LMCache's own classes stores chunks; L1 is emptied; the chunks must come back from
kvferryd, byte for byte, also after kvferryd has been killed and has started again on its drive, and
while it is away nothing may hang. Prints what came beside what was expected; exit 1 if they differ.
"""
import argparse
import ctypes
import json
import os
import select
import socket as socketlib
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "bench"))

WAIT_S = 120
CHUNK_BYTES = 1 << 20
CHUNKS = 16
DAEMON_SETS = ("dram.bytes=256MiB", "nvme.0.bytes=512MiB", "nvme.0.segment_bytes=32MiB",
               "nvme.0.admission=all")


class Wrong(Exception):
    """Something did not happen; the text says what."""


def wait_for(is_true, what):
    end = time.monotonic() + WAIT_S
    while not is_true():
        if time.monotonic() > end:
            raise Wrong(f"{what}: not within {WAIT_S} s")
        time.sleep(0.05)


class Rig:
    """A kvferryd, an LMCache server over it, and what has been found."""

    def __init__(self, options, folder):
        self.build, self.folder = options.build, folder
        self.package = os.path.join(options.build, "connectors", "python")
        self.socket = os.path.join(folder, "kvferryd.sock")
        self.processes = []
        self.rows = []

    def row(self, what, came, expected):
        self.rows.append({"what": what, "came": came, "expected": expected})
        print(f"{'ok   ' if came == expected else 'WRONG'} {what}: {came}, expected {expected}")

    def start(self, name, command, is_ready, **options):
        with open(os.path.join(self.folder, f"{name}.log"), "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        self.processes.append(process)
        wait_for(lambda: is_ready() or process.poll() is not None, name)
        if process.poll() is not None:
            with open(os.path.join(self.folder, f"{name}.log"), encoding="utf-8") as log:
                raise Wrong(f"{name} does not start:\n{log.read()[-4000:]}")
        return process

    def start_daemon(self):
        sets = [word for one in DAEMON_SETS for word in ("--set", one)]

        def is_ready():
            import kvferry
            try:
                with kvferry.Client(self.socket, connect_timeout_ms=1000):
                    return True
            except kvferry.KvferryError:
                return False
        return self.start("kvferryd", [os.path.join(self.build, "agent", "kvferryd"), "--dir",
                                       self.folder, *sets], is_ready)

    def adapter(self):
        return {"type": "native_plugin", "module_path": "kvferry.lmcache",
                "class_name": "KvferryConnector", "adapter_params": {"socket": self.socket}}

    def start_server(self, port):
        command = [os.path.join(os.path.dirname(sys.executable), "lmcache"), "server", "--host",
                   "127.0.0.1", "--port", str(port), "--http-port", str(free_port()),
                   "--supported-transfer-mode", "engine_driven", "--shm-name",
                   f"kvferry-run-{os.getpid()}", "--l1-size-gb", "0.25", "--no-l1-use-lazy",
                   "--eviction-policy", "LRU", "--l2-adapter", json.dumps(self.adapter())]

        def is_ready():
            with socketlib.socket() as found:
                return found.connect_ex(("127.0.0.1", port)) == 0
        return self.start("lmcache", command, is_ready, cwd=self.folder,
                          env={**os.environ, "PYTHONPATH": self.package,
                               "LMCACHE_TRACK_USAGE": "false"})

    def end(self):
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port():
    with socketlib.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# --- LMCache's adapter ---------------------------------------------------------------------------

def memory_object(size, value):
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    raw = torch.full((size,), value, dtype=torch.uint8)
    shape = torch.Size([size])
    return TensorMemoryObj(raw, MemoryObjMetadata(
        shape, torch.uint8, raw.data_ptr(), size, 1, fmt=MemoryFormat.BINARY, shapes=[shape],
        dtypes=[torch.uint8]), None)


def until(adapter_fd, answer, what):
    """LMCache's way to wait: for the descriptor, then for the answer."""
    poller = select.poll()
    poller.register(adapter_fd, select.POLLIN)
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        poller.poll(200)
        found = answer()
        if found is not None:
            return found
    raise Wrong(f"{what}: no answer within {WAIT_S} s")


def run_adapter(rig):
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
    spec = rig.adapter()
    adapter = create_l2_adapter(get_l2_adapter_config_class(spec["type"]).from_dict(spec))
    keys = [ObjectKey(bytes([i]) * 32, "a-model", 1) for i in range(4)]
    stored = [memory_object(CHUNK_BYTES, 65 + i) for i in range(3)]
    try:
        task = adapter.submit_store_task(keys[:3], stored)
        done = until(adapter.get_store_event_fd(),
                     lambda: adapter.pop_completed_store_tasks().get(task), "a store")
        rig.row("adapter: chunks stored", done.is_successful(), True)
        task = adapter.submit_lookup_and_lock_task(keys, {})
        found = until(adapter.get_lookup_and_lock_event_fd(),
                      lambda: adapter.query_lookup_and_lock_result(task), "a lookup")
        rig.row("adapter: chunks found", [found.test(i) for i in range(4)], [True] * 3 + [False])
        loaded = [memory_object(CHUNK_BYTES, 0) for _ in range(4)]
        task = adapter.submit_load_task(keys, loaded)
        good = until(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task), "a load")
        rig.row("adapter: chunks loaded", [good.test(i) for i in range(4)], [True] * 3 + [False])
        same = [bytes(a.byte_array) == bytes(b.byte_array) for a, b in zip(stored, loaded)]
        rig.row("adapter: chunks with the same bytes", same, [True] * 3)
        adapter.submit_unlock(keys[:3])
        adapter.delete(keys[:1])
        task = adapter.submit_lookup_and_lock_task(keys[:2], {})
        found = until(adapter.get_lookup_and_lock_event_fd(),
                      lambda: adapter.query_lookup_and_lock_result(task), "a lookup")
        rig.row("adapter: chunks after one was deleted", [found.test(i) for i in range(2)],
                [False, True])
        rig.row("adapter: healthy", adapter.report_status()["is_healthy"], True)
    finally:
        adapter.close()


# --- LMCache's server ----------------------------------------------------------------------------

def clients(rig, port):
    """(blocks, client) of a process that puts, and of one that gets."""
    import engines_driver
    import engines_lmcache
    made = []
    for role in ("put", "get"):
        blocks = engines_driver.Blocks(SimpleNamespace(
            library=os.path.join(rig.build, "tests", "bench", "libbench_reader.so"), role=role,
            block=CHUNK_BYTES, blocks=CHUNKS))
        made.append((blocks, engines_lmcache.Store(blocks, {"url": f"tcp://127.0.0.1:{port}"})))
    return made


def fetched(getter):
    """How many chunks came back with the right bytes; 0: the lookup found fewer than all."""
    blocks, store = getter
    for block in range(blocks.n):  # only right again once they have been got
        ctypes.memset(blocks.address(block), 0, blocks.block)
    try:
        store.get(0, range(blocks.n))
    except SystemExit as why:
        print(f"      {why}")
        return 0
    return sum(blocks.sum(block) == blocks.sums[block] for block in range(blocks.n))


def namespace_blocks(rig):
    import kvferry
    with kvferry.Client(rig.socket, name="run_lmcache") as client:
        return client.stat()["namespace_blocks"]


def run_server(rig, daemon):
    port = free_port()
    before = namespace_blocks(rig)
    rig.start_server(port)
    putter, getter = clients(rig, port)
    putter[1].put(0, range(CHUNKS))
    rig.row("server: chunks from its L1", fetched(getter), CHUNKS)
    wait_for(lambda: namespace_blocks(rig) - before >= CHUNKS, "L2 stores")
    putter[1].drop(0, [])
    rig.row("server: chunks from kvferryd", fetched(getter), CHUNKS)
    daemon.kill()
    daemon.wait()
    putter[1].drop(0, [])
    rig.row("server: chunks while kvferryd is away", fetched(getter), 0)
    rig.start_daemon()
    # the first request finds the connection broken and begins a new one
    wait_for(lambda: (putter[1].drop(0, []), fetched(getter))[1] == CHUNKS,
             "chunks after kvferryd has started again")
    rig.row("server: chunks from kvferryd's drive, after a kill", CHUNKS, CHUNKS)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", metavar="BUILD_FOLDER")
    parser.add_argument("--out", metavar="FILE", help="write the rows as JSON here")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    sys.path.insert(0, os.path.join(options.build, "connectors", "python"))
    with tempfile.TemporaryDirectory(prefix="kvferry-lmcache-") as folder:
        rig = Rig(options, folder)
        try:
            daemon = rig.start_daemon()
            run_adapter(rig)
            run_server(rig, daemon)
        except Wrong as wrong:
            rig.row("all of it", str(wrong), "")
        finally:
            rig.end()
    good = bool(rig.rows) and all(row["came"] == row["expected"] for row in rig.rows)
    report = {"lmcache": metadata.version("lmcache"), "identical": int(good), "rows": rig.rows}
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=1) + "\n")
    print("everything came as expected" if good else "NOT as expected")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
