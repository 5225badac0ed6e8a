# SPDX-License-Identifier: Apache-2.0
"""What others have published, after their texts, to stand beside our codecs in a table: in numpy,
never in the daemon. A comparator takes K and V of one layer and window, [head, token, dim] fp32, K
after RoPE, and gives back what a decoder would. Sizes are counted as the texts count them.

kvquant4, 3, 2   KVQuant (2401.18079): K per channel before RoPE with ranges fixed in advance, V per
                 token, levels by k-means (here not weighted by Fisher information), 1 % outliers
                 exact with their places, the first token exact
kvlinc4, 3, 2    KVLinC's quantizer (2510.05373), without its trained adapters: K per channel as it
                 is, V per token behind a Hadamard step, groups of 128
cachegen         CacheGen as LMCache has it (2310.07240): one range for all heads of a token, 32
                 bins in the first third of the layers (V: the first two), then 16, order-0 entropy
                 by layer and channel; tables of the coder not counted
"""

from __future__ import annotations

import threading

import numpy as np

NAMES = ("kvquant4", "kvquant3", "kvquant2", "kvlinc4", "kvlinc3", "kvlinc2", "cachegen")
F16_BITS = 16
GROUP = 128
OUTLIERS = 0.01
OUTLIER_BITS = 32  # a value and its place
ROUNDS = 30  # of k-means, on a histogram
BINS = 2048


def to_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def min_max(x: np.ndarray, axis: int, bits: int) -> np.ndarray:
    """Uniform codes over the whole range, fp16 offset and scale."""
    low = to_f16(x.min(axis=axis, keepdims=True))
    scale = to_f16((x.max(axis=axis, keepdims=True) - low) / (2**bits - 1))
    safe = np.where(scale > 0, scale, 1)
    codes = np.clip(np.rint((x - low) / safe), 0, 2**bits - 1)
    return low + codes * scale


def hadamard(n: int) -> np.ndarray:
    """Sylvester's, orthonormal; n is a power of two."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    if len(h) != n:
        raise ValueError(f"no Hadamard step of order {n} here")
    return h / np.float32(n**0.5)


class Base:
    """Counts bits and values; for many threads."""

    is_fitted = False

    def __init__(self, shape) -> None:
        self.shape = shape
        self.lock = threading.Lock()
        self.bits = 0.0
        self.values = 0

    def count(self, bits: float, values: int) -> None:
        with self.lock:
            self.bits += bits
            self.values += values

    def bits_a_value(self) -> float:
        return self.bits / self.values


class KvLinc(Base):
    def __init__(self, shape, bits: int) -> None:
        super().__init__(shape)
        self.width = bits
        self.rotation = hadamard(shape.dim)

    def __call__(self, _layer: int, k: np.ndarray, v: np.ndarray):
        n_heads, n_tokens, dim = k.shape
        groups = k.reshape(n_heads, n_tokens // GROUP, GROUP, dim)
        k_back = min_max(groups, 2, self.width).reshape(k.shape)
        v_back = min_max(v @ self.rotation, 2, self.width) @ self.rotation
        meta = 2 * F16_BITS * (k.size // GROUP + v.size // dim)
        self.count(self.width * (k.size + v.size) + meta, k.size + v.size)
        return k_back, v_back


class Rope:
    """Of pairs (i, i + dim / 2), positions 0, 1, ..."""

    def __init__(self, shape) -> None:
        half = np.arange(shape.dim // 2)
        self.frequency = shape.rope_theta ** (-2.0 * half / shape.dim)

    def turned(self, k: np.ndarray, sign: int) -> np.ndarray:
        angle = np.arange(k.shape[1])[:, None] * self.frequency[None, :]
        cos, sin = np.cos(angle).astype(np.float32), sign * np.sin(angle).astype(np.float32)
        low, high = np.split(k, 2, axis=-1)
        return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def k_means(values: np.ndarray, bits: int) -> np.ndarray:
    """Levels of values in -1 .. 1, ascending."""
    weights, edges = np.histogram(values, BINS, (-1, 1))
    at = (edges[1:] + edges[:-1]) / 2
    quantiles = (np.arange(2**bits) + 0.5) / 2**bits
    levels = np.interp(quantiles, np.cumsum(weights) / weights.sum(), at)
    for _ in range(ROUNDS):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, at)
        total = np.bincount(nearest, weights, len(levels))
        moment = np.bincount(nearest, weights * at, len(levels))
        levels = np.where(total > 0, moment / np.maximum(total, 1), levels)
    return levels.astype(np.float32)


class KvQuant(Base):
    is_fitted = True

    def __init__(self, shape, bits: int) -> None:
        super().__init__(shape)
        self.width = bits
        self.rope = Rope(shape)
        self.ranges: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.levels: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def fit(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Ranges of K's channels, and the levels of both."""
        k = self.rope.turned(k, -1)
        low, high = np.quantile(k, (OUTLIERS / 2, 1 - OUTLIERS / 2), axis=1, keepdims=True)
        self.ranges[layer] = (low.astype(np.float32), high.astype(np.float32))
        scaled = self._scaled(k, *self.ranges[layer])
        inside = scaled[np.abs(scaled) <= 1]
        v_scaled, exact = self._scale_tokens(v)[:2]
        self.levels[layer] = (k_means(inside, self.width), k_means(v_scaled[~exact], self.width))

    @staticmethod
    def _scaled(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        half = (high - low) / 2
        return (x - low) / np.where(half > 0, half, 1) - 1

    @staticmethod
    def _scale_tokens(v: np.ndarray):
        """(scaled, which are outliers, low, high) of the tokens of all heads."""
        n_exact = max(1, round(OUTLIERS * v.shape[0] * v.shape[2]))
        flat = np.abs(v).transpose(1, 0, 2).reshape(v.shape[1], -1)
        least = np.partition(flat, -n_exact, axis=1)[:, -n_exact]
        exact = np.abs(v) >= least[None, :, None]
        low = np.where(exact, np.inf, v).min(axis=(0, 2), keepdims=True)
        high = np.where(exact, -np.inf, v).max(axis=(0, 2), keepdims=True)
        low, high = to_f16(low), to_f16(high)
        return KvQuant._scaled(v, low, high), exact, low, high

    @staticmethod
    def _back(scaled, low, high, levels):
        codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled)
        return (levels[codes] + 1) * (high - low) / 2 + low

    def __call__(self, layer: int, k: np.ndarray, v: np.ndarray):
        low, high = self.ranges[layer]
        k_levels, v_levels = self.levels[layer]
        before = self.rope.turned(k, -1)
        scaled = self._scaled(before, low, high)
        k_exact = np.abs(scaled) > 1
        k_exact[:, 0] = True
        k_back = self.rope.turned(
            np.where(k_exact, before, self._back(scaled, low, high, k_levels)), 1)
        scaled, v_exact, low, high = self._scale_tokens(v)
        v_exact[:, 0] = True
        v_back = np.where(v_exact, v, self._back(scaled, low, high, v_levels))
        n_exact = int(k_exact.sum() + v_exact.sum())
        self.count(self.width * (k.size + v.size) + OUTLIER_BITS * n_exact +
                   2 * F16_BITS * v.shape[1], k.size + v.size)
        return k_back, v_back


class CacheGen(Base):
    def bins(self, layer: int) -> tuple[int, int]:
        """Of K and of V."""
        return 32 if 3 * layer < self.shape.n_layers else 16, 32 if layer < 2 else 16

    def _one(self, x: np.ndarray, n_bins: int) -> np.ndarray:
        largest = n_bins // 2 - 1
        top = to_f16(np.abs(x).max(axis=(0, 2), keepdims=True))
        codes = np.clip(np.rint(x * (largest / np.where(top > 0, top, 1))), -largest, largest)
        bits = F16_BITS * x.shape[1]
        for channel in codes.transpose(0, 2, 1).reshape(-1, x.shape[1]):
            counts = np.bincount((channel + largest).astype(np.int64), minlength=n_bins)
            share = counts[counts > 0] / len(channel)
            bits -= float((share * np.log2(share)).sum()) * len(channel)
        self.count(bits, x.size)
        return codes * (top / largest)

    def __call__(self, layer: int, k: np.ndarray, v: np.ndarray):
        of_k, of_v = self.bins(layer)
        return self._one(k, of_k), self._one(v, of_v)


def make(name: str, shape):
    """One of NAMES for a model.Shape."""
    if name == "cachegen":
        return CacheGen(shape)
    kind = {"kvquant": KvQuant, "kvlinc": KvLinc}[name[:-1]]
    return kind(shape, int(name[-1]))
