# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapter an engine has loaded, by the digest of its files.

vLLM reads an adapter's files when the first request with it runs, and again when it has pushed the
adapter out of memory or is told to reload it. Only the first of these shows here. So what counts is
what the files were then, and where they are others later nobody knows which of them the engine has.
"""
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from kvferry import identity


class Adapters:
    """Belongs to the scheduler's thread."""

    def __init__(self, warn_once: Callable[[str], None]):
        self._warn_once = warn_once
        self._digests: Dict[Any, Optional[bytes]] = {}  # by vLLM's number; None: not known any more

    def digest(self, lora: Any) -> Optional[bytes]:
        """The digest of a request's adapter; None, with a warning: the engine may have another one.
        Reads the files to their end the first time, as vLLM does; then looks at their times."""
        folder = Path(str(lora.lora_path))
        now = identity.adapter_digest(folder) if folder.is_dir() else None
        number = getattr(lora, "lora_int_id", None)
        if number not in self._digests or getattr(lora, "load_inplace", False):
            if now is None:
                self._warn_once("requests with a LoRA whose files are not on this machine are not "
                                "stored: give lora_path as a local folder")
                return None
            self._digests[number] = now
        if self._digests[number] != now:
            self._digests[number] = None
            self._warn_once(f"the files of the LoRA in {folder} are not those that vLLM loaded: "
                            "its requests are neither stored nor loaded from here on; load it "
                            "under another name, or restart vLLM")
        return self._digests[number]
