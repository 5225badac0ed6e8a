# SPDX-License-Identifier: Apache-2.0
"""A worker's side for pages on a GPU: KV is encoded before it crosses the link, decoded behind it.

Everything is queued on the engine's thread, and no stream is waited for. What keeps pages whole is
the order of streams: a store is encoded on the engine's own stream, behind the step that has
written the pages and before whatever is queued later, and a load writes behind an event that is
recorded when it is started, behind all that has read or encoded its pages. So preemption, abort and
reuse need nothing more, and pages are free for the engine at once.

The ring of encoded blocks has room for what two steps compute: nothing leaves it before the GPU
has run the step that it is of, and vLLM queues the next one before that. Where there is no room,
that is waited for, since what is not taken now is lost, and every chunk behind it of no use.
"""
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Protocol, Set, Tuple

from kvferry.buffers import Pages
from kvferry.client import Client
from kvferry.errors import BusyError, KvferryError, SessionError, Status
from kvferry.gpu import Gpu, GpuEvent, GpuGet, GpuPut
from kvferry.session import Session, agrees
from kvferry.vllm import worker
from kvferry.vllm.jobs import LoadJob, Report, StoreChunk
from kvferry.vllm.stats import WorkerCounters
from kvferry.vllm.worker import GET_CHUNKS, Done, count


STEPS = 2  # that the ring has room for: one is on its way out while the GPU runs the next
RING_MIN = 320 << 20  # what the library takes by itself is about this
RING_SHARE = 5  # of the free memory of the GPU the ring is one part in so many at most
STEP_S = 2.0  # what the stores of a step wait for the GPU and for the daemon, in all
PIECES_MAX = 2048  # of the daemon's arena, each at most 1 GiB
AGAIN_S = 30.0  # behind a GPU that had no memory for the ring


class Device(Protocol):
    """What is asked of the engine's framework."""

    def free_bytes(self) -> int:
        """Memory of the GPU that nobody has taken."""

    def stream(self) -> int:
        """The stream on which steps are queued at this moment; 0: CUDA's default one."""

    def record(self) -> Tuple[int, Any]:
        """An event recorded on that stream, and what keeps it alive."""

    def fetch(self, tensors: List[Any], ids: List[int],
              n_bytes: int) -> Tuple[List[int], Callable[[], None], Any]:
        """Queue copies of pages there, as drift.Fetch."""


class TorchDevice:
    """The current stream of torch."""

    def __init__(self) -> None:
        import torch
        self._torch, self._cuda = torch, torch.cuda
        self._fetched: Any = None

    def free_bytes(self) -> int:
        return int(self._cuda.mem_get_info()[0])

    def stream(self) -> int:
        return int(self._cuda.current_stream().cuda_stream)

    def record(self) -> Tuple[int, Any]:
        event = self._cuda.Event()
        event.record()
        return int(event.cuda_event), event

    def fetch(self, tensors: List[Any], ids: List[int],
              n_bytes: int) -> Tuple[List[int], Callable[[], None], Any]:
        """Into pinned memory, which is kept for the next time: pages are gathered on the GPU, a
        tensor at a time in the same place, since a copy for each page takes milliseconds of this
        thread. What it copies to is as it was until `wait` has returned."""
        torch, n = self._torch, n_bytes // tensors[0].element_size()
        shape = (len(tensors), len(ids), n_bytes)
        whole = shape[0] * shape[1] * shape[2]
        if self._fetched is None or self._fetched.numel() < whole:
            self._fetched = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
        memory = self._fetched[:whole].view(shape)
        index = torch.tensor(ids, pin_memory=True).to(tensors[0].device, non_blocking=True)
        room = torch.empty(shape[1:], dtype=torch.uint8, device=tensors[0].device)
        for to, tensor in zip(memory, tensors):
            pages = tensor.as_strided((tensor.shape[0], n), (tensor.stride(0), 1),
                                      tensor.storage_offset())
            torch.index_select(pages.view(torch.uint8), 0, index, out=room)
            to.copy_(room, non_blocking=True)
        event = self._cuda.Event()
        event.record()
        return [int(part.data_ptr()) for part in memory], event.synchronize, memory


class Load:
    """A load under way: chunks go in parts, so that few are leased at a time."""

    def __init__(self, job: LoadJob, event: int, held: Any):
        self.job, self.event, self.held = job, event, held
        self.deadline = time.monotonic() + job.budget_ms / 1000
        self.begun = 0  # chunks that have been asked for
        self.first = 0  # of them, the first one of the part in flight
        self.good: Set[int] = set()
        self.done = Done(job)


class GpuWorker:
    """Belongs to the engine's thread."""

    def __init__(self, pages: Pages, n_pages: int, session: Callable[..., Session], stores: bool,
                 device: Device, warn: Callable[[str], None], step_bytes: int = 0,
                 ring_bytes: int = 0):
        """step_bytes: of KV that one step computes, the most. ring_bytes: of GPU memory for what
        is on its way out; 0: by step_bytes."""
        self._pages, self._n_pages = pages, n_pages
        self._step_bytes, self._ring_wanted = step_bytes, ring_bytes
        self.ring_bytes = 0  # of the handle; 0: the library's own measure
        self._stores = stores
        self._device = device
        self._warn = warn
        self._session = session()
        self._gpu: Optional[Gpu] = None
        self._gpu_failed = False
        self._again = 0.0  # not opened before
        self._waiting: Deque[Load] = deque()
        self._loads: Dict[int, Load] = {}
        self._ended: List[Done] = []
        self._put_keys: Dict[int, List[bytes]] = {}
        self._encoding: Set[int] = set()  # puts that the GPU has not come to
        self._moved = 0.0  # when something was last taken, or has ended
        self._stored: Dict[bytes, int] = {}
        self.counters = WorkerCounters()
        self._handle()  # now, since it may take a moment, and pinning some more
        for _ in range(PIECES_MAX):
            self.idle()

    def _handle(self) -> Optional[Gpu]:
        """The GPU handle, opened when there is a daemon. None: not now, or never."""
        if self._gpu is None and not self._gpu_failed and time.monotonic() >= self._again:
            client: Optional[Client] = self._session.client()
            if client is not None:
                self.ring_bytes = self._ring_wanted or self._ring_bytes()
                try:
                    self._gpu = Gpu(client, self._pages, self._n_pages,
                                    ring_bytes=self.ring_bytes, pins_early=True)
                except KvferryError as error:
                    self._gpu_failed = error.status != Status["ERR_NO_MEMORY"]
                    self._again = time.monotonic() + AGAIN_S
                    cure = "" if self._gpu_failed else ("; it is tried again: leave vLLM less, or "
                                                        "set gpu_ring_bytes")
                    self._warn(f"the GPU is not served: {error}{cure}")
        return self._gpu

    def _ring_bytes(self) -> int:
        """Room for the encoded KV of STEPS, of which a quarter is scratch, but for a GPU that is
        full. 0: no more than the library takes by itself."""
        wanted = STEPS * self._step_bytes * 5 // 4
        ring_bytes = min(wanted, self._device.free_bytes() // RING_SHARE)
        return ring_bytes if ring_bytes > RING_MIN else 0

    # --- stores -----------------------------------------------------------------------------------

    def store(self, chunks: List[StoreChunk], lossless: bool) -> None:
        """Queue the encoding of chunks on the engine's stream. Where the step has more than the
        ring of encoded blocks has room for, waits for the GPU to run what is queued before, and
        for the daemon as long as it takes something within ROOM_S, STEP_S in all."""
        gpu = self._handle() if self._stores and chunks else None
        if gpu is None:
            self.counters.skipped += len(chunks) if self._stores else 0
            return
        began = self._moved = time.monotonic()
        self._poll(gpu)
        for chain in chains(chunks):
            while chain and self._gpu is not None:
                taken = self._put(gpu, chain, lossless)
                self.counters.handed += max(taken, 0)
                chain = chain[max(taken, 0):]
                if chain and (taken < 0 or not self._makes_room(began)):
                    break
                if chain:
                    self._poll(gpu, 1)
            self.counters.skipped += len(chain)
        self.counters.store_s += time.monotonic() - began

    def _makes_room(self, began: float) -> bool:
        """Whether a store that has begun then is to wait on."""
        now = time.monotonic()
        return now - began < STEP_S and (bool(self._encoding) or
                                         now - self._moved < worker.ROOM_S)

    def _agrees(self, lossless: bool) -> bool:
        """Whether the profile in force is of the kind that the scheduler has decided for."""
        client = self._session.client()
        return client is not None and agrees(client, lossless)

    def _put(self, gpu: Gpu, chain: List[StoreChunk], lossless: bool) -> int:
        """How many leading chunks have been taken; -1: none, and waiting does not help."""
        try:
            if not self._agrees(lossless):
                return -1
            items = [GpuPut(c.key, c.pages, c.token_start, c.n_tokens, c.supersedes)
                     for c in chain]
            request, taken = gpu.put(items, parent=chain[0].parent, depth=chain[0].depth,
                                     stream=self._device.stream())
            self._put_keys[request] = [c.key for c in chain[:taken]]
            self._encoding.add(request)
            self._moved = time.monotonic()
            return taken
        except BusyError:
            return 0
        except SessionError:
            return -1
        except Exception as error:  # as of a load
            self._warn(f"store: {error}")
            return -1

    # --- loads ------------------------------------------------------------------------------------

    def load(self, job: LoadJob) -> None:
        """Start a load behind all that is on the engine's stream by now. Does not block."""
        gpu = self._handle()
        if gpu is None:
            done = Done(job)
            done.end(0)
            self._ended.append(done)
            return
        event, held = self._device.record()
        self._waiting.append(Load(job, event, held))
        self._start(gpu)

    def _start(self, gpu: Gpu) -> None:
        """Ask for the next part of loads that wait, as far as the handle takes them."""
        while self._waiting:
            load = self._waiting[0]
            part = load.job.chunks[load.begun:load.begun + GET_CHUNKS]
            budget_ms = load.job.budget_ms
            if load.begun:  # what is behind the first part has what that has left
                budget_ms = min(budget_ms, int((load.deadline - time.monotonic()) * 1000))
            if budget_ms <= 0:
                self._end(self._waiting.popleft())
                continue
            try:
                if not self._agrees(load.job.lossless):
                    self._end(self._waiting.popleft())
                    continue
                request = gpu.get([GpuGet(c.key, c.pages, c.token_first, c.n_tokens)
                                   for c in part], budget_ms=budget_ms,
                                  wait_event=load.event)
            except BusyError:
                c = self.counters
                if self._loads or c.handed > c.stored + c.present + c.refused:
                    return  # its turn comes when one of those has ended
                self._end(self._waiting.popleft())
                continue
            except Exception as error:  # what a request asks for must not end the engine
                if not isinstance(error, SessionError):
                    self._warn(f"load: {error}")
                elif error.is_attaching and time.monotonic() < load.deadline:
                    return  # polls move that along
                self._end(self._waiting.popleft())
                continue
            self._waiting.popleft()
            load.first, load.begun = load.begun, load.begun + len(part)
            self._loads[request] = load

    def _end(self, load: Load) -> None:
        """The load is over: what has not come is bad."""
        chunks = load.job.chunks
        good = next((i for i in range(len(chunks)) if i not in load.good), len(chunks))
        load.done.end(good)
        self._ended.append(load.done)
        client = self._session.client() if good < len(chunks) else None
        if client is not None:
            client.report("load-failed", len(chunks) - good)

    def _take(self, event: GpuEvent) -> None:
        load = self._loads.get(event.request)
        if load is None:
            self._count(event)
        elif event.kind == "block":
            load.done.saw(event.status)
            if event.status == Status["OK"] and self._is_still(load.job.lossless):
                load.good.add(load.first + event.index)
        elif event.kind == "request":
            del self._loads[event.request]
            whole = len(load.good) == load.begun
            if whole and load.begun < len(load.job.chunks):
                self._waiting.appendleft(load)
            else:
                self._end(load)

    def _is_still(self, lossless: bool) -> bool:
        """Whether that was so when a block came."""
        client = self._session.client()
        return client is not None and client.info().lossless == lossless

    def _count(self, event: GpuEvent) -> None:
        """A completion of a store."""
        self._moved = time.monotonic()
        if event.kind != "block":
            self._encoding.discard(event.request)  # all of it has been encoded, or none will be
        if event.kind == "request":
            self._put_keys.pop(event.request, None)
        elif event.kind == "block":
            keys = self._put_keys.get(event.request)
            key = keys[event.index] if keys else None
            count(self.counters, self._stored, event.status, key)

    def _poll(self, gpu: Gpu, timeout_ms: int = 0) -> None:
        """Take completions; wait for the first."""
        try:
            while events := gpu.poll(timeout_ms):
                timeout_ms = 0
                for event in events:
                    self._take(event)
        except KvferryError as error:
            self._warn(f"the GPU has failed, and is not served from here on: {error}")
            self._give_up()
            return
        self._start(gpu)

    def _give_up(self) -> None:
        """The device has failed: every load ends, and no other begins."""
        self._gpu_failed = True
        for load in [*self._loads.values(), *self._waiting]:
            self._end(load)
        self._loads.clear()
        self._waiting.clear()
        self._encoding.clear()
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None

    def idle(self) -> None:
        """Move requests along. Does not block."""
        if self._gpu is not None:
            self._poll(self._gpu)

    def finished(self) -> Tuple[Set[str], Set[int], Report]:
        """Loads that have ended since the last call: requests, pages that hold nothing, and keys
        that did not load."""
        requests: Set[str] = set()
        bad: Set[int] = set()
        report = Report()
        for done in self._ended:
            done.collect(requests, bad, report, self.counters)
        self._ended.clear()
        report.stored, self._stored = self._stored, {}
        return requests, bad, report

    def close(self) -> None:
        """Wait for stores in flight, as store() does, and close the handles."""
        began = self._moved = time.monotonic()
        while self._gpu is not None and self._put_keys and self._makes_room(began):
            self._poll(self._gpu, 1)
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None
        self._session.close()


def chains(chunks: List[StoreChunk]) -> List[List[StoreChunk]]:
    """Chunks cut where one is not the child of the one before it."""
    made: List[List[StoreChunk]] = []
    for chunk in chunks:
        if made and chunk.parent == made[-1][-1].key:
            made[-1].append(chunk)
        else:
            made.append([chunk])
    return made
