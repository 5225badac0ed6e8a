# SPDX-License-Identifier: Apache-2.0
"""What connectors warn of, in the engine's log."""
import logging
from typing import Set

LINES_MAX = 256


class WarnOnce:
    """Warns with each line once, of the last LINES_MAX at least. Any thread."""

    def __init__(self, logger: logging.Logger):
        self._logger = logger
        self._said: Set[str] = set()

    def __call__(self, line: str) -> None:
        if line in self._said:
            return
        if len(self._said) >= LINES_MAX:
            self._said.clear()
        self._said.add(line)
        self._logger.warning("kvferry: %s", line)
