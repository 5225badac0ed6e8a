# SPDX-License-Identifier: Apache-2.0
"""Settings: of the connector (kv_connector_extra_config) and of a request (kv_transfer_params)."""
from dataclasses import dataclass, fields
from typing import Any, Callable, Dict, Mapping, Optional

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
        known = {f.name: f for f in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"kv_connector_extra_config: {name!r} is not known; there are "
                                 f"{', '.join(sorted(known))}")
            default = known[name].default
            wanted = str if default is None else type(default)
            if type(value) is not wanted:
                raise ValueError(f"kv_connector_extra_config: {name} is {value!r}, not of type "
                                 f"{wanted.__name__}")
            if wanted is int and value < 0:
                raise ValueError(f"kv_connector_extra_config: {name} is {value}: below 0")
        settings = cls(**given)
        if settings.store not in STORE_CHOICES:
            raise ValueError(f"kv_connector_extra_config: store is {settings.store!r}, not one of "
                             f"{', '.join(STORE_CHOICES)}")
        if settings.weights_digest and len(settings.digest()) != 32:
            raise ValueError("kv_connector_extra_config: weights_digest is not 64 hexadecimal "
                             "digits; leave it out and it is made from the model's files")
        return settings

    def digest(self) -> bytes:
        """weights_digest as bytes; b"" where it is none."""
        try:
            return bytes.fromhex(self.weights_digest)
        except ValueError:
            return b""


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

    @classmethod
    def read(cls, params: Optional[Mapping[str, Any]],
             warn: Callable[[str], None]) -> "RequestSettings":
        """What a request asks for. What makes no sense is warned about and left out: a request must
        not be able to stop the engine."""
        given: Dict[str, Any] = {}
        for key, (name, wanted) in cls.KEYS.items():
            value = (params or {}).get(key)
            if value is None:
                continue
            if type(value) is not wanted or (wanted is int and value < 0):
                warn(f"kv_transfer_params: {key} is {value!r}, not a {wanted.__name__}: left out")
            else:
                given[name] = value
        for key in params or {}:
            if key.startswith("kvferry.") and key not in cls.KEYS:
                warn(f"kv_transfer_params: {key!r} is not known: left out")
        return cls(**given)
