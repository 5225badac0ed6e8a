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
    under another one leaves them out."""

    loads: List[LoadJob] = field(default_factory=list)
    stores: List[StoreChunk] = field(default_factory=list)
    lossless: bool = True


@dataclass
class Report:
    """Keys that did not load, by request: each is a miss for that request from then on. And which
    ranks, a bit each, have stored which keys."""

    failed: Dict[str, Set[bytes]] = field(default_factory=dict)
    stored: Dict[bytes, int] = field(default_factory=dict)

    def merge(self, other: "Report") -> None:
        for request_id, keys in other.failed.items():
            self.failed.setdefault(request_id, set()).update(keys)
        for key, bits in other.stored.items():
            self.stored[key] = self.stored.get(key, 0) | bits
