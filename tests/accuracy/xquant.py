# SPDX-License-Identifier: Apache-2.0
"""Layers' inputs X stored instead of K and V (XQuant, 2508.10395), in numpy or torch: a reference
that shares no code with the library. X is what enters the projections, after the norm; K and V are
made of what comes back, then bias and RoPE.

ref-x16             X itself, in bf16: what the detour costs
ref-x8, 4, 3, 2     X, a token's 128 channels share a scale
ref-xcl4, 3, 2      layers 0 to 2 as X at 4 bits; of every layer above what it differs by from what
                    came back of the one below; -g4: every 4th layer above is stored as X again
ref-xg4, 3, 2       latents of X for fewer K/V heads than query heads: K before RoPE and V, turned
                    by an SVD of their weights (as published: X U of each, K's by channel)
ref-xgcl4, 3, 2     as xcl, of the joint latent of K and V; -d1: differences from layer 1 on; -c:
                    centred
ref-kv4, 3, 2       for comparison: K before RoPE without bias, and V; -f3: layers 0 to 2 at 4 bits

Codes are spread evenly over the range of a group, of 128 where it can be. -paper: as published, the
whole range of values as they are. Else each group of channels is rotated, the best of nine shares
of its range is taken, and K and its latents have the mean of each channel and block taken out. Of X
and its differences the zero is a code at 4 bits and more and lies between two codes below that, so
that a group costs 16 + bits more; -lo, -paper and latents: the least value in fp16, 32 more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

GROUP = 128  # the largest power of two up to it that divides the width
LEAST_GROUP = 32
BLOCK_TOKENS = 256
F16_BITS = 16
F16_LEAST_EXPONENT = -13  # of 2^-14 .5 <= m < 1, the smallest normal number
FIRST_LAYERS, FIRST_BITS = 3, 4
SIGNS_SEED = 2508
SHARES = (1, 0.97, 0.94, 0.90, 0.86, 0.82, 0.78, 0.72, 0.66)
SHARES_2 = (0.90, 0.84, 0.80, 0.76, 0.72, 0.68, 0.64, 0.60, 0.56)
INTEGER, HALF, LEAST = "int", "half", "lo"
OF_X = ("ref-x16", "ref-x8", "ref-x4", "ref-x3", "ref-x2", "ref-x3-lo", "ref-x2-lo",
        "ref-x4-paper", "ref-x3-paper", "ref-x2-paper",
        "ref-xcl4", "ref-xcl3", "ref-xcl2", "ref-xcl3-lo", "ref-xcl2-lo",
        "ref-xcl4-paper", "ref-xcl3-paper", "ref-xcl2-paper",
        "ref-xcl3-g2", "ref-xcl3-g4", "ref-xcl3-g8", "ref-xcl2-g2", "ref-xcl2-g4", "ref-xcl2-g8")
OF_LATENTS = ("ref-xg4", "ref-xg3", "ref-xg2", "ref-xg4-paper", "ref-xg3-paper", "ref-xg2-paper",
              "ref-xgcl4", "ref-xgcl3", "ref-xgcl2", "ref-xgcl3-d1", "ref-xgcl2-d1",
              "ref-xgcl3-c", "ref-xgcl2-c",
              "ref-xgcl4-paper", "ref-xgcl3-paper", "ref-xgcl2-paper",
              "ref-kv4", "ref-kv3", "ref-kv2", "ref-kv3-f3", "ref-kv2-f3")
NAMES = (*OF_X, *OF_LATENTS)
NAME = re.compile(r"ref-(xgcl|xcl|xg|x|kv)(\d+)(?:-(paper|lo|d1|c|f3|g\d))?")


class Unfit(Exception):
    """A model that a form is not made for; the text says why."""


def to_f16(x):
    return x.half().float() if hasattr(x, "half") else x.astype(np.float16).astype(np.float32)


def f16_outward(xp, x, sign: int):
    """The next number of fp16 that is not above x (sign -1), not below it (1)."""
    near = to_f16(x)
    exponent = xp.where(near != 0, xp.frexp(near)[1], F16_LEAST_EXPONENT)
    exponent = xp.clip(exponent, F16_LEAST_EXPONENT, 16)
    step = xp.ldexp(xp.ones_like(near), exponent - 11)
    return xp.where((near - x) * sign < 0, to_f16(near + sign * 0.6 * step), near)


def hadamard(n: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / n**0.5).astype(np.float32)


@dataclass(frozen=True)
class Form:
    """What becomes of the values of a layer, [window, token, width]."""

    bits: int
    zero: str  # INTEGER, HALF or LEAST
    is_rotated: bool
    is_searched: bool
    is_centred: bool = False
    by_channel: bool = False  # groups of GROUP tokens of a channel
    group: int = GROUP

    def bits_a_value(self) -> float:
        zero = F16_BITS if self.zero == LEAST else self.bits
        mean = F16_BITS / BLOCK_TOKENS if self.is_centred else 0
        group = GROUP if self.by_channel else self.group
        return self.bits + (F16_BITS + zero) / group + mean

    def shares(self) -> tuple[float, ...]:
        if not self.is_searched or self.bits > 4:
            return (1,)
        return SHARES_2 if self.bits == 2 else SHARES

    def coded(self, xp, x, low, high):
        """Values of groups on the last axis, with codes spread over low .. high."""
        most = 2**self.bits - 1
        if self.zero == LEAST:
            low = f16_outward(xp, low, -1)
        scale = f16_outward(xp, (high - low) / most, 1)
        divisor = xp.where(scale > 0, scale, 1)
        if self.zero == LEAST:
            return low + scale * xp.clip(xp.round((x - low) / divisor), 0, most)
        half = 0.5 if self.zero == HALF else 0.0
        zero = xp.clip(xp.round(-low / divisor - half), 0, most) + half
        return scale * (xp.clip(xp.round(x / divisor + zero), 0, most) - zero)

    def groups(self, xp, x):
        """Groups on the last axis: the best share of the range of each."""
        low, high = (reach(x, axis=-1, keepdims=True) for reach in (xp.amin, xp.amax))
        if self.zero != LEAST:
            low, high = xp.clip(low, None, 0), xp.clip(high, 0, None)
        middle, half = (low + high) / 2, (high - low) / 2
        best = least = None
        for share in self.shares():
            made = self.coded(xp, x, middle - share * half, middle + share * half)
            error = xp.sum(xp.square(made - x), axis=-1, keepdims=True)
            if best is None:
                best, least = made, error
            else:
                best = xp.where(error < least, made, best)
                least = xp.where(error < least, error, least)
        return best

    def through(self, xp, x, rotation):
        """rotation: of a group, symmetric, and signs."""
        n_windows, n_tokens, width = x.shape
        mean = 0
        if self.is_centred:
            blocks = x.reshape(n_windows, -1, BLOCK_TOKENS, width)
            mean = to_f16(xp.mean(blocks, axis=2, keepdims=True))
            x = (blocks - mean).reshape(x.shape)
        if self.by_channel:
            turned = xp.swapaxes(x.reshape(n_windows, -1, GROUP, width), 2, 3)
            made = xp.swapaxes(self.groups(xp, turned), 2, 3)
        else:
            turned = x.reshape(n_windows, n_tokens, -1, self.group)
            if self.is_rotated:
                matrix, signs = rotation
                made = (self.groups(xp, (turned * signs) @ matrix) @ matrix) * signs
            else:
                made = self.groups(xp, turned)
        if self.is_centred:
            made = made.reshape(n_windows, -1, BLOCK_TOKENS, width) + mean
        return made.reshape(x.shape)


class Setting:
    """One of NAMES for a model. begin() gives what Model.hidden takes as project, for one batch of
    windows: a closed loop remembers the layer below."""

    def __init__(self, name: str, model) -> None:
        kind, bits, self.option = NAME.fullmatch(name).groups()
        self.kind, self.bits = kind, int(bits)
        self.model, self.maths = model, model.maths
        shape = model.shape
        self.width = model.weights["k", 0, "weight"].shape[1]
        self.of_kv = shape.n_kv_heads * shape.dim
        self.refuse(name)
        self.n_layers = shape.n_layers
        self.is_published = self.option == "paper"
        generator = np.random.default_rng(SIGNS_SEED)
        signs = generator.choice(np.array([-1, 1], np.float32), self.group)
        self.rotation = (self.maths.array(hadamard(self.group)), self.maths.array(signs))
        self.bases = [self.basis(layer) for layer in range(shape.n_layers)]

    def refuse(self, name: str) -> None:
        is_whole = self.kind in ("x", "xcl")
        if is_whole and self.bits < F16_BITS and self.width > 2 * self.of_kv:
            raise Unfit(f"{name}: {self.width} values of X a token and layer, "
                        f"{2 * self.of_kv} of K and V")
        if not is_whole and 2 * self.of_kv >= self.width:
            raise Unfit(f"{name}: a latent of {2 * self.of_kv} values, {self.width} of X")
        stored = self.width if is_whole else self.of_kv * (2 if self.kind == "xgcl" else 1)
        self.group = min(GROUP, stored & -stored)
        if self.bits < F16_BITS and self.group < LEAST_GROUP:
            raise Unfit(f"{name}: {stored} values are no groups of {LEAST_GROUP} or more")

    def form(self, layer: int) -> Form:
        is_first = layer < FIRST_LAYERS and (self.kind in ("xcl", "xgcl") or self.option == "f3")
        bits = FIRST_BITS if is_first or self.is_base(layer) else self.bits
        is_latent = self.kind in ("xg", "xgcl", "kv")
        zero = INTEGER if bits >= 4 else HALF
        if self.option in ("lo", "paper") or is_latent:
            zero = LEAST
        return Form(bits, zero, not self.is_published, not self.is_published, self.option == "c",
                    group=self.group)

    def is_base(self, layer: int) -> bool:
        """Of a closed loop: stored as it is, at the width of the first layers."""
        if self.kind not in ("xcl", "xgcl"):
            return False
        if self.option == "d1":
            return layer == 0
        last = FIRST_LAYERS - 1
        every = int(self.option[1:]) if (self.option or "").startswith("g") else self.n_layers
        return layer <= last or (layer - last) % every == 0

    def forms(self, layer: int) -> tuple[Form, Form]:
        """Of K's and of V's latents."""
        form = self.form(layer)
        if self.is_published:
            return replace(form, by_channel=True), form
        return replace(form, is_centred=True), form

    def bits_a_token(self) -> float:
        """Of all layers."""
        if self.bits == F16_BITS:
            return float(F16_BITS * self.width * self.n_layers)
        total = 0.0
        for layer in range(self.n_layers):
            if self.kind in ("x", "xcl"):
                total += self.width * self.form(layer).bits_a_value()
            elif self.kind == "xgcl":
                total += 2 * self.of_kv * self.form(layer).bits_a_value()
            else:
                total += sum(self.of_kv * form.bits_a_value() for form in self.forms(layer))
        return total

    def share(self) -> float:
        """Of the bits of bf16 K and V."""
        return self.bits_a_token() / (F16_BITS * 2 * self.of_kv * self.n_layers)

    def weight(self, name: str, layer: int):
        """[in, out]"""
        return self.model.weights[name, layer, "weight"].T

    def basis(self, layer: int):
        """(into latents, back from latents) for K and V apart, or of both together."""
        if self.kind in ("x", "xcl", "kv"):
            return None
        k, v = (np.asarray(self.maths.host(self.weight(name, layer)), np.float64)
                for name in ("k", "v"))
        parts = [np.concatenate((k, v), axis=1)] if self.kind == "xgcl" else [k, v]
        found = []
        for part in parts:
            u, s, b = np.linalg.svd(part, full_matrices=False)
            if self.kind == "xgcl":
                found.append((u, u.T))
            elif self.is_published:
                found.append((u, s[:, None] * b))
            else:
                found.append((u * s, b))
        return [tuple(self.maths.array(one.astype(np.float32)) for one in pair) for pair in found]

    def rounded(self, x):
        """To bf16, as a product takes it."""
        return self.maths.as_bf16(x)

    def products(self, x, layer: int):
        x = self.rounded(x)
        return x @ self.weight("k", layer), x @ self.weight("v", layer)

    def begin(self):
        below = None

        def loop(layer: int, x):
            nonlocal below
            xp = self.maths.xp
            start = 0 if self.is_base(layer) else below
            delta = x - start
            if self.kind == "xgcl":
                into, back = self.bases[layer][0]
                made = self.form(layer).through(xp, delta @ into, self.rotation) @ back
            else:
                made = self.form(layer).through(xp, delta, self.rotation)
            below = start + made
            return self.products(below, layer)

        def apart(layer: int, x):
            if self.kind == "x":
                if self.bits < F16_BITS:
                    x = self.form(layer).through(self.maths.xp, x, self.rotation)
                return self.products(x, layer)
            latents = ([x @ self.weight(name, layer) for name in ("k", "v")] if self.kind == "kv"
                       else [x @ into for into, _ in self.bases[layer]])
            made = [form.through(self.maths.xp, latent, self.rotation)
                    for form, latent in zip(self.forms(layer), latents)]
            if self.kind == "xg":
                made = [latent @ back for latent, (_, back) in zip(made, self.bases[layer])]
            return tuple(made)

        way = loop if self.kind in ("xcl", "xgcl") else apart

        def project(layer: int, x):
            """K and V before bias. What is behind the last full block is stored by nobody yet."""
            whole = x.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
            made = way(layer, self.rounded(x[:, :whole]))
            if whole == x.shape[1]:
                return made
            tail = self.products(x[:, whole:], layer)
            return tuple(self.maths.xp.concatenate(pair, 1) for pair in zip(made, tail))

        return project
