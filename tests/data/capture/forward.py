# SPDX-License-Identifier: Apache-2.0
"""A plain fp32 forward pass of Llama and Qwen2 models from a GGUF file.

Written for capture, not for speed: one sequence, no cache, every weight
dequantized to fp32 once and kept. Both architectures run with RoPE pairs
(i, i + head_dim / 2), the order that most serving engines use. The llama
architecture stores its Q and K rows interleaved in GGUF, so that its pairs are
(2i, 2i + 1) there; its rows are put back into the half-split order on load.
Q.K products do not depend on the order, as both sides are reordered alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from bpe import Tokenizer

ARCHITECTURES = ("llama", "qwen2")


@dataclass(frozen=True)
class Shape:
    """The sizes and constants of a model."""

    arch: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    rope_theta: float
    rms_eps: float


@dataclass
class Capture:
    """What a forward pass leaves behind, a list entry for every layer."""

    k_pre: list[np.ndarray] = field(default_factory=list)  # [kv_head, token, dim]
    k_post: list[np.ndarray] = field(default_factory=list)  # [kv_head, token, dim]
    v: list[np.ndarray] = field(default_factory=list)  # [kv_head, token, dim]
    q_norm: list[np.ndarray] = field(default_factory=list)  # [q_head, token]
    x: list[np.ndarray] = field(default_factory=list)  # [token, d_model]

    def stacked(self, tensor: str) -> np.ndarray:
        """One array with the layers in front."""
        return np.stack(getattr(self, tensor))


def rope_tables(n_tokens: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, [token, head_dim / 2]; angles are computed in fp64."""
    freq = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angle = np.arange(n_tokens)[:, None] * freq[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotates the pairs (i, i + dim / 2) of [..., token, dim]."""
    lo, hi = np.split(x, 2, axis=-1)
    return np.concatenate((lo * cos - hi * sin, hi * cos + lo * sin), axis=-1)


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis, with its gain."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * gain


def heads(x: np.ndarray, n_heads: int) -> np.ndarray:
    """[token, head * dim] to [head, token, dim]."""
    return np.ascontiguousarray(x.reshape(len(x), n_heads, -1).transpose(1, 0, 2))


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention; query heads share K/V heads in equal groups.

    q is [q_head, token, dim]; k and v are [kv_head, token, dim]. Returns
    [token, q_head * dim].
    """
    group = len(q) // len(k)
    n_tokens = q.shape[1]
    future = np.triu(np.full((n_tokens, n_tokens), -np.inf, np.float32), 1)
    out = np.empty_like(q)
    for head in range(len(q)):
        scores = q[head] @ k[head // group].T / np.float32(np.sqrt(q.shape[2])) + future
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[head] = weights @ v[head // group]
    return out.transpose(1, 0, 2).reshape(n_tokens, -1)


class Model:
    """A model read from a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {t.name: t for t in self._reader.tensors}
        self._cache: dict[str, np.ndarray] = {}
        self.shape = self._read_shape()

    def _field(self, name: str):
        return self._reader.fields[name].contents()

    def _read_shape(self) -> Shape:
        arch = self._field("general.architecture")
        if arch not in ARCHITECTURES:
            raise ValueError(f"architecture {arch!r} is not one of {ARCHITECTURES}")
        d_model = self._field(f"{arch}.embedding_length")
        n_heads = self._field(f"{arch}.attention.head_count")
        return Shape(
            arch=arch,
            n_layers=self._field(f"{arch}.block_count"),
            n_heads=n_heads,
            n_kv_heads=self._field(f"{arch}.attention.head_count_kv"),
            head_dim=d_model // n_heads,
            d_model=d_model,
            rope_theta=float(self._field(f"{arch}.rope.freq_base")),
            rms_eps=float(self._field(f"{arch}.attention.layer_norm_rms_epsilon")),
        )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the weights."""
        return Tokenizer(
            self._field("tokenizer.ggml.pre"),
            self._field("tokenizer.ggml.tokens"),
            self._field("tokenizer.ggml.merges"),
        )

    def weight(self, name: str) -> np.ndarray:
        """A tensor as fp32; Q and K rows in the half-split RoPE order."""
        if name not in self._cache:
            tensor = self._tensors[name]
            data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            self._cache[name] = self._half_split(name, data)
        return self._cache[name]

    def bias(self, name: str, size: int) -> np.ndarray:
        """A bias, or zeros where the model has none."""
        return self.weight(name) if name in self._tensors else np.zeros(size, np.float32)

    def has_bias(self) -> bool:
        """True when the K projection has a bias."""
        return "blk.0.attn_k.bias" in self._tensors

    def _half_split(self, name: str, data: np.ndarray) -> np.ndarray:
        if self.shape.arch != "llama" or not (".attn_q." in name or ".attn_k." in name):
            return data
        pairs = data.reshape(-1, self.shape.head_dim // 2, 2, *data.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)

    def _project(self, x: np.ndarray, layer: int, which: str) -> np.ndarray:
        weight = self.weight(f"blk.{layer}.attn_{which}.weight")
        return x @ weight.T + self.bias(f"blk.{layer}.attn_{which}.bias", len(weight))

    def _attention(
        self, h: np.ndarray, layer: int, tables: tuple[np.ndarray, np.ndarray], cap: Capture | None
    ) -> np.ndarray:
        s = self.shape
        x = rms_norm(h, self.weight(f"blk.{layer}.attn_norm.weight"), s.rms_eps)
        q = rope(heads(self._project(x, layer, "q"), s.n_heads), *tables)
        k_pre = heads(self._project(x, layer, "k"), s.n_kv_heads)
        k_post = rope(k_pre, *tables)
        v = heads(self._project(x, layer, "v"), s.n_kv_heads)
        if cap is not None:
            cap.x.append(x)
            cap.k_pre.append(k_pre)
            cap.k_post.append(k_post)
            cap.v.append(v)
            cap.q_norm.append(np.linalg.norm(q, axis=-1).astype(np.float32))
        mixed = causal_attention(q, k_post, v)
        return mixed @ self.weight(f"blk.{layer}.attn_output.weight").T

    def _feed_forward(self, h: np.ndarray, layer: int) -> np.ndarray:
        x = rms_norm(h, self.weight(f"blk.{layer}.ffn_norm.weight"), self.shape.rms_eps)
        gate = x @ self.weight(f"blk.{layer}.ffn_gate.weight").T
        up = x @ self.weight(f"blk.{layer}.ffn_up.weight").T
        with np.errstate(over="ignore"):  # exp may reach inf, and the quotient is then 0
            silu = gate / (1 + np.exp(-gate))
        return (silu * up) @ self.weight(f"blk.{layer}.ffn_down.weight").T

    def forward(self, ids: list[int], cap: Capture | None = None) -> np.ndarray:
        """The final hidden states, [token, d_model], after the last norm."""
        tables = rope_tables(len(ids), self.shape.head_dim, self.shape.rope_theta)
        h = self.weight("token_embd.weight")[ids]
        for layer in range(self.shape.n_layers):
            h = h + self._attention(h, layer, tables, cap)
            h = h + self._feed_forward(h, layer)
        return rms_norm(h, self.weight("output_norm.weight"), self.shape.rms_eps)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Next-token logits; the embedding serves where no output matrix is."""
        name = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        return hidden @ self.weight(name).T

    def nll(self, ids: list[int], hidden: np.ndarray) -> np.ndarray:
        """Negative log-likelihood in nats of tokens 1, 2, ... of `ids`."""
        return np.concatenate(list(self._nll_chunks(ids, hidden)))

    def _nll_chunks(self, ids: list[int], hidden: np.ndarray) -> Iterator[np.ndarray]:
        for at in range(0, len(ids) - 1, 128):
            end = min(at + 128, len(ids) - 1)
            logits = self.logits(hidden[at:end]).astype(np.float64)
            top = logits.max(axis=1, keepdims=True)
            log_sum = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
            yield log_sum - logits[np.arange(end - at), ids[at + 1 : end + 1]]

    def greedy(self, ids: list[int], n_new: int) -> list[int]:
        """The most likely continuation of `ids`, one token at a time."""
        out = list(ids)
        for _ in range(n_new):
            out.append(int(np.argmax(self.logits(self.forward(out)[-1:])[0])))
        return out[len(ids) :]
