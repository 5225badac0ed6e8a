# SPDX-License-Identifier: Apache-2.0
"""Settings of the backend: what the JSON of --hicache-storage-backend-extra-config may have."""
from dataclasses import dataclass
from typing import Any, Mapping, Optional

from kvferry import settings

WHERE = "--hicache-storage-backend-extra-config"
# What SGLang itself reads there, and leaves in place.
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")


@dataclass(frozen=True)
class Settings:
    """Every field is a key there; other keys are refused, but those of SGLang."""

    socket: Optional[str] = None  # None: $KVFERRY_SOCKET, else the library's default
    profile: str = "exact"  # one without loss
    namespace: str = ""  # separates applications
    store: bool = True  # False: only load
    lookup_budget_ms: int = 100
    load_budget_ms: int = 2000  # of a batch, 128 pages at most
    store_budget_ms: int = 2000  # of a batch too
    staging_bytes: int = 0  # of each rank; 0: the daemon's default
    weights_digest: str = ""  # 64 hexadecimal digits; "": made from the model's files
    allow_untested: bool = False  # versions of SGLang that are not in tested_versions.json

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Settings":
        """Settings from what the user gave. ValueError says which key, why, and the cure."""
        if not given.get("interface_v1"):
            raise ValueError(f'{WHERE}: "interface_v1": 1 is not there: SGLang would copy every '
                             "page on its way")
        ours = {name: value for name, value in given.items() if name not in OF_SGLANG}
        made = settings.read(cls, ours, WHERE)
        settings.digest(made.weights_digest, WHERE)
        return made

    def digest(self) -> bytes:
        """weights_digest as bytes; b"" where it is none."""
        return settings.digest(self.weights_digest, WHERE)
