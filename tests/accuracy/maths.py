# SPDX-License-Identifier: Apache-2.0
"""The few operations of a decoder, in numpy or in torch (on a GPU if there is one), fp32 both.

Arrays are [window, token, channel] or [window, head, token, dim]. What leaves for the codec are
bf16 bits in host memory, rounded to nearest even as an engine's cache has them.
"""

from __future__ import annotations

import numpy as np

ROWS = 256  # of scores and of logits at a time


def bf16_of(x: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


class NumpyMaths:
    """One window at a time is quickest."""

    name = "numpy"
    xp = np
    windows_at_once = 1
    batches_at_once = 1
    logits_rows = ROWS

    def array(self, x: np.ndarray) -> np.ndarray:
        return x

    def rows(self, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return table[ids]

    def rms_norm(self, x, gain, eps):
        return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)) * gain

    def heads(self, x, n_heads):
        return x.reshape(*x.shape[:2], n_heads, -1).transpose(0, 2, 1, 3)

    def rope(self, x, cos, sin):
        lo, hi = np.split(x, 2, axis=-1)
        return np.concatenate((lo * cos - hi * sin, hi * cos + lo * sin), axis=-1)

    def gated(self, gate, up):
        with np.errstate(over="ignore"):  # exp may reach inf, and the quotient is then 0
            return gate / (1 + np.exp(-gate)) * up

    def attention(self, q, k, v):
        n_windows, n_heads, n_tokens, dim = q.shape
        group = n_heads // k.shape[1]
        future = np.triu(np.full((ROWS, ROWS), -np.inf, np.float32), 1)
        out = np.empty((n_windows, n_tokens, n_heads, dim), np.float32)
        for window, head in np.ndindex(n_windows, n_heads):
            keys, values = (x[window, head // group] for x in (k, v))
            for at in range(0, n_tokens, ROWS):  # few rows stay in a cache, half the keys go
                end = min(at + ROWS, n_tokens)
                scores = q[window, head, at:end] @ keys[:end].T * np.float32(dim**-0.5)
                scores[:, at:] += future[: end - at, : end - at]
                scores -= scores.max(axis=-1, keepdims=True)
                np.exp(scores, out=scores)
                total = scores.sum(axis=-1, keepdims=True)
                out[window, at:end, head] = scores @ values[:end] / total
        return out.reshape(n_windows, n_tokens, -1)

    def to_bf16(self, x) -> np.ndarray:
        return bf16_of(x)

    def room(self, shape) -> np.ndarray:
        """Host memory for bf16 bits that come back."""
        return np.empty(shape, np.uint16)

    def from_bf16(self, bits: np.ndarray):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def as_bf16(self, x):
        """The same values, rounded."""
        return self.from_bf16(bf16_of(x))

    def log_probabilities(self, hidden, table):
        logits = hidden @ table.T
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True, dtype=np.float64))
        return logits

    def judge(self, base, other, ids):
        """Of rows of log probabilities: NLL of ids by each, KL of other from base, top-1 changed.
        base may be None: then only the first is of use."""
        at = np.arange(len(ids))
        nll = -other[at, ids].astype(np.float64)
        if base is None:
            return nll, None, None
        divergence = (np.exp(base) * (base - other)).sum(axis=-1, dtype=np.float64)
        return nll, divergence, base.argmax(axis=-1) != other.argmax(axis=-1)

    def host(self, x) -> np.ndarray:
        return np.asarray(x)


class TorchMaths:
    """All windows of a batch at once. A GPU has a batch of its own while another one's K and V are
    with the codec."""

    name = "torch"

    def __init__(self, torch) -> None:
        self.torch = torch
        self.xp = torch  # for what is called alike in numpy
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        on_gpu = self.device == "cuda"
        self.windows_at_once = 16 if on_gpu else 1
        self.batches_at_once = 3 if on_gpu else 1
        self.logits_rows = 8 * ROWS if on_gpu else ROWS
        torch.backends.cuda.matmul.allow_tf32 = False  # 10 bits of a product are too few here
        torch.set_grad_enabled(False)

    def array(self, x: np.ndarray):
        return self.torch.from_numpy(np.array(x)).to(self.device)

    def rows(self, table, ids: np.ndarray):
        return table[self.torch.from_numpy(np.array(ids, np.int64)).to(self.device)]

    def rms_norm(self, x, gain, eps):
        return x * self.torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * gain

    def heads(self, x, n_heads):
        return x.reshape(*x.shape[:2], n_heads, -1).transpose(1, 2)

    def rope(self, x, cos, sin):
        lo, hi = x.chunk(2, dim=-1)
        return self.torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), dim=-1)

    def gated(self, gate, up):
        return self.torch.nn.functional.silu(gate) * up

    def attention(self, q, k, v):
        n_windows, n_heads, n_tokens, dim = q.shape
        group = n_heads // k.shape[1]
        future = self.torch.full((n_tokens, n_tokens), float("-inf"), device=q.device).triu(1)
        out = self.torch.empty((n_windows, n_tokens, n_heads, dim), device=q.device)
        for window in range(n_windows):
            keys = k[window].repeat_interleave(group, dim=0)
            scores = q[window] @ keys.transpose(1, 2) * dim**-0.5 + future
            values = v[window].repeat_interleave(group, dim=0)
            out[window] = (scores.softmax(dim=-1) @ values).transpose(0, 1)
        return out.reshape(n_windows, n_tokens, -1)

    def to_bf16(self, x) -> np.ndarray:
        bits = x.contiguous().to(self.torch.bfloat16).view(self.torch.int16)
        host = self.room(bits.shape)
        self.torch.from_numpy(host.view(np.int16)).copy_(bits)
        return host

    def room(self, shape) -> np.ndarray:
        """Host memory for bf16 bits; pinned for a GPU, whose copies are several times quicker."""
        pinned = self.device == "cuda"
        data = self.torch.empty(tuple(shape), dtype=self.torch.int16, pin_memory=pinned)
        return data.numpy().view(np.uint16)

    def from_bf16(self, bits: np.ndarray):
        values = self.torch.from_numpy(bits.view(np.int16)).to(self.device)
        return values.view(self.torch.bfloat16).to(self.torch.float32)

    def as_bf16(self, x):
        return x.to(self.torch.bfloat16).to(self.torch.float32)

    def log_probabilities(self, hidden, table):
        return (hidden @ table.T).double().log_softmax(dim=-1)

    def judge(self, base, other, ids):
        at = self.torch.from_numpy(np.array(ids, np.int64)).to(self.device)
        nll = -other.gather(1, at[:, None])[:, 0]
        if base is None:
            return nll, None, None
        divergence = (base.exp() * (base - other)).sum(dim=-1)
        return nll, divergence, base.argmax(dim=-1) != other.argmax(dim=-1)

    def host(self, x) -> np.ndarray:
        return x.cpu().numpy()


def choose(wanted: str):
    """The maths asked for: auto, numpy or torch."""
    if wanted != "numpy":
        try:
            import torch
        except ImportError:
            if wanted == "torch":
                raise
        else:
            return TorchMaths(torch)
    return NumpyMaths()
