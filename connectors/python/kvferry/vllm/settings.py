# SPDX-License-Identifier: Apache-2.0
"""Settings: of the connector (kv_connector_extra_config) and of a request (kv_transfer_params)."""
from dataclasses import dataclass
from typing import Any, Callable, Dict, Mapping, Optional

from kvferry import settings

WHERE = "kv_connector_extra_config"
TOKENS_MAX = (1 << 31) - 1
STORE_CHOICES = ("prompt", "all", "none")


@dataclass(frozen=True)
class Settings:
    """kv_connector_extra_config. Every field is a key there; other keys are refused."""

    socket: Optional[str] = None  # None: $KVFERRY_SOCKET, else the library's default
    profile: str = "exact"
    namespace: str = ""  # separates applications
    chunk_tokens: int = 0  # a multiple of the engine's block; 0: the largest one that fits
    store: str = "prompt"  # chunks of prompts, "all" (of answers too) or "none"
    tails: bool = True  # the ends of prompts too, that are no whole chunk
    lookup_budget_ms: int = 50  # for blocks that come from slower tiers
    load_budget_ms: int = 2000
    staging_bytes: int = 0  # of each worker; 0: the daemon's default
    gpu_ring_bytes: int = 0  # of GPU memory, for KV on its way out; 0: by what a step computes
    weights_digest: str = ""  # 64 hexadecimal digits; "": made from the model's files
    allow_uncalibrated: bool = False
    allow_untested: bool = False  # versions of vLLM that are not in tested_versions.json

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Settings":
        """Settings from what the user gave. ValueError says which key, why, and the cure."""
        made = settings.read(cls, given, WHERE)
        made.digest()
        if made.store not in STORE_CHOICES:
            raise ValueError(f"kv_connector_extra_config: store is {made.store!r}, not one of "
                             f"{', '.join(STORE_CHOICES)}")
        return made

    def digest(self) -> bytes:
        """weights_digest as bytes; b"" where it is none."""
        return settings.digest(self.weights_digest, WHERE)


@dataclass(frozen=True)
class RequestSettings:
    """kv_transfer_params of one request, as far as they are ours."""

    load: bool = True
    store: bool = True
    max_offload_tokens: Optional[int] = None
    budget_ms: Optional[int] = None

    KEYS = {"kvferry.load": ("load", bool), "kvferry.store": ("store", bool),
            "max_offload_tokens": ("max_offload_tokens", int),
            "kvferry.budget_ms": ("budget_ms", int)}
    MOST = {"max_offload_tokens": TOKENS_MAX, "kvferry.budget_ms": settings.BUDGET_MS_MAX}

    @classmethod
    def read(cls, params: Optional[Mapping[str, Any]],
             warn: Callable[[str], None]) -> "RequestSettings":
        """What a request asks for. What makes no sense is warned about and left out: a request must
        not be able to stop the engine, nor to write what it likes, as often as it likes, to its
        log."""
        given: Dict[str, Any] = {}
        for key, (name, wanted) in cls.KEYS.items():
            value = (params or {}).get(key)
            if value is None:
                continue
            if type(value) is not wanted:
                warn(f"kv_transfer_params: a {key} is no {wanted.__name__}: left out")
            elif wanted is int and not 0 <= value <= cls.MOST[key]:
                warn(f"kv_transfer_params: a {key} is not from 0 to {cls.MOST[key]}: left out")
            else:
                given[name] = value
        if any(str(key).startswith("kvferry.") and key not in cls.KEYS for key in params or {}):
            warn("kv_transfer_params: a key that begins with kvferry. is none of "
                 f"{', '.join(cls.KEYS)}: left out")
        return cls(**given)
