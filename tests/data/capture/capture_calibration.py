#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Captures for `kvferry calibrate`: K, V and some queries of windows of a text, a folder each.

    capture_calibration.py MODEL --text FILE --out DIR [--windows N] [--shift N] [--tokens N]
                           [--queries N] [--workload LABEL] [--pre]

MODEL is a .gguf file or a folder with config.json and model.safetensors. The text is cut into
windows as tests/accuracy cuts it, N of them are taken, spread over the text, and --shift takes
those that lie so many windows behind: what one N and shift take, another shift does not. The form
of a folder is in docs/calibration.md; arrays are not compressed. Needs numpy, and gguf for .gguf.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "accuracy"))
import maths  # noqa: E402
import model as model_module  # noqa: E402
import text as text_module  # noqa: E402

KNOWN = json.loads((HERE.parent.parent / "accuracy" / "known.json").read_text(encoding="utf-8"))


class Recorder(model_module.Model):
    """Keeps K before and after RoPE, V and Q of the last forward pass, a list entry a layer."""

    def __init__(self, file, computes) -> None:
        super().__init__(file, computes)
        self.kept: dict[str, list[np.ndarray]] = {}

    def _attention(self, h, layer, tables, replace):
        x = self._norm(h, "attention_norm", layer)
        for name, n_heads in (("q", self.shape.n_heads), ("k", self.shape.n_kv_heads)):
            flat = self.maths.heads(self._linear(x, name, layer), n_heads)
            self.kept.setdefault(f"{name}_pre", []).append(flat[0])
            self.kept.setdefault(f"{name}_post", []).append(self.maths.rope(flat, *tables)[0])
        v = self.maths.heads(self._linear(x, "v", layer), self.shape.n_kv_heads)
        self.kept.setdefault("v", []).append(v[0])
        return super()._attention(h, layer, tables, replace)

    def record(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """[layer][head][token][dim] of one window."""
        self.kept = {}
        self.hidden(ids[None, :])
        return {name: np.stack(layers) for name, layers in self.kept.items()}


def chosen(windows: list, count: int, shift: int) -> list:
    """count windows, evenly from the first to the last, each so many windows behind."""
    count = min(count, len(windows))
    at = [(2 * i + 1) * len(windows) // (2 * count) + shift for i in range(count)]
    return [(i % len(windows), *windows[i % len(windows)]) for i in at]


def write(folder: Path, arrays: dict[str, np.ndarray], facts: dict) -> None:
    """One capture: an array a file, bf16 rounded to nearest even."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# tensor layer_first n_layers n_heads n_tokens dim dtype raw_bytes filename"]
    for name, data in arrays.items():
        raw = maths.NumpyMaths().to_bf16(data).astype("<u2").tobytes()
        (folder / f"{name}.bf16").write_bytes(raw)
        shape = " ".join(map(str, data.shape))
        lines.append(f"{name} 0 {shape} bf16 {len(raw)} {name}.bf16")
    (folder / "index.txt").write_text("\n".join(lines) + "\n")
    (folder / "manifest.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help=".gguf file, or folder of the model")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, if not the model's own")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to run over")
    parser.add_argument("--out", type=Path, required=True, help="folder for the captures")
    parser.add_argument("--windows", type=int, default=4, help="how many; default 4")
    parser.add_argument("--shift", type=int, default=1, help="windows to go on; default 1")
    parser.add_argument("--tokens", type=int, default=1024, help="of a window; default 1024")
    parser.add_argument("--queries", type=int, default=64, help="tokens with Q; default 64")
    parser.add_argument("--workload", default="other", help="what the text is like; default other")
    parser.add_argument("--pre", action="store_true", help="also K before RoPE")
    args = parser.parse_args()
    file = model_module.open_file(args.model)
    if args.model.suffix == ".gguf":
        tokenizer = text_module.of_gguf(file)
    else:
        tokenizer = text_module.of_folder(args.tokenizer or args.model / "tokenizer.json")
    text = args.text.read_bytes()
    groups = KNOWN["texts"].get(hashlib.sha256(text).hexdigest(), [])
    windows = text_module.windows(text.decode("utf-8"), [tuple(g) for g in groups], tokenizer,
                                  args.tokens)
    recorder = Recorder(file, maths.NumpyMaths())
    step = args.tokens / args.queries
    rows = [int((i + 1) * step) - 1 for i in range(args.queries)]
    for number, group, ids in chosen(windows, args.windows, args.shift):
        kept = recorder.record(ids)
        arrays = {"k_post": kept["k_post"], "v": kept["v"], "q": kept["q_post"][:, :, rows]}
        if args.pre:
            arrays["k_pre"] = kept["k_pre"]
        write(args.out / f"window{number:04d}", arrays, {
            "model": args.model.stem if args.model.suffix else args.model.name,
            "weights_digest": file.digest,
            "workload": args.workload,
            "text_part": group,
            "first_position": 0,
            "rope_theta": file.shape.rope_theta,
            "q_tokens": rows,
        })
        print(f"{args.out}: window {number} of {len(windows)}, {group}, {args.tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
