# SPDX-License-Identifier: Apache-2.0
"""How long this engine takes to compute tokens of prompts: what a hit has saved it.

A step has run since it was scheduled, or since the one before it ended, and until its result came;
what the connector itself has taken of that is not of it. Steps that compute many tokens of prompts,
and little else, give seconds a token, by how deep in their prompts these are: attention costs more
there. Of the last steps of a depth the fastest counts, since all that holds a step up (a process
beside it, requests that are decoded in it) would make hits look better than they are.
"""
import time
from collections import deque
from typing import Deque, Dict, List, Optional, Tuple

STEP_TOKENS = 256  # of prompts; what a step costs at the least is little beside that
OTHERS_SHARE = 0.1  # of a step's tokens, that may be no prompt's
DEPTH_TOKENS = 1024  # each depth is twice as long as the one before it
KEPT = 16  # steps of a depth
UNDER_WAY = 64  # steps whose end is not known; one that is not told of is forgotten


def depth_of(position: int) -> int:
    """The depth that a token's position is in."""
    return (position // DEPTH_TOKENS).bit_length()


def parts(first: int, end: int) -> Dict[int, int]:
    """Tokens first..end - 1 by their depth."""
    made = {}
    while first < end:
        depth = depth_of(first)
        part_end = min(end, DEPTH_TOKENS << depth)
        made[depth] = part_end - first
        first = part_end
    return made


class PrefillRate:
    """Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._number = 0
        self._ended = 0.0  # when the last step did, as far as that is known
        self._steps: Dict[int, Tuple[float, int, int]] = {}  # scheduled, tokens, depth
        self._rates: Dict[int, Deque[float]] = {}  # seconds a token
        self._owed: Dict[int, int] = {}  # tokens that were saved, of which nothing was said yet

    def scheduled(self, prompts: List[Tuple[int, int]], n_tokens: int) -> int:
        """A step of n_tokens begins, of which those of prompts are (first, end) of each. Its
        number, for ended(), or 0: it is not one to learn from."""
        n_prompts = sum(end - first for first, end in prompts)
        if n_prompts < STEP_TOKENS or n_tokens - n_prompts > OTHERS_SHARE * n_tokens:
            return 0
        middle = sum((first + end) / 2 * (end - first) for first, end in prompts) / n_prompts
        self._number += 1
        self._steps[self._number] = (time.monotonic(), n_prompts, depth_of(int(middle)))
        self._steps.pop(self._number - UNDER_WAY, None)
        return self._number

    def ended(self, ran: Dict[int, float]) -> None:
        """A step's result has come. ran: its number, if it has one, and seconds that are not the
        engine's."""
        now = time.monotonic()
        for number, ours in ran.items():
            scheduled, tokens, depth = self._steps.pop(number, (now, 0, 0))
            seconds = now - max(scheduled, self._ended) - ours
            if tokens and seconds > 0:
                self._rates.setdefault(depth, deque(maxlen=KEPT)).append(seconds / tokens)
        self._ended = now

    def saved(self, first: int, end: int) -> None:
        """Tokens first..end - 1 of a prompt were not computed."""
        for depth, n in parts(first, end).items():
            self._owed[depth] = self._owed.get(depth, 0) + n

    def take(self) -> float:
        """Seconds that computing what was saved since the last call would have taken; 0 while no
        rate is known, and all of it once there is one."""
        if not self._rates:
            return 0.0
        owed, self._owed = self._owed, {}
        return sum(n * self._rate(depth) for depth, n in owed.items())

    def _rate(self, depth: int) -> float:
        """Seconds a token at a depth: where none is known, that of the nearest one before it, which
        is less, and else that of the first one behind it."""
        before: Optional[int] = max((d for d in self._rates if d <= depth), default=None)
        return min(self._rates[min(self._rates) if before is None else before])
