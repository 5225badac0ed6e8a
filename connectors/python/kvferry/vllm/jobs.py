# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side tells the workers in a step, and what they answer.

Plain data: it is pickled on its way to other processes.
"""
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set


@dataclass
class LoadChunk:
    """A block to fetch: its tokens from token_first on go to pages, in this order."""

    key: bytes
    token_first: int
    n_tokens: int
    pages: List[int]


@dataclass
class LoadJob:
    """What one request loads, in chain order. lossless: what the scheduler notes of the pages; a
    worker under a profile of the other kind loads nothing."""

    request_id: str
    chunks: List[LoadChunk]
    budget_ms: int
    lossless: bool = True


@dataclass
class StoreChunk:
    """A chunk, or a tail of n_tokens, whose pages will have been written when this step has run."""

    key: bytes
    parent: Optional[bytes]
    depth: int
    token_start: int
    pages: List[int]
    n_tokens: int = 0  # 0: a full chunk
    supersedes: Optional[bytes] = None  # the shorter tail that it begins with


@dataclass
class Step:
    """Everything of one step. lossless: the kind of profile that the stores are meant for; a worker
    under another one leaves them out. number: of a step that is timed; 0: it is not. again: a chunk
    that has been computed though it is stored, to be compared with that."""

    loads: List[LoadJob] = field(default_factory=list)
    stores: List[StoreChunk] = field(default_factory=list)
    lossless: bool = True
    number: int = 0
    again: Optional[StoreChunk] = None


@dataclass
class Report:
    """Keys that did not load, by request: each is a miss for that request from then on. Which
    ranks, a bit each, have stored which keys. And the number of a step that is timed, with the
    seconds that storing has taken in it, on the slowest rank."""

    failed: Dict[str, Set[bytes]] = field(default_factory=dict)
    stored: Dict[bytes, int] = field(default_factory=dict)
    ran: Dict[int, float] = field(default_factory=dict)

    def merge(self, other: "Report") -> None:
        for number, seconds in other.ran.items():
            self.ran[number] = max(self.ran.get(number, 0.0), seconds)
        for request_id, keys in other.failed.items():
            self.failed.setdefault(request_id, set()).update(keys)
        for key, bits in other.stored.items():
            self.stored[key] = self.stored.get(key, 0) | bits
