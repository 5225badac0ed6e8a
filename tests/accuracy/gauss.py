# SPDX-License-Identifier: Apache-2.0
"""What profiles do to Gaussian vectors of 128 elements: figures that need no model and no numpy."""

from __future__ import annotations

import array
import struct

from codec import CHUNK_TOKENS, ITEM_BYTES, RECORD_PAGE_BYTES, Handle, Library, Shape, gauss_tensor

SHAPE = Shape(n_layers=1, n_heads=4, dim=128)
BLOCKS = 3

# Cosine of a K vector and what comes back of it, by figure.
COSINES = {
    "gauss_saw4_cos": "balanced",
    "gauss_tq4_cos": "tq4",
    "gauss_tq3_cos": "tq3",
    "gauss_tq2_cos": "tq2",
    "gauss_tq4_qjl_cos": "tq4-qjl",
    "gauss_tq3_qjl_cos": "tq3-qjl",
    "gauss_tq2_qjl_cos": "tq2-qjl",
}
# Bytes of bf16 K and V over those of the payload, and over those of the whole record.
RATIOS = {"saw4_ratio_d128": "saw4-paper"}
BLOCK_RATIOS = {"saw4_block_ratio_d128": "saw4-paper"}


def values_of(bits: array.array) -> tuple[float, ...]:
    """bf16 bits as numbers."""
    words = array.array("I", bits)
    return struct.unpack(f"={len(words)}f", array.array("I", (w << 16 for w in words)).tobytes())


def cosine(wanted: array.array, got: array.array) -> float:
    """The mean over vectors."""
    a, b = values_of(wanted), values_of(got)
    total, n = 0.0, 0
    for at in range(0, len(a), SHAPE.dim):
        x, y = a[at : at + SHAPE.dim], b[at : at + SHAPE.dim]
        product = sum(p * q for p, q in zip(x, y))
        total += product / (sum(p * p for p in x) * sum(q * q for q in y)) ** 0.5
        n += 1
    return total / n


def through(library: Library, profile: str, seed: int) -> tuple[float, float, float]:
    """(cosine, ratio, ratio with the record page) of one block."""
    data, source = gauss_tensor(SHAPE, seed)
    back = [array.array("H", bytes(len(data) * ITEM_BYTES)) for _ in range(2)]
    handle = Handle(library, profile, SHAPE)
    try:
        size = handle.encode(source, source, 0)
        targets = [source.moved_to(bits.buffer_info()[0]) for bits in back]
        handle.decode(size, 0, *targets, 0)
    finally:
        handle.close()
    raw = 2 * SHAPE.n_heads * CHUNK_TOKENS * SHAPE.dim * ITEM_BYTES
    return cosine(data, back[0]), raw / (size - RECORD_PAGE_BYTES), raw / size


def measure(library: Library, n_blocks: int, add_value) -> None:
    """add_value(name, value) for each block and figure."""
    for seed in range(1, n_blocks + 1):
        for name, profile in COSINES.items():
            add_value(name, through(library, profile, seed)[0])
        for name, profile in RATIOS.items():
            add_value(name, through(library, profile, seed)[1])
        for name, profile in BLOCK_RATIOS.items():
            add_value(name, through(library, profile, seed)[2])
