# SPDX-License-Identifier: Apache-2.0
"""Llama and Qwen2 decoders whose K and V can be replaced as they are produced.

Weights come from a folder in the Hugging Face form (config.json, model.safetensors) or from a GGUF
file (which needs the gguf package), and are computed with in fp32. Q and K rows are in the order
whose RoPE pairs are (i, i + dim / 2), which is what engines keep in their caches.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Ours: (Hugging Face, GGUF).
GLOBAL_NAMES = {
    "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "output_norm": ("model.norm.weight", "output_norm.weight"),
    "output": ("lm_head.weight", "output.weight"),
}
LAYER_NAMES = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}


@dataclass(frozen=True)
class Shape:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    dim: int
    rope_theta: float
    rms_eps: float


class SafetensorsFile:
    """A model's folder in the Hugging Face form."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        raw = self.path.read_bytes()
        self.digest = hashlib.sha256(raw).hexdigest()
        n = int.from_bytes(raw[:8], "little")
        self.header = json.loads(raw[8 : 8 + n])
        self.data = raw[8 + n :]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        n_heads = config["num_attention_heads"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.shape = Shape(config["num_hidden_layers"], n_heads,
                           config.get("num_key_value_heads", n_heads),
                           config.get("head_dim") or config["hidden_size"] // n_heads,
                           float(theta), float(config["rms_norm_eps"]))

    @staticmethod
    def name_of(name: str, layer: int | None, kind: str) -> str:
        if layer is None:
            return GLOBAL_NAMES[name][0]
        return f"model.layers.{layer}.{LAYER_NAMES[name][0]}.{kind}"

    def tensor(self, name: str, layer: int | None = None, kind: str = "weight"):
        """fp32, or None if the model has no such tensor."""
        entry = self.header.get(self.name_of(name, layer, kind))
        if entry is None:
            return None
        first, end = entry["data_offsets"]
        raw = self.data[first:end]
        if entry["dtype"] == "BF16":
            data = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            data = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        return data.astype(np.float32).reshape(entry["shape"])


class GgufFile:
    """A GGUF file of the architectures llama and qwen2."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.arch = self.field("general.architecture")
        if self.arch not in ("llama", "qwen2"):
            raise ValueError(f"{path}: architecture {self.arch} is neither llama nor qwen2")
        n_heads = self.field(f"{self.arch}.attention.head_count")
        self.shape = Shape(self.field(f"{self.arch}.block_count"), n_heads,
                           self.field(f"{self.arch}.attention.head_count_kv"),
                           self.field(f"{self.arch}.embedding_length") // n_heads,
                           float(self.field(f"{self.arch}.rope.freq_base")),
                           float(self.field(f"{self.arch}.attention.layer_norm_rms_epsilon")))

    def field(self, name: str):
        return self.reader.fields[name].contents()

    def tensor(self, name: str, layer: int | None = None, kind: str = "weight"):
        """fp32, or None if the model has no such tensor."""
        from gguf.quants import dequantize

        if layer is None:
            full = GLOBAL_NAMES[name][1]
        else:
            full = f"blk.{layer}.{LAYER_NAMES[name][1]}.{kind}"
        tensor = self.tensors.get(full)
        if tensor is None:
            return None
        data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if self.arch != "llama" or name not in ("q", "k"):
            return data
        # GGUF keeps the rows of llama models interleaved: pairs (2i, 2i + 1)
        pairs = data.reshape(-1, self.shape.dim // 2, 2, *data.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)


def open_file(path: Path):
    return SafetensorsFile(path) if path.is_dir() else GgufFile(path)


def rope_tables(n_tokens: int, dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, [token, dim / 2]; angles are computed in fp64."""
    angle = np.arange(n_tokens)[:, None] * theta ** (-2.0 * np.arange(dim // 2) / dim)[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class Model:
    """A decoder. replace(layer, k, v), if given, returns what attention is computed with; k and v
    are [window, kv_head, token, dim], K after RoPE; before(layer, k, v) does the same with K before
    RoPE. project(layer, x), if given, returns K and V before bias, [window, token, width], of the
    input of a layer's projections."""

    def __init__(self, file, maths) -> None:
        self.maths = maths
        self.shape = file.shape
        self.weights = {}
        for name in GLOBAL_NAMES:
            self._take(file, name, None, "weight")
        for layer in range(file.shape.n_layers):
            for name in LAYER_NAMES:
                self._take(file, name, layer, "weight")
                self._take(file, name, layer, "bias")

    def _take(self, file, name, layer, kind) -> None:
        data = file.tensor(name, layer, kind)
        if data is not None:
            self.weights[name, layer, kind] = self.maths.array(data)

    def _biased(self, product, name: str, layer: int):
        bias = self.weights.get((name, layer, "bias"))
        return product if bias is None else product + bias

    def _linear(self, x, name: str, layer: int):
        return self._biased(x @ self.weights[name, layer, "weight"].T, name, layer)

    def _norm(self, x, name: str, layer: int | None):
        return self.maths.rms_norm(x, self.weights[name, layer, "weight"], self.shape.rms_eps)

    def _attention(self, h, layer: int, tables, replace, project, before):
        maths, shape = self.maths, self.shape
        x = self._norm(h, "attention_norm", layer)
        q = maths.rope(maths.heads(self._linear(x, "q", layer), shape.n_heads), *tables)
        products = [None, None] if project is None else project(layer, x)
        k, v = (self._linear(x, name, layer) if product is None
                else self._biased(product, name, layer)
                for name, product in zip(("k", "v"), products))
        k, v = (maths.heads(part, shape.n_kv_heads) for part in (k, v))
        if before is not None:
            k, v = before(layer, k, v)
        k = maths.rope(k, *tables)
        if replace is not None:
            k, v = replace(layer, k, v)
        return self._linear(maths.attention(q, k, v), "o", layer)

    def _feed_forward(self, h, layer: int):
        x = self._norm(h, "ffn_norm", layer)
        gated = self.maths.gated(self._linear(x, "gate", layer), self._linear(x, "up", layer))
        return self._linear(gated, "down", layer)

    def hidden(self, ids: np.ndarray, replace=None, project=None, before=None):
        """[window, token, width] after the last norm, of [window, token] ids."""
        tables = rope_tables(ids.shape[1], self.shape.dim, self.shape.rope_theta)
        tables = tuple(self.maths.array(table) for table in tables)
        h = self.maths.rows(self.weights["embedding", None, "weight"], ids)
        for layer in range(self.shape.n_layers):
            h = h + self._attention(h, layer, tables, replace, project, before)
            h = h + self._feed_forward(h, layer)
        return self._norm(h, "output_norm", None)

    def judge(self, ids: np.ndarray, hidden, base=None) -> tuple:
        """(NLL, KL from base, top-1 changed) of the tokens 1, 2, ... of one window, base and hidden
        being its hidden states."""
        table = self.weights.get(("output", None, "weight"),
                                 self.weights["embedding", None, "weight"])
        parts = []
        rows = self.maths.logits_rows
        for at in range(0, len(ids) - 1, rows):
            end = min(at + rows, len(ids) - 1)
            ours = self.maths.log_probabilities(hidden[at:end], table)
            theirs = None
            if base is not None:
                theirs = self.maths.log_probabilities(base[at:end], table)
            parts.append(self.maths.judge(theirs, ours, ids[at + 1 : end + 1]))
        return tuple(None if parts[0][i] is None
                     else np.concatenate([self.maths.host(part[i]) for part in parts])
                     for i in range(3))
