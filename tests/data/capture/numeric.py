# SPDX-License-Identifier: Apache-2.0
"""Number formats and statistics of captured tensors. Needs numpy only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import store


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, round to nearest even. Values must be finite."""
    if not np.isfinite(x).all():
        raise ValueError("a value is not finite")
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def to_bytes(x: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes of fp32 data."""
    return (to_bf16(x) if dtype == "bf16" else x.astype("<f4")).tobytes()


def from_bytes(raw: bytes, dtype: str) -> np.ndarray:
    """fp32 values of stored bytes, flat."""
    if dtype == "bf16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, "<f4").astype(np.float32)


def load(folder: Path, tensor: str) -> dict[int, np.ndarray]:
    """The stored layers of a tensor: layer number to [head][token][dim]."""
    layers: dict[int, np.ndarray] = {}
    for e in store.read_manifest(folder)[1]:
        if e.tensor == tensor:
            raw = store.decompress(folder / e.filename)
            data = from_bytes(raw, e.dtype).reshape(e.n_layers, e.n_heads, e.n_tokens, e.dim)
            layers.update(enumerate(data, e.layer_first))
    return layers


def kurtosis(x: np.ndarray) -> float:
    """Fourth moment over the squared second moment, about zero (Gaussian: 3)."""
    square = np.square(x, dtype=np.float64)
    mean = square.mean()
    return float(np.square(square).mean() / mean**2) if mean > 0 else 0.0


def hadamard(n: int) -> np.ndarray:
    """The orthonormal Sylvester-Hadamard matrix of order n, a power of two."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(n)).astype(np.float32)


def channel_outlier(k: np.ndarray) -> float:
    """Largest channel RMS over the median channel RMS of [token, dim]."""
    rms = np.sqrt(np.mean(np.square(k, dtype=np.float64), axis=0))
    return float(rms.max() / np.median(rms))


def minmax4(x: np.ndarray) -> np.ndarray:
    """Plain 4-bit min/max quantization of each row, and back."""
    low = x.min(axis=-1, keepdims=True)
    step = np.maximum((x.max(axis=-1, keepdims=True) - low) / 15, 1e-12)
    return np.rint((x - low) / step) * step + low


def error_4bit(k: np.ndarray, rotate: bool, centre: bool) -> float:
    """Squared error of 4-bit K of one head over the power of K about its mean.

    The power is taken about the mean of each channel: a part of K that is the
    same for every token moves all scores of a query alike, so softmax drops it.
    """
    about_mean = k - k.mean(axis=0)
    x = about_mean if centre else k
    if rotate:
        x = x @ hadamard(x.shape[-1])
    return float(np.square(minmax4(x) - x).sum() / np.square(about_mean).sum())


def head_stats(k: np.ndarray, v: np.ndarray) -> dict[str, float]:
    """The figures of one head, from [token, dim] K and V."""
    rotated = k @ hadamard(k.shape[-1])
    norm_ratio = np.linalg.norm(k, axis=1) / np.maximum(np.linalg.norm(v, axis=1), 1e-12)
    return {
        "outlier": channel_outlier(k),
        "kurt": kurtosis(k),
        "kurt_rot": kurtosis(rotated),
        "max": float(np.abs(k).max()),
        "norm_ratio": float(np.median(norm_ratio)),
        "e_plain": error_4bit(k, False, False),
        "e_rot": error_4bit(k, True, False),
        "e_rot_c": error_4bit(k, True, True),
    }


def model_stats(folder: Path) -> dict[str, np.ndarray]:
    """Every figure for every head of every layer."""
    k, v = load(folder, "k_post"), load(folder, "v")
    rows = [
        head_stats(k[layer][head], v[layer][head])
        for layer in sorted(k)
        for head in range(len(k[layer]))
    ]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


STAT_ROWS = (
    ("max over median channel RMS of K", "outlier", "{:.1f}"),
    ("largest absolute K", "max", "{:.1f}"),
    ("kurtosis of K", "kurt", "{:.1f}"),
    ("kurtosis of K, Hadamard over the head", "kurt_rot", "{:.1f}"),
    ("norm of K over norm of V (median token)", "norm_ratio", "{:.1f}"),
    ("4-bit min/max error of K", "e_plain", "{:.4f}"),
    ("4-bit error, rotated", "e_rot", "{:.4f}"),
    ("4-bit error, centred and rotated", "e_rot_c", "{:.4f}"),
)


def stats_table(folders: list[Path]) -> str:
    """A Markdown table: the median head and the worst head of each model."""
    stats = [model_stats(folder) for folder in folders]
    names = [folder.name for folder in folders]
    titles = " | ".join(f"{name}, median | worst" for name in names)
    lines = [f"| per (layer, head), K post-RoPE | {titles} |"]
    lines.append("| --- |" + " ---: | ---: |" * len(names))
    for title, key, form in STAT_ROWS:
        cells = [f"{form.format(np.median(s[key]))} | {form.format(s[key].max())}" for s in stats]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


HARD_ERROR = 0.1  # a tenth of the signal lost: the scores of such a head are noise-bound


def hard_heads(folder: Path) -> str:
    """The heads that rotation alone does not save, as a sentence."""
    facts = store.read_manifest(folder)[0]
    n_kv, stats = facts["n_kv_heads"], model_stats(folder)
    hard = [i for i, error in enumerate(stats["e_rot"]) if error > HARD_ERROR]
    names = ", ".join(f"{i // n_kv}/{i % n_kv}" for i in hard)
    total = len(stats["e_rot"])
    listed = f" (layer/head): {names}" if hard else ""
    counted = f"{len(hard)} of {total} heads{listed}"
    return f"{folder.name}: rotated 4-bit error above {HARD_ERROR} in {counted}."


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def rotate_pairs(k: np.ndarray, theta: float) -> np.ndarray:
    """RoPE of [head][token][dim], pairs (i, i + dim / 2), positions from 0."""
    half = k.shape[-1] // 2
    angle = np.arange(k.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    lo, hi = k[..., :half], k[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((lo * cos - hi * sin, hi * cos + lo * sin), axis=-1)


def project(folder: Path, layer: int, which: str) -> np.ndarray:
    """x W^T + b of a stored layer, [head][token][dim]."""
    out = np.einsum("td,hcd->htc", load(folder, "x")[layer][0], load(folder, f"w_{which}")[layer])
    bias = load(folder, f"b_{which}")
    return out + bias[layer] if bias else out


def consistency(folder: Path) -> dict[str, float]:
    """How well stored tensors give one another: the worst layer of each."""
    theta = store.read_manifest(folder)[0]["rope_theta"]
    k_pre, k_post, v = (load(folder, t) for t in ("k_pre", "k_post", "v"))
    layers = sorted(k_pre)
    return {
        "rope(k_pre) against k_post": max(
            relative_error(rotate_pairs(k_pre[n], theta), k_post[n]) for n in layers
        ),
        "x w_k + b_k against k_pre": max(
            relative_error(project(folder, n, "k"), k_pre[n]) for n in layers
        ),
        "x w_v + b_v against v": max(
            relative_error(project(folder, n, "v"), v[n]) for n in layers
        ),
    }
