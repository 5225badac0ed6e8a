# SPDX-License-Identifier: Apache-2.0
"""tests/bench/run accuracy: its arguments, and its rows as results; what the page needs is in
page.py. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import codec  # noqa: E402
import gauss  # noqa: E402

WINDOWS = 49
TOKENS = 2048
PAGES = "bf16-pages"  # not a profile: fp32 K and V rounded to what an engine's cache holds
BEFORE_ROPE = "@pre"  # behind the name of a profile that gets K before RoPE
KV_KINDS = ("any", "KV and MLA")
X_KINDS = ("X", "XG", "X and XG")
NOT_EVIDENCE = "not evidence for your model"
SKETCH_WINDOWS = 100  # codecs' first sketch took the first ones of heldout.txt
ALL, FIRST = "all of the text", "the first ones"  # orders of windows
PROFILE, CALIBRATED, COMPARATOR, REFERENCE = "profile", "calibrated", "comparator", "reference"

# The figures with a name of their own: of which model and profile (None: the one made for it by
# kvferry calibrate).
NAMED = {
    "mha_saw4_dnll": ("mha-28m", "balanced"),
    "mha_saw3_dnll": ("mha-28m", "saw3-search"),
    "mha_tq2_dnll": ("mha-28m", "tq2-centred"),
    "mha_tq2_pre_dnll": ("mha-28m", "tq2-centred@pre"),
    "mha_xcl3_dnll": ("mha-28m", "xcl3"),
    "mha_xcl2_dnll": ("mha-28m", "xcl2-lo"),
    "gqa_xgcl3_dnll": ("gqa-26m", "xgcl3"),
    "gqa_xgcl2_dnll": ("gqa-26m", "xgcl2"),
    "mha_calibrated_dnll": ("mha-28m", None),
    "smollm2_calibrated_dnll": ("smollm2-135m", None),
    "qwen_calibrated_dnll": ("qwen2.5-coder-0.5b", None),
}
# The same for sizes: bf16 K and V over whole records.
NAMED_RATIOS = {
    "smollm2_calibrated_ratio": ("smollm2-135m", None),
    "mha_calibrated_ratio": ("mha-28m", None),
}
# What the article on XQuant says of orders: of which model, what loses less, and than what.
ORDERS = {
    "order_x4_kivi2": ("mha-28m", "ref-x4-paper", "kivi2-g128"),
    "order_x4_tq2": ("mha-28m", "ref-x4", "tq2-centred"),
    "order_xcl4_x4": ("mha-28m", "ref-xcl4-paper", "ref-x4-paper"),
    "order_xcl3_x3": ("mha-28m", "ref-xcl3-paper", "ref-x3-paper"),
    "order_xcl2_x2": ("mha-28m", "ref-xcl2-paper", "ref-x2-paper"),
    "order_xcl2_x3": ("mha-28m", "ref-xcl2-paper", "ref-x3-paper"),
    "order_xcl3_saw4": ("mha-28m", "ref-xcl3", "balanced"),
    "order_xg4_kivi4": ("gqa-26m", "ref-xg4-paper", "kivi4-g128"),
    "order_xg2_kivi2": ("gqa-26m", "ref-xg2-paper", "kivi2-g128"),
    "order_xgcl3_xg3": ("gqa-26m", "ref-xgcl3-paper", "ref-xg3-paper"),
    "order_xgcl2_xg2": ("gqa-26m", "ref-xgcl2-paper", "ref-xg2-paper"),
    "order_xgcl3_kv3": ("gqa-26m", "ref-xgcl3", "ref-kv3-f3"),
    "order_xgcl2_kv2": ("gqa-26m", "ref-xgcl2", "ref-kv2-f3"),
}


class Failure(Exception):
    """The measurement cannot go on; the text says why and what to do."""


@dataclass(frozen=True)
class ProfileFile:
    """A file that kvferry calibrate wrote."""

    path: str
    name: str
    weights_digest: bytes

    @classmethod
    def read(cls, path: str) -> ProfileFile:
        with open(path, encoding="utf-8") as file:
            made = json.load(file)
        return cls(path, made["name"], bytes.fromhex(made["weights_digest"]))


def add_arguments(parser) -> None:
    group = parser.add_argument_group("accuracy")
    group.add_argument("--models", metavar="PATH", nargs="+", default=[],
                       help="folders with config.json and model.safetensors, .gguf files, or "
                            "folders of such; without any, Gaussian data alone are coded")
    group.add_argument("--windows", metavar="N", type=int, default=WINDOWS,
                       help="windows of text a model, spread over it; default %(default)s")
    group.add_argument("--first", action="store_true",
                       help="the first windows of the text, not spread over it")
    group.add_argument("--starts", metavar="N", type=int, default=1,
                       help="for each window N of them, which begin at N tokens of it: less noise "
                            "of the codes, the same text; default %(default)s")
    group.add_argument("--tokens", metavar="N", type=int, default=TOKENS,
                       help="tokens of a window; default %(default)s")
    group.add_argument("--profiles", metavar="NAME", nargs="*",
                       help=f"only these, those with {BEFORE_ROPE} behind the name with K before "
                            "RoPE; default: all that the library lists, comparators, and "
                            "references of X instead of K and V")
    group.add_argument("--profile-file", metavar="FILE", nargs="*", default=[],
                       help="files by kvferry calibrate: each is measured on the model whose "
                            "weights it names")
    group.add_argument("--models-only", action="store_true",
                       help="no figures of made-up data")
    group.add_argument("--text", metavar="FILE",
                       help="UTF-8 text; default: heldout.txt beside the models")
    group.add_argument("--tokenizer", metavar="FILE",
                       help="tokenizer.json; default: the one in or beside the model's folder")
    group.add_argument("--cache", metavar="FILE",
                       help="what is done, so that a run can go on; default: accuracy.jsonl in the "
                            "build")
    group.add_argument("--time", metavar="N", type=float,
                       help="begin no setting later than this many seconds after the first one")
    group.add_argument("--maths", choices=("auto", "numpy", "torch"), default="auto",
                       help="default: torch if there is one, else numpy")
    group.add_argument("--workers", metavar="N", type=int,
                       default=min(16, len(os.sched_getaffinity(0))),
                       help="threads that encode and decode; default %(default)s")
    group.add_argument("--check", metavar="GROUP", nargs="+", default=[],
                       help="first compare the perplexity of these parts of the text with the one "
                            "written down; default: all on a GPU, else only a short one")


def needed(options) -> list[str]:
    return [os.path.join(options.build, "client", "libkvferry.so"),
            os.path.join(options.build, "client", "kvferry"),
            os.path.join(options.build, "agent", "kvferryd")]


def refuse(parser, options) -> None:
    """End with a usage error if the arguments do not fit."""
    if min(options.windows, options.workers, options.starts) < 1:
        parser.error("--windows, --starts and --workers are at least 1")
    if options.tokens < codec.CHUNK_TOKENS:
        parser.error(f"--tokens is at least {codec.CHUNK_TOKENS}, the tokens of a block")
    if options.only is not None:
        parser.error("accuracy takes --profiles, not --only")
    try:
        options.profile_files = [ProfileFile.read(path) for path in options.profile_file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--profile-file: {error!r}")
    options.cache = options.cache or os.path.join(options.build, "accuracy.jsonl")


def all_profiles(build: str, kinds: tuple[str, ...] = KV_KINDS) -> list[str]:
    """Of these kinds of blocks; from the library's own list."""
    done = subprocess.run([os.path.join(build, "client", "kvferry"), "profiles", "--output",
                           "json"], stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout)["profiles"]
    return [row["profile"] for row in rows
            if row["profile"] != "bytes" and row["kinds"] in kinds]


def daemon_settings(options, folder: str) -> list[str]:
    """Where the daemon finds the profiles made by kvferry calibrate."""
    if not options.profile_files:
        return []
    place = os.path.join(folder, "calibration")
    os.mkdir(place)
    for i, file in enumerate(options.profile_files):
        shutil.copyfile(file.path, os.path.join(place, f"{i}.json"))
    return [f"calibration.dir={place}"]


def measure_data(library, synthetic, n_blocks: int, add_value) -> None:
    """Figures of made-up data; synthetic is the module, or None without numpy."""
    try:
        gauss.measure(library, n_blocks, add_value)
        if synthetic is not None:
            synthetic.measure(library, n_blocks, add_value)
    except codec.CodecError as error:
        raise Failure(str(error)) from error


def measure(options, socket: str, add_value) -> list:
    """Values by add_value(name, value), and rows (measure.Row, or a tuple of model, profile and why
    there is none)."""
    try:
        import comparators
        import measure as measure_module
        import synthetic
        import xquant
    except ImportError as error:
        if options.models:
            raise Failure(f"{error}: python3 -m venv, pip install numpy, and run by that python "
                          "(torch is used if it is there)") from error
        others, synthetic = [], None
    else:
        others = [*comparators.NAMES, *xquant.NAMES]
    options.x_profiles = all_profiles(options.build, X_KINDS)
    known = [PAGES, *all_profiles(options.build), *options.x_profiles, *others]
    strangers = {name.removesuffix(BEFORE_ROPE) for name in options.profiles or []} - set(known)
    if strangers:
        raise Failure(f"no profile {', '.join(sorted(strangers))}, only {', '.join(known)}")
    options.profiles = known if options.profiles is None else options.profiles
    library = codec.Library(options.build, socket)
    if not options.models_only:
        measure_data(library, synthetic, 1 if options.quick else gauss.BLOCKS, add_value)
    if not options.models:
        return []
    try:
        return measure_module.measure(options, library)
    except (measure_module.Unusable, codec.CodecError, OSError, ImportError) as error:
        raise Failure(str(error)) from error


def note_of(row) -> str:
    parts = [f"{row.payload:.4f} of bf16 KV, {row.block:.4f} with the record page",
             f"KL {row.kl:.2g}", f"top-1 changed {row.flips:.2%}",
             f"{row.n_windows} windows of {row.n_tokens} tokens, {row.order}, "
             f"{'' if row.n_starts == 1 else f'each from {row.n_starts} starts, '}"
             f"base {row.base_nll:.4f}"]
    if row.n_windows > SKETCH_WINDOWS and row.order in (ALL, FIRST):
        first = sum(row.dnll_windows[:SKETCH_WINDOWS]) / SKETCH_WINDOWS
        parts.append(f"the first {SKETCH_WINDOWS} alone {first:.4f}")
    if row.n_parameters < 1_000_000_000:
        parts.append(NOT_EVIDENCE)
    return "; ".join(parts)


def verdict(low: float, high: float, bar) -> object:
    """Of a value that has to be at most the bar."""
    if bar is None:
        return None
    return True if high <= bar else False if low > bar else "inconclusive"


def result_of(name: str, row, figure=None) -> dict:
    """In the form of figures.measured, and what a reader of JSON may want besides."""
    bar = figure.bar if figure is not None else None
    low, high = row.interval()
    return {"name": name, "unit": "nats", "note": note_of(row), "value": row.dnll,
            "limit_name": None, "limit": None, "ratio": None,
            "ci": [low, high], "pairs": row.n_windows * row.n_starts, "bar": bar, "better": "lower",
            "pass": verdict(low, high, bar),
            "model": row.model, "profile": row.profile, "kind": row.kind, "payload": row.payload,
            "block": row.block, "kl": row.kl, "flips": row.flips, "base_nll": row.base_nll,
            "tokens": row.n_windows * row.n_starts * (row.n_tokens - 1), "groups": row.groups,
            "order": row.order, "maths": row.maths}


def ratio_of(name: str, row, figure) -> dict:
    value = 1 / row.block
    return {"name": name, "unit": "", "note": note_of(row), "value": value,
            "limit_name": None, "limit": None, "ratio": None, "ci": [value, value], "pairs": 1,
            "bar": figure.bar, "better": "higher", "pass": value >= figure.bar}


def order_of(figure, rows: list) -> dict | None:
    """Whether one setting loses less than another one, text by text."""
    model, first, second = ORDERS[figure.name]
    found = {row.profile: row for row in rows if not isinstance(row, tuple) and row.model == model}
    if first not in found or second not in found:
        return None
    one, other = found[first], found[second]
    value, low, high = one.beside(other)
    said = "confirmed" if high < 0 else "refuted" if low > 0 else "undecided"
    return {"name": figure.name, "unit": "nats", "value": value, "limit_name": None, "limit": None,
            "ratio": None, "ci": [low, high], "pairs": one.n_windows * one.n_starts, "bar": None,
            "better": "lower", "pass": None,
            "note": f"{said} on {model}: {first} ({one.payload:.4f} of bf16 KV) loses less than "
                    f"{second} ({other.payload:.4f}); the difference"}


def named_result(figure, rows: list, measured: dict) -> dict:
    """A figure of the table: of rows, or measured already (by name)."""
    if figure.name in measured:
        return measured[figure.name]
    if figure.name in ORDERS:
        made = order_of(figure, rows)
        if made is not None:
            return made
    place = NAMED.get(figure.name) or NAMED_RATIOS.get(figure.name)
    if place is None:
        why = "made-up data: not asked for, or no numpy"
        if figure.name in ORDERS:
            model, *both = ORDERS[figure.name]
            why = f"{model} with {' and '.join(both)} was not measured"
        return {"name": figure.name, "unit": figure.unit, "note": figure.note,
                "skipped": why}
    model, profile = place
    for row in rows:
        if isinstance(row, tuple) or row.model != model:
            continue
        if row.profile == profile or (profile is None and row.kind == CALIBRATED):
            of = result_of if figure.name in NAMED else ratio_of
            result = of(figure.name, row, figure)
            result["note"] = f"{row.profile}: {result['note']}"
            return result
    return {"name": figure.name, "unit": figure.unit, "note": figure.note,
            "skipped": f"{model} with {profile or 'a calibrated profile'} was not measured"}


def results(rows: list, table: list, is_quick: bool, measured: dict) -> list[dict]:
    """The named figures, and every row."""
    out = []
    for figure in table:
        out.append(named_result(figure, rows, measured))
        if is_quick and "pass" in out[-1]:
            out[-1]["pass"] = "inconclusive"
    for row in rows:
        if isinstance(row, tuple):
            out.append({"name": "/".join((*row[:2], "dnll")), "unit": "nats", "note": "",
                        "skipped": row[2]})
        else:
            out.append(result_of(f"{row.model}/{row.profile}/dnll", row))
    return out
