# SPDX-License-Identifier: Apache-2.0
"""kvferry: the client library of kvferryd for Python.

    with kvferry.Client(namespace_label="mine") as client:
        client.put([kvferry.Put(key, data=block)])
        hit, = client.get([key])
        ... hit.payload ...
        ok = client.release(hit.lease)

kvferry.aio has the same as coroutines; kvferry.vllm is the connector for vLLM.
"""
from kvferry._abi import lib as _lib, text as _text
from kvferry.buffers import Pages, Strides
from kvferry.client import (CHUNK_TOKENS_MAX, REQUEST_KEYS_MAX, SHARD_NONE, Client, Event, Geometry,
                            Hit, Info, Lookup, Put)
from kvferry.errors import BusyError, KvferryError, RefusedError, SessionError, Status

__version__: str = _text(_lib.kvf_version())
__all__ = ["CHUNK_TOKENS_MAX", "REQUEST_KEYS_MAX", "SHARD_NONE", "BusyError", "Client", "Event",
           "Geometry", "Hit", "Info", "KvferryError", "Lookup", "Pages", "Put", "RefusedError",
           "SessionError", "Status", "Strides", "__version__"]
