# SPDX-License-Identifier: Apache-2.0
"""Which blocks are in the daemon, told in vLLM's terms (its KV events), for routers.

A chunk is told once all ranks have stored it. The daemon does not say what it evicts: a chunk that
a lookup does not find any more is told to be gone then. What has been told and is not remembered
here any longer, since that has a bound, is told to be gone too: a router may send a request
elsewhere for it, and never sends one here for nothing.
"""
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Optional

PENDING_MAX = 4096
TOLD_MAX = 1 << 16


@dataclass
class Chunk:
    """Blocks of the engine that are stored as one: the fields of vLLM's BlockStored."""

    hashes: List[bytes]
    parent: Optional[bytes]
    tokens: List[int]
    lora_id: Optional[int]
    lora_name: Optional[str]


@dataclass
class Change:
    """A chunk that is there from now on, or not any more."""

    is_stored: bool
    chunk: Chunk


@dataclass
class Waiting:
    """A chunk that not all ranks have stored, or not the one before it."""

    key: bytes
    chunk: Chunk
    ranks: int = 0  # those that have stored it, a bit each


class Ledger:
    """Belongs to the scheduler's thread."""

    def __init__(self, n_ranks: int):
        self._all_ranks = (1 << n_ranks) - 1
        self._pending: "OrderedDict[bytes, Waiting]" = OrderedDict()
        self._told: "OrderedDict[bytes, Chunk]" = OrderedDict()
        self._changes: List[Change] = []

    def begun(self, key: bytes, chunk: Chunk) -> None:
        """Ranks are told to store a chunk, the one before it earlier."""
        if key not in self._told and key not in self._pending:
            self._pending[key] = Waiting(key, chunk)
            if len(self._pending) > PENDING_MAX:
                self._pending.popitem(last=False)

    def stored(self, ranks: Dict[bytes, int]) -> None:
        """These ranks, a bit each, have these keys; one may say so twice. A chunk is told behind
        the one before it."""
        for key, bits in ranks.items():
            if key in self._pending:
                self._pending[key].ranks |= bits
        ends = {waiting.chunk.hashes[-1] for waiting in self._pending.values()}
        for waiting in list(self._pending.values()):
            if waiting.ranks == self._all_ranks and waiting.chunk.parent not in ends:
                # Two keys may be of one hash: of an adapter that was loaded again under its name.
                ends.discard(waiting.chunk.hashes[-1])
                del self._pending[waiting.key]
                self._told[waiting.key] = waiting.chunk
                self._changes.append(Change(True, waiting.chunk))
        while len(self._told) > TOLD_MAX:
            self._changes.append(Change(False, self._told.popitem(last=False)[1]))

    def gone(self, key: bytes) -> None:
        """A lookup has not found this one."""
        chunk = self._told.pop(key, None)
        if chunk is not None:
            self._changes.append(Change(False, chunk))

    def superseded(self, key: bytes) -> None:
        """A tail whose blocks are the beginning of what takes its place: they are still there."""
        self._told.pop(key, None)

    def take(self) -> List[Change]:
        changes, self._changes = self._changes, []
        return changes
