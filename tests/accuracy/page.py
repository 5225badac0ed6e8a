# SPDX-License-Identifier: Apache-2.0
"""Results of tests/bench/run accuracy, of several runs, as Markdown and plots. Standard library
only."""

from __future__ import annotations

import re

import plot
from command import BEFORE_ROPE, COMPARATOR, NOT_EVIDENCE, PAGES, REFERENCE
from codec import ITEM_BYTES

BITS = 8 * ITEM_BYTES  # of a value of bf16
TABLE_HEAD = (
    "| profile | bits a value | with record page | delta NLL | 95 % | KL | top-1 changed |",
    "|---|---:|---:|---:|---:|---:|---:|")


def is_row(result: dict) -> bool:
    """Of a model and a setting, not a figure with a name of its own."""
    return "/" in result["name"]


def windows_of(result: dict) -> tuple[int, int]:
    """(places of the text that count, windows): those that begin at several tokens of a place are
    alike, so that more places tell more than more windows."""
    places = re.search(r"\b(\d+) windows of", result["note"])
    return int(places[1]) if places else result["pairs"], result["pairs"]


def windows_text(result: dict) -> str:
    places, windows = windows_of(result)
    starts = f", each from {windows // places} starts" if windows > places else ""
    return f"{places} windows{starts}"


def by_date(reports: list[dict]) -> list[dict]:
    return sorted(reports, key=lambda report: report["date"])


def figures(reports: list[dict]) -> dict[str, dict]:
    """Of each named figure the result with the most windows, the newest of such; those that were
    skipped everywhere are left out."""
    found: dict[str, dict] = {}
    for report in by_date(reports):
        for result in report["results"]:
            if is_row(result) or "skipped" in result:
                continue
            known = found.get(result["name"])
            if known is None or windows_of(result) >= windows_of(known):
                found[result["name"]] = result
    return found


def models_of(reports: list[dict]) -> dict[str, tuple[dict, list[dict]]]:
    """For each model the report that has the most settings of it, of such the one on the most
    windows, of such the newest, and its rows."""
    found: dict[str, tuple[dict, list[dict]]] = {}
    rank: dict[str, tuple[int, tuple[int, int]]] = {}
    for report in by_date(reports):
        rows: dict[str, dict[str, dict]] = {}
        for result in report["results"]:
            if is_row(result) and "skipped" not in result:
                rows.setdefault(result["model"], {})[result["profile"]] = result
        for model, of_model in rows.items():
            ours = (len(of_model), max(windows_of(row) for row in of_model.values()))
            if ours >= rank.get(model, ours):
                found[model] = (report, list(of_model.values()))
                rank[model] = ours
    return dict(sorted(found.items()))


def betters(one: dict, other: dict) -> bool:
    """No larger, and no worse by NLL and by KL, and not the same in all."""
    ours = [one[key] for key in ("payload", "value", "kl")]
    theirs = [other[key] for key in ("payload", "value", "kl")]
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs))


def others_of(reports: list[dict], model: str, shown: list[dict]) -> list[tuple[dict, list[dict]]]:
    """Reports with settings of a model that are not shown, those on the most windows first, of such
    the newest, and their rows."""
    seen = {row["profile"] for row in shown}
    found = []

    def rows_of(report: dict) -> list[dict]:
        return [result for result in report["results"]
                if is_row(result) and "skipped" not in result and result["model"] == model]

    for report in sorted(reversed(by_date(reports)), reverse=True,
                         key=lambda one: max(map(windows_of, rows_of(one)), default=(0, 0))):
        rows = [row for row in rows_of(report) if row["profile"] not in seen]
        seen |= {row["profile"] for row in rows}
        if rows:
            found.append((report, rows))
    return found


def input_of(row: dict) -> str:
    """What is coded: only profiles that get the same compete. X and its latents take an engine that
    hands them over, and weights; K before RoPE one that has it."""
    name = row["profile"]
    return "X" if name.startswith("x") else BEFORE_ROPE if name.endswith(BEFORE_ROPE) else "KV"


def dominated(models: dict[str, tuple[dict, list[dict]]]) -> dict[str, list[str]]:
    """Of each profile that in every model where it was measured is bettered by another one of ours:
    by which ones, the best of each model."""
    places: dict[str, list[str | None]] = {}
    for _, rows in models.values():
        ours = [row for row in rows if row["kind"] not in (COMPARATOR, REFERENCE) and
                row["profile"] != PAGES]
        for row in ours:
            better = [other for other in ours
                      if input_of(other) == input_of(row) and betters(other, row)]
            best = min(better, key=lambda other: (other["kl"], other["payload"]), default=None)
            places.setdefault(row["profile"], []).append(best and best["profile"])
    return {profile: sorted(set(by)) for profile, by in sorted(places.items()) if all(by)}


def row_line(row: dict) -> str:
    low, high = row["ci"]
    label = f"`{row['profile']}`" + (f" ({row['kind']})" if row["kind"] != "profile" else "")
    return (f"| {label} | {BITS * row['payload']:.3f} | {BITS * row['block']:.3f} | "
            f"{row['value']:.4f} | {low:.4f}..{high:.4f} | {row['kl']:.2g} | {row['flips']:.2%} |")


def text_table(rows: list[dict]) -> list[str]:
    """Delta NLL by text, of the settings with a figure or a name that people choose."""
    texts = list(rows[0]["groups"])
    chosen = [row for row in rows if row["profile"] in
              ("safe", "balanced", "saw3-search", "tq3", "tq2-centred", "kivi4-g32") or
              row["kind"] == "calibrated"]
    if len(texts) < 2 or not chosen:
        return []
    return ["", "| delta NLL by text | " + " | ".join(texts) + " |",
            "|---|" + "---:|" * len(texts),
            *(f"| `{row['profile']}` | " +
              " | ".join(f"{row['groups'][text]:.4f}" for text in texts) + " |" for row in chosen)]


def model_lines(model: str, report: dict, rows: list[dict], machine_text) -> list[str]:
    first = rows[0]
    small = f", {NOT_EVIDENCE}" if NOT_EVIDENCE in first["note"] else ""
    rows = sorted(rows, key=lambda row: (-row["payload"], row["profile"]))
    return [f"### {model}", "",
            f"{windows_text(first)} ({first['order']}), {first['tokens']} tokens scored, base "
            f"{first['base_nll']:.4f} nats a token, computed by {first['maths']}{small}.", "",
            f"![delta NLL and KL of {model}]({plot_name(model)})", "",
            machine_text(report), "", *TABLE_HEAD, *map(row_line, rows), *text_table(rows), ""]


def other_lines(report: dict, rows: list[dict], machine_text) -> list[str]:
    first = rows[0]
    return [f"On {windows_text(first)} ({first['order']}), base {first['base_nll']:.4f}, by "
            f"{first['maths']}: {machine_text(report)}", "", *TABLE_HEAD, *map(row_line, rows), ""]


def dominated_lines(models: dict[str, tuple[dict, list[dict]]]) -> list[str]:
    found = dominated(models)
    if not found:
        return []
    lines = ["### What another one betters everywhere", "",
             "On every model above where it was measured, another profile that is given the same "
             "(K and V, K before RoPE, or X) takes no more bytes and loses no more by NLL and by "
             "KL; named is the one with the least KL.", "",
             "| profile | bettered by |", "|---|---|"]
    lines += [f"| `{profile}` | {', '.join(f'`{name}`' for name in by)} |"
              for profile, by in found.items()]
    return [*lines, ""]


def text(reports: list[dict], machine_text, figure_lines=lambda results: []) -> str:
    """The section. machine_text(report) and figure_lines(results) are the page's."""
    models = models_of(reports)
    lines = list(figure_lines(list(figures(reports).values())))
    for model, (report, rows) in models.items():
        lines += model_lines(model, report, rows, machine_text)
        for other, more in others_of(reports, model, rows):
            lines += other_lines(other, more, machine_text)
    return "\n".join([*lines, *dominated_lines(models)])


# --- plots ---------------------------------------------------------------------------------------

def plot_name(model: str) -> str:
    return f"accuracy-{model}.svg"


def family(row: dict) -> str:
    """What is drawn alike."""
    name = row["profile"]
    if row["kind"] == COMPARATOR:
        return "comparators"
    if row["kind"] == REFERENCE:
        return "reference of X, as published" if name.endswith("-paper") else "reference of X"
    if name.endswith(BEFORE_ROPE):
        return "K before RoPE"
    if name.startswith("x"):
        return "X, as published" if name.endswith("-paper") else "X"
    if row["kind"] == "calibrated":
        return "calibrated"
    if name.endswith(("-paper", "-qjl", "-unbiased")):
        return f"{name[:name.index('-')].rstrip('.0123456789')}, as published"
    for start in ("naive", "kivi", "tq"):
        if name.startswith(start):
            return start
    return "saw and profiles"


def plots(reports: list[dict]) -> dict[str, str]:
    """SVG by name of file: for each model delta NLL and KL by bits. What loses nothing is left out,
    the axes being logarithmic."""
    made = {}
    for model, (_, rows) in models_of(reports).items():
        panels = []
        for title, key in (("delta NLL, nats a token", "value"), ("KL, nats a token", "kl")):
            points = [plot.Point(family(row), row["profile"], BITS * row["payload"], row[key])
                      for row in rows if row["profile"] != PAGES and row[key] > 0 and
                      row["payload"] < 0.6]
            panels.append((title, points))
        if all(points for _, points in panels):
            made[plot_name(model)] = plot.svg(f"{model}: what is lost by bits a value", panels)
    return made
