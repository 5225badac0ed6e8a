# SPDX-License-Identifier: Apache-2.0
"""What the library does to data whose truth is known: distortion beside theory, kurtosis and error
of data with outliers, and a needle to be found among many keys. Needs numpy; no model."""

from __future__ import annotations

import numpy as np

from codec import CHUNK_TOKENS, Handle, Library, Shape, Tensor
from comparators import hadamard
from maths import bf16_of

N_HEADS = 8
DIMS = (64, 80, 96, 128, 256)

# E|x - x^|^2 / E|x|^2 of Lloyd-Max levels on the rotated unit vector, by elements and bits.
TQ_DISTORTION = {
    64: {2: 0.11453, 3: 0.03339, 4: 0.00913}, 80: {2: 0.11512, 3: 0.03362, 4: 0.00921},
    96: {2: 0.11551, 3: 0.03377, 4: 0.00925}, 128: {2: 0.11600, 3: 0.03397, 4: 0.00932},
    256: {2: 0.11674, 3: 0.03426, 4: 0.00941},
}
TQ_PROFILES = {2: "tq2-paper", 3: "tq3-paper", 4: "tq4-paper"}

# Uniform codes over the whole range, as published estimates have it: few digits.
RANGE_DISTORTION = {
    64: {2: 0.2025, 3: 0.0369, 4: 0.00804, 5: 0.00189, 6: 0.00046},
    128: {2: 0.2504, 3: 0.0458, 4: 0.00996, 5: 0.00233, 6: 0.00056},
}
RANGE_PROFILES = {2: "saw2-paper", 3: "saw3-paper", 4: "saw4-paper", 5: "saw5", 6: "saw6",
                  8: "saw8"}
# Of the range, what codes cover: (up to 64 elements, above).
CLIPPED = {2: (0.66, 0.60), 3: (0.86, 0.80), 4: (0.96, 0.94)}
CLIPPED_PROFILES = {2: "saw2", 3: "saw3", 4: "balanced"}

# Cosine of TurboQuant's unbiased form: 1 / sqrt(1 + pi / 2 D), D that of a bit less.
QJL = {"gauss_tq4_qjl_off": ("tq4-qjl", 0.975), "gauss_tq3_qjl_off": ("tq3-qjl", 0.921),
       "gauss_tq2_qjl_off": ("tq2-qjl", 0.798)}

# Two of 128 channels 40 times as large as the others.
OUTLIER_DIM, OUTLIERS, OUTLIER_SCALE = 128, (17, 90), 40.0

NEEDLE_DIM = 128
NEEDLE_KEYS = (1024, 4096, 16384)
NEEDLE_MARGIN = 5.0  # the needle's logit, in standard deviations of the others'
NEEDLE_BIAS = 2.0
NEEDLES = 500
ARTICLE_3_BITS = (0.90, 0.80, 0.65)  # found, by the codec of an article
NEEDLE_PROFILES = {"needle_saw4": "balanced", "needle_tq4": "tq4"}
NEEDLE_PROFILES_3 = {"needle_saw3_vs_article": "saw3-search", "needle_tq3_vs_article": "tq3"}
NEEDLE_OTHERS = {"needle_naive4": "naive4", "needle_tq3_qjl": "tq3-qjl"}


def values_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tensor_of(bits: np.ndarray, token: int) -> Tensor:
    """A layer, [head, token, dim], from a token on."""
    return Tensor((bits.ctypes.data + token * bits.strides[1],), bits.strides[0], bits.shape[2])


def through(library: Library, profile: str, k: np.ndarray, v: np.ndarray):
    """K and V, [head, token, dim], bf16 bits, and what comes back as numbers."""
    back = [np.empty_like(x) for x in (k, v)]
    handle = Handle(library, profile, Shape(1, k.shape[0], k.shape[2]))
    try:
        for token in range(0, k.shape[1], CHUNK_TOKENS):
            size = handle.encode(tensor_of(k, token), tensor_of(v, token), 0)
            handle.decode(size, 0, tensor_of(back[0], token), tensor_of(back[1], token), 0)
    finally:
        handle.close()
    return values_of(back[0]), values_of(back[1])


def normal(generator, dim: int, n_tokens: int = CHUNK_TOKENS) -> np.ndarray:
    return bf16_of(generator.standard_normal((N_HEADS, n_tokens, dim), np.float32))


def distortion(wanted: np.ndarray, got: np.ndarray) -> float:
    wanted = wanted.astype(np.float64)
    return float(np.square(wanted - got).sum() / np.square(wanted).sum())


def uniform_distortion(generator, shape: tuple, bits: int, covered: float) -> float:
    """Of uniform codes over a share of each vector's range, nothing rounded but what comes in and
    out, which is bf16."""
    x = values_of(bf16_of(generator.standard_normal(shape, np.float32)))
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    middle, half = (low + high) / 2, (high - low) / 2 * covered
    step = 2 * half / (2**bits - 1)
    codes = np.clip(np.rint((x - middle + half) / step), 0, 2**bits - 1)
    return distortion(x, values_of(bf16_of(middle - half + codes * step)))


def measure_distortion(library: Library, generator, n_blocks: int, add_value) -> None:
    """How far D is from what it should be, the worst of all dims and bits: by theory for levels,
    beside exact arithmetic on rotated vectors for uniform codes, whose own sample is used."""
    worst = {"tq": 0.0, "saw": 0.0, "saw_clip": 0.0}
    for dim in DIMS:
        n_tokens = CHUNK_TOKENS * 8 * n_blocks
        k, v = normal(generator, dim, n_tokens), normal(generator, dim, n_tokens)

        def note(name, wanted, got):
            worst[name] = max(worst[name], abs(got / wanted - 1))

        for bits, profile in TQ_PROFILES.items():
            back = through(library, profile, k, v)
            note("tq", TQ_DISTORTION[dim][bits], distortion(values_of(v), back[1]))
        for bits, profile in RANGE_PROFILES.items():
            back = through(library, profile, k, v)
            got = distortion(values_of(v), back[1])
            note("saw", uniform_distortion(generator, v.shape, bits, 1.0), got)
            if bits in RANGE_DISTORTION.get(dim, ()):
                note("saw", RANGE_DISTORTION[dim][bits], got)
        for bits, profile in CLIPPED_PROFILES.items():
            back = through(library, profile, k, v)
            covered = CLIPPED[bits][0 if dim <= 64 else 1]
            note("saw_clip", uniform_distortion(generator, v.shape, bits, covered),
                 distortion(values_of(v), back[1]))
    for name, value in worst.items():
        add_value(f"gauss_{name}_d_off", value)


def measure_qjl(library: Library, generator, add_value) -> None:
    """Cosine by powers, as theory has it: of all vectors together."""
    k = normal(generator, OUTLIER_DIM, 4 * CHUNK_TOKENS)
    wanted = values_of(k).astype(np.float64)
    for name, (profile, theory) in QJL.items():
        got = through(library, profile, k, k)[0]
        cosine = (wanted * got).sum() / np.sqrt(np.square(wanted).sum() *
                                                np.square(got.astype(np.float64)).sum())
        add_value(name, abs(float(cosine) - theory))


def kurtosis(x: np.ndarray) -> float:
    x = x.astype(np.float64)
    centred = x - x.mean()
    return float(np.mean(centred**4) / np.mean(centred**2) ** 2)


def measure_outliers(library: Library, generator, add_value) -> None:
    x = generator.standard_normal((N_HEADS, 4 * CHUNK_TOKENS, OUTLIER_DIM), np.float32)
    x[:, :, OUTLIERS] *= OUTLIER_SCALE
    bits = bf16_of(x)
    x = values_of(bits)
    signs = np.where(generator.random(OUTLIER_DIM) < 0.5, -1, 1).astype(np.float32)
    add_value("outlier_kurtosis", kurtosis(x))
    add_value("outlier_kurtosis_off", abs(kurtosis(x * signs @ hadamard(OUTLIER_DIM)) - 3))
    error = [np.square(x - through(library, profile, bits, bits)[1])[
        :, :, [i for i in range(OUTLIER_DIM) if i not in OUTLIERS]].mean()
        for profile in ("naive4", "balanced")]
    add_value("outlier_saw4_vs_naive4", float(error[0] / error[1]))


def found(keys: np.ndarray, back: np.ndarray, generator) -> float:
    """Share of needles whose key, decoded, has the largest logit. A query is a unit vector that
    gives its needle a logit of the margin, where other keys have a normal one."""
    n_keys = len(keys)
    at = generator.integers(0, n_keys, NEEDLES)
    needles = keys[at].astype(np.float64)
    length = np.linalg.norm(needles, axis=1, keepdims=True)
    along = needles / length
    across = generator.standard_normal(needles.shape)
    across -= (across * along).sum(axis=1, keepdims=True) * along
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    cosine = NEEDLE_MARGIN / length
    queries = cosine * along + np.sqrt(1 - cosine**2) * across
    return float(((queries.astype(np.float32) @ back.T).argmax(axis=1) == at).mean())


def needle_rates(library: Library, profile: str, generator) -> list[float]:
    """By length. Keys have a bias, as Qwen2's have: it moves all logits alike."""
    bias = generator.normal(0, NEEDLE_BIAS, NEEDLE_DIM).astype(np.float32)
    rates = []
    for n_keys in NEEDLE_KEYS:
        keys = generator.standard_normal((1, n_keys, NEEDLE_DIM), np.float32)
        back = through(library, profile, *(bf16_of(keys + bias),) * 2)[0]
        rates.append(found(keys[0], back[0] - bias, generator))
    return rates


def measure_needle(library: Library, generator, add_value) -> None:
    for name, profile in {**NEEDLE_PROFILES, **NEEDLE_OTHERS}.items():
        add_value(name, min(needle_rates(library, profile, generator)))
    for name, profile in NEEDLE_PROFILES_3.items():
        rates = needle_rates(library, profile, generator)
        add_value(name, min(rate / bar for rate, bar in zip(rates, ARTICLE_3_BITS)))


def measure(library: Library, n_blocks: int, add_value) -> None:
    """add_value(name, value) for each figure, n_blocks times."""
    for seed in range(n_blocks):
        generator = np.random.default_rng(seed)
        measure_distortion(library, generator, n_blocks, add_value)
        measure_qjl(library, generator, add_value)
        measure_outliers(library, generator, add_value)
        measure_needle(library, generator, add_value)
