# SPDX-License-Identifier: Apache-2.0
"""A GPU for the stand-in of vLLM: pages on the fake CUDA driver, which runs what is queued in any
order that streams and events allow. $KVFERRY_CUDA_DRIVER names it.
"""
import ctypes
import functools
import os
import random

from case import DaemonCase
from standin import Array, Engine

import kvferry.vllm as connector
from kvferry.vllm import worker_gpu

CUDA = ctypes.CDLL(os.environ["KVFERRY_CUDA_DRIVER"])
BLOCK = Engine.BLOCK
BURST_BYTES = 4 << 20
SEED = int(os.environ.get("KVFERRY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))


def cuda(name, *arguments):
    result = getattr(CUDA, name)(*arguments)
    assert result == 0, f"{name}: {result}"


class FakeDevice:
    """A stream, and events on it, of the fake driver."""

    def __init__(self):
        self.pointer = ctypes.c_void_p()
        cuda("cuStreamCreateWithPriority", ctypes.byref(self.pointer), 1, 0)

    def stream(self):
        return self.pointer.value

    def free_bytes(self):
        """So little that the ring is as small as the library makes it for the tests' bursts."""
        return worker_gpu.RING_SHARE

    def record(self):
        event = ctypes.c_void_p()
        cuda("cuEventCreate", ctypes.byref(event), 2)
        cuda("cuEventRecord", event, self.pointer)
        return event.value, event

    def copy(self, to, data):
        """Queue a copy; data stays until the stream has been waited for. (A copy from host memory
        that is not pinned would be waited for; to this driver all memory is the device's.)"""
        cuda("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(ctypes.addressof(data)),
             ctypes.c_size_t(len(data) - 1), self.pointer)

    def wait(self):
        cuda("cuStreamSynchronize", self.pointer)

    def fetch(self, arrays, ids, n_bytes):
        """Queue copies of pages to memory of ours."""
        memory = ctypes.create_string_buffer(len(arrays) * len(ids) * n_bytes)
        starts = [ctypes.addressof(memory) + i * len(ids) * n_bytes for i in range(len(arrays))]
        for start, array in zip(starts, arrays):
            for i, page in enumerate(ids):
                cuda("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(start + i * n_bytes),
                     ctypes.c_uint64(array.address + page * array.strides[0]),
                     ctypes.c_size_t(n_bytes), self.pointer)
        return starts, self.wait, memory


class DeviceArray(Array):
    """An array in memory of the fake device."""

    def __init__(self, shape, item):
        super().__init__(shape, item)
        address = ctypes.c_uint64()
        cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(self.memory)))
        self.address = address.value
        self.memory = (ctypes.c_char * len(self.memory)).from_address(self.address)
        self.__array_interface__ = {"data": (self.address, False)}

    def page(self, i):
        return memoryview(self.memory).cast("B")[i * self.strides[0]:(i + 1) * self.strides[0]]


class GpuEngine(Engine):
    """Steps are queued on a stream, as on a GPU."""

    DEVICE = "cuda"

    def __init__(self, extra, device, **changes):
        self.device, self.held = device, []
        super().__init__(extra, **changes)

    def make_array(self):
        return DeviceArray((self.PAGES, *self.shape), self.item)

    def write(self, page, data_of):
        for rank, arrays in enumerate(self.arrays):
            for layer, array in enumerate(arrays):
                data = ctypes.create_string_buffer(data_of(rank, layer))
                self.held.append(data)
                self.device.copy(array.address + page * array.strides[0], data)

    def compute(self, request, first, end):
        for block in range(first, end):
            self.write(self.table[request.request_id][block],
                       lambda rank, layer, block=block: self.content(request, block, rank, layer))

    def holds(self, request, first, end):
        self.device.wait()
        self.held.clear()
        return super().holds(request, first, end)


class Case(DaemonCase):
    def setUp(self):
        super().setUp()
        print(f"seed {SEED}")
        CUDA.fake_cuda_seed(ctypes.c_uint64(SEED))
        self.start("allow_uncalibrated=true")
        cuda("cuInit", 0)
        context = ctypes.c_void_p()
        cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        cuda("cuCtxPushCurrent_v2", context)
        self.device = FakeDevice()
        self.addCleanup(setattr, connector, "TorchDevice", connector.TorchDevice)
        connector.TorchDevice = lambda: self.device
        # less memory than is meant for real pages: it takes no time to make
        self.addCleanup(setattr, worker_gpu, "Gpu", worker_gpu.Gpu)
        worker_gpu.Gpu = functools.partial(worker_gpu.Gpu, burst_bytes=BURST_BYTES,
                                           load_window_bytes=BURST_BYTES)

    def engine(self, **changes):
        engine = GpuEngine(self.settings(**changes), self.device)
        self.addCleanup(engine.close)
        return engine

    def store(self, engine, n=200, seed=0):
        """Compute and store a prompt; its pages are given to others in the same moment."""
        request = self.request(f"first {seed}", n, seed)
        self.assertEqual(engine.load(request), 0)
        engine.allocate(request)
        engine.step({request: (0, n)}, compute=[(request, 0, n // BLOCK)])
        for page in engine.table[request.request_id]:
            engine.write(page, lambda rank, layer: bytes(engine.arrays[0][0].strides[0]))
        engine.finish(request)
        return request
