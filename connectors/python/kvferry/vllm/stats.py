# SPDX-License-Identifier: Apache-2.0
"""What the connector counts, for vLLM's own statistics: its log line and its Prometheus page.

Each side has a dataclass of numbers that only grow. What is added between two steps travels with
vLLM's outputs from workers and scheduler to the process that publishes it, where it is added up.
"""
from dataclasses import dataclass, fields
from typing import Any, Dict, Optional

# name -> what it counts; ranks are added up. Names that end in _s are seconds.
TEXTS = {
    "stored": "blocks that the daemon has stored",
    "present": "blocks that the daemon had already",
    "skipped": "blocks not handed over: no room in staging, or no daemon",
    "refused": "blocks that the daemon has refused or dropped",
    "store_s": "time of the engine's thread for storing",
    "loads": "loads of requests, of each rank",
    "loads_late": "loads that took longer than their budget",
    "load_s": "time of loads, from the step that starts them to their end",
    "loaded": "blocks loaded",
    "failed": "loads that ended before all blocks had come: requests compute from there on",
    "failed_too_slow": "blocks not loaded: fetching was estimated to take longer than the budget",
    "failed_gone": "blocks not loaded: not there any more, or not within the budget",
    "failed_lost": "blocks not loaded for another reason, or behind one that has not come",
    "lookups_late": "lookups cut short because lookup_budget_ms was used up",
    "lookup_s": "time that requests have waited for lookups",
    "hit_tokens": "tokens of prompts that were loaded",
    "saved_s": "time that computing these would have taken, by the rate of this engine's prefills",
    "loads_failed": "requests of which a part of the hit did not come",
    "stores_tainted": "chunks not stored, because they follow from what was loaded with loss",
}
PREFIX = "vllm:kvferry_"


@dataclass
class WorkerCounters:
    """What a worker has done."""

    handed: int = 0  # stores handed to the daemon, of which it has stored, had, or refused
    stored: int = 0
    present: int = 0
    skipped: int = 0
    refused: int = 0
    store_s: float = 0.0
    loads: int = 0
    loads_late: int = 0
    load_s: float = 0.0
    loaded: int = 0
    failed: int = 0
    failed_too_slow: int = 0
    failed_gone: int = 0
    failed_lost: int = 0


@dataclass
class SchedulerCounters:
    """What a scheduler has seen."""

    lookups_late: int = 0
    lookup_s: float = 0.0
    hit_tokens: int = 0
    saved_s: float = 0.0
    loads_failed: int = 0
    stores_tainted: int = 0


class Since:
    """What has been added to counters since it was last asked for."""

    def __init__(self) -> None:
        self._last: Dict[str, Any] = {}

    def take(self, counters: Any) -> Optional[Dict[str, Any]]:
        """Numbers that have grown, by name; None: nothing has."""
        grown = {}
        for field in fields(counters):
            value = getattr(counters, field.name)
            more = value - self._last.get(field.name, 0)
            if field.name in TEXTS and more:
                grown[field.name] = more
            self._last[field.name] = value
        return grown or None


def add(to: Dict[str, Any], more: Dict[str, Any]) -> None:
    for name, value in more.items():
        to[name] = to.get(name, 0) + value


def reduce(data: Dict[str, Any]) -> Dict[str, Any]:
    """What vLLM's log line says of an interval."""
    made = {}
    for name, value in data.items():
        made[f"kvferry {name[:-2]} (s)" if name.endswith("_s") else f"kvferry {name}"] = (
            round(value, 3) if name.endswith("_s") else value)
    if data.get("loads") and "load_s" in data:
        made["kvferry avg load (ms)"] = round(1000 * data["load_s"] / data["loads"], 3)
    return made
