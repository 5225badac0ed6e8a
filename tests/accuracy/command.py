# SPDX-License-Identifier: Apache-2.0
"""tests/bench/run accuracy: its arguments, and its rows as results. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import codec  # noqa: E402
import gauss  # noqa: E402

WINDOWS = 49
TOKENS = 2048
PAGES = "bf16-pages"  # not a profile: fp32 K and V rounded to what an engine's cache holds
NOT_EVIDENCE = "not evidence for your model"

# The figures with a name of their own: of which model and profile.
NAMED = {
    "mha_saw4_dnll": ("mha-28m", "balanced"),
    "mha_saw3_dnll": ("mha-28m", "saw3-search"),
    "mha_tq2_dnll": ("mha-28m", "tq2"),
}


class Failure(Exception):
    """The measurement cannot go on; the text says why and what to do."""


def add_arguments(parser) -> None:
    group = parser.add_argument_group("accuracy")
    group.add_argument("--models", metavar="PATH", nargs="+", default=[],
                       help="folders with config.json and model.safetensors, .gguf files, or "
                            "folders of such; without any, Gaussian data alone are coded")
    group.add_argument("--windows", metavar="N", type=int, default=WINDOWS,
                       help="windows of text a model, spread over it; default %(default)s")
    group.add_argument("--first", action="store_true",
                       help="the first windows of the text, not spread over it")
    group.add_argument("--tokens", metavar="N", type=int, default=TOKENS,
                       help="tokens of a window; default %(default)s")
    group.add_argument("--profiles", metavar="NAME", nargs="+",
                       help="only these; default: all that the library lists")
    group.add_argument("--text", metavar="FILE",
                       help="UTF-8 text; default: heldout.txt beside the models")
    group.add_argument("--tokenizer", metavar="FILE",
                       help="tokenizer.json; default: the one in or beside the model's folder")
    group.add_argument("--cache", metavar="FILE",
                       help="what is done, so that a run can go on; default: accuracy.jsonl in the "
                            "build")
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
    if options.windows < 1 or options.workers < 1:
        parser.error("--windows and --workers are at least 1")
    if options.tokens < codec.CHUNK_TOKENS:
        parser.error(f"--tokens is at least {codec.CHUNK_TOKENS}, the tokens of a block")
    if options.only is not None:
        parser.error("accuracy takes --profiles, not --only")
    options.cache = options.cache or os.path.join(options.build, "accuracy.jsonl")


def all_profiles(build: str) -> list[str]:
    """Of K and V; from the library's own list."""
    done = subprocess.run([os.path.join(build, "client", "kvferry"), "profiles", "--output",
                           "json"], stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout)["profiles"]
    return [row["profile"] for row in rows if row["profile"] != "bytes"]


def measure(options, socket: str, add_value) -> list:
    """Values by add_value(name, value), and rows (measure.Row, or a tuple of model, profile and why
    there is none)."""
    known = all_profiles(options.build)
    known.insert(0, PAGES)
    strangers = set(options.profiles or []) - set(known)
    if strangers:
        raise Failure(f"no profile {', '.join(sorted(strangers))}, only {', '.join(known)}")
    options.profiles = options.profiles or known
    library = codec.Library(options.build, socket)
    try:
        gauss.measure(library, 1 if options.quick else gauss.BLOCKS, add_value)
    except codec.CodecError as error:
        raise Failure(str(error)) from error
    if not options.models:
        return []
    try:
        import measure as measure_module
    except ImportError as error:
        raise Failure(f"{error}: python3 -m venv, pip install numpy, and run by that python "
                      "(torch is used if it is there)") from error
    try:
        return measure_module.measure(options, library)
    except (measure_module.Unusable, codec.CodecError, OSError, ImportError) as error:
        raise Failure(str(error)) from error


def note_of(row) -> str:
    parts = [f"{row.payload:.4f} of bf16 KV, {row.block:.4f} with the record page",
             f"KL {row.kl:.2g}", f"top-1 changed {row.flips:.2%}",
             f"{row.n_windows} windows of {row.n_tokens} tokens, {row.order}, "
             f"base {row.base_nll:.4f}"]
    if row.n_parameters < 1_000_000_000:
        parts.append(NOT_EVIDENCE)
    return "; ".join(parts)


def result_of(name: str, row, figure=None) -> dict:
    """In the form of figures.measured, and what a reader of JSON may want besides."""
    bar = figure.bar if figure is not None else None
    low, high = row.dnll - row.two_se, row.dnll + row.two_se
    verdict = None
    if bar is not None:
        verdict = True if high <= bar else False if low > bar else "inconclusive"
    return {"name": name, "unit": "nats", "note": note_of(row), "value": row.dnll,
            "limit_name": None, "limit": None, "ratio": None,
            "ci": [low, high], "pairs": row.n_windows, "bar": bar, "better": "lower",
            "pass": verdict,
            "model": row.model, "profile": row.profile, "payload": row.payload,
            "block": row.block, "kl": row.kl, "flips": row.flips, "base_nll": row.base_nll,
            "tokens": row.n_windows * (row.n_tokens - 1), "groups": row.groups,
            "order": row.order, "maths": row.maths}


def results(rows: list, table: list, is_quick: bool, measured: dict) -> list[dict]:
    """The named figures, of rows or measured already (by name), and every row."""
    by_key = {(row.model, row.profile): row for row in rows if not isinstance(row, tuple)}
    out = []
    for figure in table:
        if figure.name not in NAMED:
            out.append(measured[figure.name])
            if is_quick:
                out[-1]["pass"] = "inconclusive"
            continue
        model, profile = NAMED[figure.name]
        row = by_key.get((model, profile))
        if row is not None:
            result = result_of(figure.name, row, figure)
            result["note"] = f"{profile}: {result['note']}"
            if is_quick:
                result["pass"] = "inconclusive"
            out.append(result)
        else:
            out.append({"name": figure.name, "unit": figure.unit, "note": figure.note,
                        "skipped": f"{model} with {profile} was not measured"})
    for row in rows:
        if isinstance(row, tuple):
            out.append({"name": "/".join((*row[:2], "dnll")), "unit": "nats", "note": "",
                        "skipped": row[2]})
        else:
            out.append(result_of(f"{row.model}/{row.profile}/dnll", row))
    return out


# --- for the page --------------------------------------------------------------------------------

TABLE_HEAD = (
    "| profile | of bf16 KV | with record page | delta NLL | two errors | KL | top-1 changed |",
    "|---|---:|---:|---:|---:|---:|---:|")


def split(report: dict) -> tuple[dict, list[str]]:
    """The report with its named figures alone, and the others as tables in Markdown, a model each,
    largest blocks first."""
    if report["bench"] != "accuracy":
        return report, []
    named = [result for result in report["results"] if "/" not in result["name"]]
    by_model: dict[str, list[dict]] = {}
    for result in report["results"]:
        if "/" in result["name"] and "skipped" not in result:
            by_model.setdefault(result["model"], []).append(result)
    lines: list[str] = []
    for model, rows in by_model.items():
        first = rows[0]
        lines += ["", f"{model}, {first['pairs']} windows ({first['order']}), "
                      f"{first['tokens']} tokens scored, base {first['base_nll']:.4f} nats a "
                      f"token, computed by {first['maths']}"
                      f"{', ' + NOT_EVIDENCE if NOT_EVIDENCE in first['note'] else ''}:", "",
                  *TABLE_HEAD]
        for row in sorted(rows, key=lambda row: (-row["payload"], row["profile"])):
            error = (row["ci"][1] - row["ci"][0]) / 2
            lines.append(f"| `{row['profile']}` | {row['payload']:.4f} | {row['block']:.4f} | "
                         f"{row['value']:.4f} | {error:.4f} | {row['kl']:.2g} | "
                         f"{row['flips']:.2%} |")
    return {**report, "results": named}, lines
