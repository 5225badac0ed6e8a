# SPDX-License-Identifier: Apache-2.0
"""The committed form of a capture: zstd files, manifest.json and index.txt.

Reading and verifying use the standard library, and the zstandard module or the
zstd command, whichever is there.
"""

from __future__ import annotations

import array
import hashlib
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_FILE_BYTES = 4_000_000  # a committed file stays under this
MAX_RAW_BYTES = 3_900_000  # so it does even if zstd finds nothing to gain
ZSTD_LEVEL = 19
ITEM_BYTES = {"bf16": 2, "f32": 4}
INDEX_COLUMNS = "tensor layer_first n_layers n_heads n_tokens dim dtype raw_bytes filename"


@dataclass(frozen=True)
class Entry:
    """One file: a run of layers of one tensor, C order, little-endian.

    The shape is [n_layers][n_heads][n_tokens][dim] for every tensor; README.md
    says what an axis means for tensors that have no heads or no tokens.
    """

    tensor: str
    layer_first: int
    n_layers: int
    n_heads: int
    n_tokens: int
    dim: int
    dtype: str
    raw_bytes: int
    filename: str
    zst_bytes: int
    sha256_raw: str
    sha256_zst: str
    max_abs: float
    kurtosis: float

    def elements(self) -> int:
        return self.n_layers * self.n_heads * self.n_tokens * self.dim

    def index_line(self) -> str:
        return " ".join(str(getattr(self, column)) for column in INDEX_COLUMNS.split())


def decompress(path: Path) -> bytes:
    """The raw bytes of a zstd file."""
    try:
        import zstandard
    except ImportError:
        return subprocess.run(
            ["zstd", "-dc", "--", str(path)], check=True, capture_output=True
        ).stdout
    return zstandard.ZstdDecompressor().decompress(path.read_bytes())


def compress(raw: bytes) -> bytes:
    """One zstd frame with content size and checksum."""
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(raw)


def write_files(
    folder: Path, tensor: str, layer_first: int, data: "np.ndarray", dtype: str
) -> list[Entry]:
    """Writes [layer][head][token][dim] fp32 data, split by layers as needed."""
    per_layer = data[0].size * ITEM_BYTES[dtype]
    step = max(1, MAX_RAW_BYTES // per_layer)
    return [
        _write_file(folder, tensor, layer_first + at, data[at : at + step], dtype)
        for at in range(0, len(data), step)
    ]


def _write_file(folder: Path, tensor: str, first: int, data: "np.ndarray", dtype: str) -> Entry:
    import numeric

    raw = numeric.to_bytes(data, dtype)
    packed = compress(raw)
    name = f"{tensor}.L{first:02d}-{first + len(data) - 1:02d}.{dtype}.zst"
    (folder / name).write_bytes(packed)
    kept = numeric.from_bytes(raw, dtype)
    return Entry(
        tensor,
        first,
        *data.shape,
        dtype,
        len(raw),
        name,
        len(packed),
        hashlib.sha256(raw).hexdigest(),
        hashlib.sha256(packed).hexdigest(),
        float(abs(kept).max()),
        round(numeric.kurtosis(kept), 3),
    )


def write_index(folder: Path, facts: dict, entries: list[Entry]) -> None:
    """Writes manifest.json and index.txt."""
    manifest = {**facts, "files": [asdict(e) for e in entries]}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    lines = ["# " + INDEX_COLUMNS, *(e.index_line() for e in entries)]
    (folder / "index.txt").write_text("\n".join(lines) + "\n")


def read_manifest(folder: Path) -> tuple[dict, list[Entry]]:
    """The facts and the file entries of a folder."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return manifest, [Entry(**e) for e in manifest["files"]]


def expected_shape(facts: dict, tensor: str) -> tuple[int, int, int]:
    """[n_heads][n_tokens][dim] of a tensor, from the facts of the model."""
    kv, dim, d_model = facts["n_kv_heads"], facts["head_dim"], facts["d_model"]
    tokens = facts["n_tokens"]
    return {
        "k_post": (kv, tokens, dim),
        "k_pre": (kv, tokens, dim),
        "v": (kv, tokens, dim),
        "q_norm": (facts["n_heads"], tokens, 1),
        "x": (1, tokens, d_model),
        "w_k": (kv, dim, d_model),
        "w_v": (kv, dim, d_model),
        "b_k": (kv, 1, dim),
        "b_v": (kv, 1, dim),
    }[tensor]


def largest(raw: bytes, dtype: str) -> float:
    """max|x|, without numpy; infinite when a value is not finite."""
    if dtype == "bf16":
        bits = array.array("H", raw)
        if sys.byteorder == "big":
            bits.byteswap()
        top = max(b & 0x7FFF for b in bits)
        # A bf16 value is the upper half of a float: widen, then read it as one.
        raw = (top << 16).to_bytes(4, "little")
    values = array.array("f", raw)
    if sys.byteorder == "big":
        values.byteswap()
    return max(abs(x) if math.isfinite(x) else math.inf for x in values)


def entry_faults(folder: Path, facts: dict, entry: Entry) -> list[str]:
    """What is wrong with one file."""
    path = folder / entry.filename
    if not path.is_file():
        return ["missing"]
    packed = path.read_bytes()
    if hashlib.sha256(packed).hexdigest() != entry.sha256_zst:
        return ["SHA-256 of the compressed file differs"]
    raw = decompress(path)
    faults = []
    if len(packed) != entry.zst_bytes or len(packed) >= MAX_FILE_BYTES:
        faults.append(f"compressed size {len(packed)}")
    if hashlib.sha256(raw).hexdigest() != entry.sha256_raw:
        faults.append("SHA-256 of the raw bytes differs")
    if not len(raw) == entry.raw_bytes == entry.elements() * ITEM_BYTES[entry.dtype]:
        faults.append(f"raw size {len(raw)} does not fit the shape")
    elif largest(raw, entry.dtype) != entry.max_abs or math.isinf(entry.max_abs):
        faults.append("max|x| differs")
    shape = (entry.n_heads, entry.n_tokens, entry.dim)
    if shape != expected_shape(facts, entry.tensor):
        faults.append(f"shape {shape} does not fit the model")
    return faults


def folder_faults(folder: Path, facts: dict, entries: list[Entry]) -> list[str]:
    """What is wrong with a folder as a whole."""
    faults = []
    lines = [
        line
        for line in (folder / "index.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    if lines != [e.index_line() for e in entries]:
        faults.append("index.txt and manifest.json disagree")
    on_disk = {p.name for p in folder.glob("*.zst")}
    if on_disk != {e.filename for e in entries}:
        faults.append("the .zst files are not those of manifest.json")
    for tensor in ("k_post", "v", "q_norm"):
        runs = [(e.layer_first, e.n_layers) for e in entries if e.tensor == tensor]
        layers = [layer for first, n in sorted(runs) for layer in range(first, first + n)]
        if layers != list(range(facts["n_layers"])):
            faults.append(f"{tensor} does not cover every layer once")
    return faults


def verify(folder: Path) -> int:
    """Checks a folder and prints what was found; returns the number of faults."""
    facts, entries = read_manifest(folder)
    bad = 0
    for entry in entries:
        faults = entry_faults(folder, facts, entry)
        bad += len(faults)
        verdict = "FAIL" if faults else "ok  "
        print(f"{verdict} {folder.name}/{entry.filename} {'; '.join(faults)}".rstrip())
    for fault in folder_faults(folder, facts, entries):
        bad += 1
        print(f"FAIL {folder.name}: {fault}")
    return bad
