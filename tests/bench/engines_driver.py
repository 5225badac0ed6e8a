# SPDX-License-Identifier: Apache-2.0
"""What the drivers of stores with a Python client share: the blocks, the reader, and the requests
of tests/bench/engines.py (those of bench_engines.c). Blocks and reader are those of the C driver,
by a library of it, so that each side makes and reads the same bytes by the same code."""
import argparse
import ctypes
import sys
import time

DEPTH_MAX = 8


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--role", choices=("put", "get"), required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--address", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    options.address = dict(item.split("=", 1) for item in options.address)
    return options


class Blocks:
    """Source of a putter, target of a getter: n blocks of random words each, by address."""

    def __init__(self, options):
        self.block, self.n = options.block, options.blocks
        self.is_getter = options.role == "get"
        self.library = ctypes.CDLL(options.library)
        self.library.bench_memory.restype = ctypes.c_void_p
        self.library.bench_memory.argtypes = (ctypes.c_size_t, ctypes.c_uint64)
        self.library.bench_sum.restype = ctypes.c_uint64
        self.library.bench_sum.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.library.bench_shuffle.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        size = self.block * self.n
        self.base = self.library.bench_memory(size, 1)
        self.sums = [self.sum(i) for i in range(self.n)]
        if self.is_getter:
            ctypes.memset(self.base, 0, size)

    def address(self, block):
        return self.base + block * self.block

    def sum(self, block):
        return self.library.bench_sum(self.address(block), self.block)

    def read(self, block):
        """Read a block once; ends the process if the bytes are wrong."""
        if self.sum(block) != self.sums[block]:
            sys.exit(f"block {block} has wrong bytes")

    def order(self, serial, unit):
        """All blocks; unit of them stay together, as they were put."""
        order = (ctypes.c_uint32 * (self.n // unit))()
        self.library.bench_shuffle(order, self.n // unit, serial)
        return [first * unit + i for first in order for i in range(unit)]


def serve(blocks, store):
    """Answer requests. store.put(serial, blocks) and store.get(serial, blocks) move that many at
    once and say nothing, store.drop(serial, blocks) removes. What was put by store.unit at once can
    only be got so."""
    print("ready", flush=True)
    order, position, n_orders, moved, together = [], 0, 0, [], False
    one = store.get if blocks.is_getter else store.put
    for line in sys.stdin:
        words = line.split()
        if words[0] == "drop":
            store.drop(int(words[1]), moved)
            print("ok", flush=True)
            continue
        serial, n, depth = (int(word) for word in words[1:])
        if position + n > len(order) or (depth > 1) != together:
            together = depth > 1
            order = blocks.order(n_orders, store.unit if together else 1)
            position, n_orders = 0, n_orders + 1
        moved = order[position:position + n]
        position += n
        ends = [time.perf_counter_ns()]
        for first in range(0, n, depth):
            part = moved[first:first + depth]
            one(serial, part)
            if blocks.is_getter:
                for block in part:
                    blocks.read(block)
            ends.append(time.perf_counter_ns())
        each = [str(b - a) for a, b in zip(ends, ends[1:])] if depth == 1 else []
        print(n * blocks.block, ends[-1] - ends[0], *each, flush=True)
