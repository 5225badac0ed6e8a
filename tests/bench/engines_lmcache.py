# SPDX-License-Identifier: Apache-2.0
"""LMCache's own client classes, for tests/bench/engines.py: blocks are chunks of its default 256
tokens, prepared, copied to or from the server's shared memory by torch, and committed. What an
engine's worker does beyond that, gathering pages of all layers, is left out. A call is a request:
of one chunk, or of several that follow one another."""
import ctypes
import os

import engines_driver
import torch
import zmq
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import (IPCCacheServerKey,
                                                  RegisterEngineDrivenContextPayload)
from lmcache.v1.multiprocess.transfer_context.base import (EngineDrivenContextMetadata,
                                                           create_engine_driven_context)
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK_TOKENS = 256
LAYERS, ELEMENT_BYTES = 8, 2
TIMEOUT_S = 60.0


class Store:
    def __init__(self, blocks, address):
        self.blocks = blocks
        self.unit = min(engines_driver.DEPTH_MAX, blocks.n)
        self.model = f"bench-{blocks.block}"
        self.instance = os.getpid()
        self.n_requests = 0
        hidden = blocks.block // (2 * LAYERS * CHUNK_TOKENS * ELEMENT_BYTES)
        self.shape = torch.Size([2, LAYERS, CHUNK_TOKENS, hidden])
        self.client = RequestClientFactory.create(address["url"], context=zmq.Context())
        answer = self.client.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(
                instance_id=self.instance, model_name=self.model, world_size=1,
                block_size=CHUNK_TOKENS, num_layers=LAYERS, hidden_dim_size=hidden,
                dtype_str="bfloat16", use_mla=False, num_physical_slots=CHUNK_TOKENS)
        ).result(timeout=TIMEOUT_S)
        layout = MemoryLayoutDesc(shapes=[self.shape], dtypes=[torch.bfloat16])
        self.context = create_engine_driven_context(
            EngineDrivenContextMetadata(layout_desc=layout, block_size=CHUNK_TOKENS, use_mla=False),
            self.client, TIMEOUT_S, answer.shm_name, answer.pool_size)
        if not isinstance(self.context, EngineDrivenContextShm):
            raise SystemExit("LMCache's client does not use shared memory")
        self.tensors = [self.tensor(block) for block in range(blocks.n)]

    def tensor(self, block):
        memory = (ctypes.c_char * self.blocks.block).from_address(self.blocks.address(block))
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(self.shape)

    def key(self, serial, blocks, worker=0):
        """Of a request whose chunks are these blocks; all tokens of a chunk say which it is."""
        tokens = []
        for block in blocks:
            tokens += [serial % 100000, *[block] * (CHUNK_TOKENS - 1)]
        return IPCCacheServerKey(
            model_name=self.model, world_size=1, worker_id=worker, token_ids=tuple(tokens), start=0,
            end=len(tokens), request_id=f"{self.instance}-{self.n_requests}", num_kv_readers=1)

    def put(self, serial, blocks):
        self.n_requests += 1
        key = self.key(serial, blocks)
        prepared = self.context.prepare_store(key, self.instance)
        slots, indexes = prepared if prepared is not None else ([], [])
        if list(indexes) != list(range(len(blocks))):
            raise SystemExit(f"LMCache has room for {len(indexes)} of {len(blocks)} chunks")
        for slot, block in zip(slots, blocks):
            slot.copy_(self.tensors[block])
        if not self.context.commit_store(key, self.instance, slots):
            raise SystemExit("LMCache does not store")
        self.client.end_session(key.request_id)

    def get(self, serial, blocks):
        self.n_requests += 1
        self.client.lookup(self.key(serial, blocks, None), 1).result(timeout=TIMEOUT_S)
        key = self.key(serial, blocks)
        n = self.client.wait_prefetch_status(key.request_id, TIMEOUT_S).result(timeout=TIMEOUT_S)
        if n != len(blocks):
            raise SystemExit(f"LMCache has {n} of {len(blocks)} chunks")
        slots = self.context.prepare_retrieve(key, self.instance)
        if slots is None:
            raise SystemExit("LMCache does not give what it has")
        for slot, block in zip(slots, blocks):
            self.tensors[block].copy_(slot)
        if not self.context.commit_retrieve(key, self.instance):
            raise SystemExit("LMCache does not take chunks back")
        self.client.end_session(key.request_id)

    def drop(self, _serial, _blocks):
        """Its clients cannot remove single chunks: all goes."""
        self.client.clear(True).result(timeout=TIMEOUT_S)


def main():
    options = engines_driver.arguments()
    blocks = engines_driver.Blocks(options)
    engines_driver.serve(blocks, Store(blocks, options.address))


if __name__ == "__main__":
    main()
