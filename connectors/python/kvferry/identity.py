# SPDX-License-Identifier: Apache-2.0
"""Which model a block is of: digests of weights and of adapters, and versions of the engine.

The digest of weights is the one of `kvferry calibrate --weights`: SHA-256 of the file, or, of
several files, of their digests in the order of their names. It is made once a file: what has been
made is kept in the user's cache folder, by path, size and time of change.
"""
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

PIECE_BYTES = 1 << 22
VARIANT_BYTES = 12
# Files beside the weights that say how they are computed with, and what is not of that in them.
CONFIGS = ("config.json", "params.json", "hf_quant_config.json", "adapter_config.json")
ASIDE = ("_name_or_path", "base_model_name_or_path", "transformers_version", "peft_version")
DTYPES = ("torch_dtype", "dtype")
VERSIONS = Path(__file__).resolve().parent / "tested_versions.json"


def check_version(engine: str, version: str, allow_untested: bool,
                  where: str = "kv_connector_extra_config") -> Optional[str]:
    """None: tested. A warning: not, but allowed. RuntimeError: not, and not allowed; where names
    the place to allow it."""
    tested = json.loads(VERSIONS.read_text(encoding="utf-8"))[engine]
    plain = version.split("+")[0]
    if plain in tested:
        return None
    said = f"kvferry has been tested with {engine} {', '.join(tested)}, and this is {version}"
    if not allow_untested:
        raise RuntimeError(f"{said}; install a tested one, or set \"allow_untested\": true in "
                           f"{where}")
    return said


def weight_files(folder: Path) -> List[Path]:
    """The files of weights in a model's folder, in the order of their names."""
    for pattern in ("*.safetensors", "*.bin", "*.gguf"):
        found = sorted(folder.glob(pattern))
        if found:
            return found
    return []


def _cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvferry" / "digests.json"


def _cache_read() -> Dict[str, Any]:
    try:
        read = json.loads(_cache_path().read_text(encoding="utf-8"))
        return read if isinstance(read, dict) else {}
    except (OSError, ValueError, RuntimeError):
        return {}


def _cache_write(name: str, digest: str) -> None:
    """Add a line. Of two processes at the same time one may be forgotten: it costs time only."""
    try:
        path = _cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        cache = _cache_read()
        cache[name] = digest
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_text(json.dumps(cache, indent=1), encoding="utf-8")
        os.replace(written, path)
    except (OSError, RuntimeError):
        pass


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file. Blocks: it is read to its end the first time."""
    stat = path.stat()
    name = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
    known = _cache_read().get(name)
    if isinstance(known, str) and len(known) == 64:
        return bytes.fromhex(known)
    made = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            made.update(piece)
    _cache_write(name, made.hexdigest())
    return made.digest()


def folder_digest(folder: Path) -> Optional[bytes]:
    """The digest of a folder's weights; None where there are none to be read."""
    try:
        digests = [file_digest(path) for path in weight_files(folder)]
    except OSError:
        return None
    if len(digests) <= 1:
        return digests[0] if digests else None
    return hashlib.sha256(b"".join(digests)).digest()


def _without(aside: Sequence[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without(aside, inner) for name, inner in value.items()
                if name not in aside}
    return [_without(aside, inner) for inner in value] if isinstance(value, list) else value


def configs(folder: Path, with_dtypes: bool = False) -> Dict[str, Any]:
    """What the files beside a model's weights say: rotation, norms, scales. Read from the files,
    since engines change what they have read of them, some in their workers only. with_dtypes: what
    they propose to compute in, too, for callers whom the engine does not tell what it does."""
    aside = ASIDE if with_dtypes else ASIDE + DTYPES
    made: Dict[str, Any] = {}
    for name in CONFIGS:
        try:
            read = (folder / name).read_bytes()
        except OSError:
            continue
        try:
            made[name] = _without(aside, json.loads(read))
        except ValueError:
            made[name] = hashlib.sha256(read).hexdigest()
    return made


def has_long_factors(value: Any) -> bool:
    """Whether a configuration rotates by factors that follow from how long a context may be."""
    if isinstance(value, dict):
        return "long_factor" in value or any(map(has_long_factors, value.values()))
    return False


def variant(parts: Any) -> str:
    """A name, 24 letters, for what changes KV under the same weights."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=VARIANT_BYTES).hexdigest()


def adapter_digest(folder: Path) -> Optional[bytes]:
    """The digest of an adapter: its weights, and with which factor they are added; None where there
    are none to be read."""
    digest = folder_digest(folder)
    how = configs(folder)
    if digest is None or not how:
        return digest
    return hashlib.sha256(digest + json.dumps(how, sort_keys=True).encode()).digest()


def adapter_key(key: bytes, adapter: Optional[bytes]) -> bytes:
    """The name of a chunk: the engine's hash, and for a request with an adapter that hash under the
    adapter's digest. The engine's has the adapter's name in it, and a name can be given again."""
    if adapter is None:
        return key
    return hashlib.blake2b(key, digest_size=32, key=adapter).digest()
