#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""K and V of a Llama model in the Hugging Face form, as a data folder that is not committed.

    capture_safetensors.py MODEL_DIR --text FILE --out DIR [--tokens N]

MODEL_DIR holds config.json, model.safetensors (bf16 or f32) and tokenizer.json (GPT-2 splitting
over a byte-level BPE; another folder's may be named). The folder that is written has index.txt,
manifest.json, and K after RoPE and V of all layers, as ../kv/README.md describes them, so that
`test_codec_real_kv DIR` reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import bpe
import store
from forward import Capture, Model, Shape

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class SafetensorsModel(Model):
    """The forward pass of Model over other files; K and Q rows are in the half-split order."""

    def __init__(self, folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        n = int.from_bytes(raw[:8], "little")
        self._header = json.loads(raw[8 : 8 + n])
        self._data = raw[8 + n :]
        self._tensors = {name: None for name in self._header}
        self._cache: dict[str, np.ndarray] = {}
        config = json.loads((folder / "config.json").read_text())
        self.shape = Shape(
            arch="llama",
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            d_model=config["hidden_size"],
            rope_theta=config["rope_theta"],
            rms_eps=config["rms_norm_eps"],
        )

    @staticmethod
    def _renamed(name: str) -> str:
        if name in NAMES:
            return NAMES[name]
        _, layer, part, kind = name.split(".")
        return f"model.layers.{layer}.{NAMES[part]}.{kind}"

    def weight(self, name: str) -> np.ndarray:
        """A tensor as fp32."""
        if name not in self._cache:
            entry = self._header[self._renamed(name)]
            first, end = entry["data_offsets"]
            raw = self._data[first:end]
            if entry["dtype"] == "BF16":
                data = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                data = np.frombuffer(raw, np.float32)
            self._cache[name] = data.reshape(entry["shape"])
        return self._cache[name]

    def bias(self, name: str, size: int) -> np.ndarray:
        """A bias, or zeros where the model has none."""
        known = self._renamed(name) in self._header
        return self.weight(name) if known else np.zeros(size, np.float32)


def tokens_of(tokenizer: Path, text: str) -> list[int]:
    """The token ids of a text, after id 0."""
    model = json.loads(tokenizer.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return [0] + bpe.Tokenizer("gpt2", tokens, merges).encode(text)


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, if not the model's own")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to run over")
    parser.add_argument("--skip", type=int, default=0, help="characters of the text to leave out")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to run and to store")
    args = parser.parse_args()
    tokenizer = args.tokenizer or args.model / "tokenizer.json"
    text = args.text.read_text(encoding="utf-8")[args.skip :]
    ids = tokens_of(tokenizer, text[: 16 * args.tokens])[: args.tokens]
    model, cap = SafetensorsModel(args.model), Capture()
    logits = model.logits(model.forward(ids, cap))
    at = logits[np.arange(len(ids) - 1), ids[1:]]
    top = logits[:-1].max(axis=-1)
    nll = float(np.mean(np.log(np.exp(logits[:-1] - top[:, None]).sum(axis=-1)) + top - at))
    args.out.mkdir(parents=True, exist_ok=True)
    entries = store.write_files(args.out, "k_post", 0, cap.stacked("k_post"), "bf16")
    entries += store.write_files(args.out, "v", 0, cap.stacked("v"), "bf16")
    facts = {"model": args.model.name, "n_tokens": len(ids), "nll": round(nll, 3)}
    store.write_index(args.out, facts, entries)
    print(f"{args.out}: {len(ids)} tokens, mean next-token NLL {nll:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
