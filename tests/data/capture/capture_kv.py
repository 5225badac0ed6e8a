#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Captures K, V, query norms and layer inputs of a real model over real text.

    capture_kv.py capture MODEL --gguf FILE --text FILE --source WORDS --out DIR
    capture_kv.py --verify [DIR ...]   check the committed data, without a model
    capture_kv.py --stats [DIR ...]    print what makes each model hard
    capture_kv.py --check [DIR ...]    check that stored tensors agree

DIR is a folder with a manifest.json; without one, every such folder of
../kv is taken. Only `capture` needs the packages of requirements.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import store
from models import MODELS

KV_ROOT = Path(__file__).resolve().parent.parent / "kv"
PROMPT = "The capital of France is"
CHECK_LIMIT = 0.01  # bf16 rounding of two operands leaves about 0.003


def data_folders(given: list[Path]) -> list[Path]:
    """The folders to read: those given, else every folder of the data."""
    return given or sorted(m.parent for m in KV_ROOT.glob("*/manifest.json"))


def chosen_layers(n_layers: int) -> list[tuple[int, int]]:
    """First, second, middle and last layer, as runs (first layer, count)."""
    return [(0, 2), (n_layers // 2, 1), (n_layers - 1, 1)]


def sanity(model, ids: list[int], hidden) -> dict:
    """Prints and returns the figures that show the forward pass is right."""
    tokenizer = model.tokenizer()
    nll = float(model.nll(ids, hidden).mean())
    follow = tokenizer.decode(model.greedy(tokenizer.encode(PROMPT), 8))
    print(f"mean NLL over {len(ids)} tokens: {nll:.4f} nats a token")
    print(f"greedy: {PROMPT!r} -> {follow!r}")
    return {
        "nll_nats_per_token": round(nll, 4),
        "nll_tokens": len(ids),
        "greedy_prompt": PROMPT,
        "greedy_continuation": follow,
    }


def gather(model, cap, n_tokens: int) -> list[tuple[str, int, object, str]]:
    """(tensor, first layer, [layer][head][token][dim] data, dtype) to write."""
    import numpy as np

    shape = model.shape
    k_pre, x = cap.stacked("k_pre")[:, :, :n_tokens], cap.stacked("x")[:, None, :n_tokens]
    out = [
        ("k_post", 0, cap.stacked("k_post")[:, :, :n_tokens], "bf16"),
        ("v", 0, cap.stacked("v")[:, :, :n_tokens], "bf16"),
        ("q_norm", 0, cap.stacked("q_norm")[:, :, :n_tokens, None], "f32"),
    ]
    for tensor, data in (("k_pre", k_pre), ("x", x)):
        out += [(tensor, at, data[at : at + n], "bf16") for at, n in chosen_layers(len(x))]
    split = (shape.n_kv_heads, -1)
    for which in ("k", "v"):
        for at, n in chosen_layers(len(x)):
            names = [f"blk.{layer}.attn_{which}" for layer in range(at, at + n)]
            rows = [model.weight(f"{m}.weight").reshape(*split, shape.d_model) for m in names]
            out.append((f"w_{which}", at, np.stack(rows), "bf16"))
        if model.has_bias():
            names = [f"blk.{layer}.attn_{which}.bias" for layer in range(shape.n_layers)]
            rows = [model.weight(m).reshape(shape.n_kv_heads, 1, -1) for m in names]
            out.append((f"b_{which}", 0, np.stack(rows), "f32"))
    return out


def facts(model, name: str, text: bytes, args: argparse.Namespace, ids: list[int]) -> dict:
    """What manifest.json says apart from the files."""
    source, shape = MODELS[name], model.shape
    return {
        "model": source.model,
        "source_package": source.package,
        "source_version": source.version,
        "gguf_sha256": source.sha256,
        "licence": source.licence,
        "text": args.text.name,
        "text_source": args.source,
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "n_tokens": args.store_tokens,
        "first_position": 0,
        "token_ids": " ".join(map(str, ids[: args.store_tokens])),
        "n_layers": shape.n_layers,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "d_model": shape.d_model,
        "rope_theta": shape.rope_theta,
        "rope_pairs": "(i, i + head_dim / 2)",
        "rms_eps": shape.rms_eps,
        "kv_bias": model.has_bias(),
        "chosen_layers": [at + i for at, n in chosen_layers(shape.n_layers) for i in range(n)],
        "byte_order": "little",
        "compression": f"zstd level {store.ZSTD_LEVEL}, one frame a file",
    }


def write_full(path: Path, cap) -> None:
    """Everything in fp32, for measurements that are not committed."""
    import numpy as np

    np.savez(path, **{t: cap.stacked(t) for t in ("k_pre", "k_post", "v", "q_norm", "x")})


def capture(args: argparse.Namespace) -> int:
    """Runs the model and writes a data folder."""
    from forward import Capture, Model

    with args.gguf.open("rb") as gguf:
        if hashlib.file_digest(gguf, "sha256").hexdigest() != MODELS[args.model].sha256:
            print(f"{args.gguf} is not the file that models.py names", file=sys.stderr)
            return 1
    model, text, cap = Model(args.gguf), args.text.read_bytes(), Capture()
    ids = model.tokenizer().encode(text.decode("utf-8"))[: args.tokens]
    if len(ids) < args.tokens:
        print(f"the text has {len(ids)} tokens, want {args.tokens}", file=sys.stderr)
        return 1
    hidden = model.forward(ids, cap)
    known = facts(model, args.model, text, args, ids)
    known["sanity"] = sanity(model, ids, hidden)
    if args.full:
        write_full(args.full, cap)
    args.out.mkdir(parents=True, exist_ok=True)
    entries = []
    for tensor, first, data, dtype in gather(model, cap, args.store_tokens):
        entries += store.write_files(args.out, tensor, first, data, dtype)
    store.write_index(args.out, known, entries)
    print(f"{args.out}: {len(entries)} files, {sum(e.zst_bytes for e in entries)} bytes")
    return 0


def verify_all(folders: list[Path]) -> int:
    """--verify."""
    faults = sum(store.verify(folder) for folder in folders)
    print(f"{len(folders)} models, {faults} faults")
    return 1 if faults or not folders else 0


def check_all(folders: list[Path]) -> int:
    """--check."""
    import numeric

    worst = 0.0
    for folder in folders:
        for what, error in numeric.consistency(folder).items():
            worst = max(worst, error)
            print(f"{folder.name}: {what}: relative error {error:.5f}")
    return 1 if worst > CHECK_LIMIT or not folders else 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; the first word decides which form it has."""
    if argv[:1] == ["capture"]:
        parser = argparse.ArgumentParser(prog="capture_kv.py capture")
        parser.add_argument("model", choices=sorted(MODELS))
        parser.add_argument("--gguf", type=Path, required=True, help="from assemble_gguf.py")
        parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to run over")
        parser.add_argument("--source", required=True, help="where the text is from")
        parser.add_argument("--out", type=Path, required=True, help="folder to write")
        parser.add_argument("--tokens", type=int, default=512, help="tokens to run")
        parser.add_argument("--store-tokens", type=int, default=256, help="tokens to store")
        parser.add_argument("--full", type=Path, help="also write all of it as fp32 .npz")
        args = parser.parse_args(argv[1:])
        args.mode = "capture"
        return args
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    for name in ("verify", "stats", "check"):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name)
    parser.add_argument("folders", type=Path, nargs="*", metavar="DIR")
    return parser.parse_args(argv)


def main() -> int:
    args = parse(sys.argv[1:])
    if args.mode == "capture":
        return capture(args)
    folders = data_folders(args.folders)
    if args.mode == "verify":
        return verify_all(folders)
    if args.mode == "check":
        return check_all(folders)
    import numeric

    print(numeric.stats_table(folders) + "\n")
    print("\n".join(numeric.hard_heads(folder) for folder in folders))
    return 0


if __name__ == "__main__":
    sys.exit(main())
