# SPDX-License-Identifier: Apache-2.0
"""Which of the engine's pages are not what a cold run would have in them.

What was loaded from a lossy profile is never stored again, and what was computed behind it is
stored under the lossy profile only: its values follow from ones that are not the model's. The
profile in force may change under an engine that keeps its pages, when a daemon comes back with
other settings; so pages are remembered, not profiles.
"""
from typing import List, Set


class Taint:
    """Pages by their ids. Empty, and without cost, where nothing was ever loaded with loss."""

    def __init__(self, block_tokens: int):
        self._block = block_tokens
        self._loaded: Set[int] = set()
        self._behind: Set[int] = set()

    def loads(self, pages: List[int], is_lossless: bool) -> None:
        """These pages are about to be loaded."""
        if is_lossless:
            self._forget(pages)
        else:
            self._loaded.update(pages)
            self._behind.difference_update(pages)

    def _forget(self, pages: List[int]) -> None:
        self._loaded.difference_update(pages)
        self._behind.difference_update(pages)

    def computes(self, pages: List[int], computed: int, end: int) -> None:
        """Of a request with these pages, tokens computed..end - 1 are about to be computed, behind
        those before them. A page that holds both keeps what it is."""
        if not self._loaded and not self._behind:
            return
        first = -(-computed // self._block)
        written = pages[first:-(-end // self._block)]
        self._forget(written)
        if not self._behind.isdisjoint(pages[:first]) or not self._loaded.isdisjoint(pages[:first]):
            self._behind.update(written)

    def forbids(self, pages: List[int], first: int, end: int, is_lossless: bool) -> bool:
        """Whether pages first..end - 1 of a request that has these pages are not to be stored under
        a profile of this kind."""
        if not self._loaded and not self._behind:
            return False
        chunk = pages[first:end]
        if not self._loaded.isdisjoint(chunk):
            return True
        if not is_lossless:
            return False
        return not (self._behind.isdisjoint(chunk) and self._loaded.isdisjoint(pages[:first]))
