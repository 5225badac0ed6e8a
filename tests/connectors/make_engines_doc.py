#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put tables of tests/connectors/results into docs/engines.md.

    make_engines_doc.py [--check]

A table stands between `<!-- made of FILE.json: make_engines_doc.py -->` and `<!-- made ends -->`.
Which one it is follows from what the file has: times to the first token (ttft_median), or profiles
over one prompt (profiles). With --check nothing is written: exit code 1 says that one is stale.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "connectors" / "results"
PAGE = ROOT / "docs" / "engines.md"
PLACE = re.compile(r"(<!-- made of ([\w.-]+\.json): make_engines_doc\.py -->\n)(.*?)"
                   r"(<!-- made ends -->)", re.DOTALL)


class Unusable(Exception):
    """A result or a page that no table can be made of."""


def table(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]) + "\n"


def seconds(value):
    return f"{value:.2g} s" if value < 10 else f"{value:.1f} s"


def ttft(result):
    """Times to the first token by length of the prompt, and how they were taken."""
    rows = result["ttft_median"]["rows"]
    lengths = [f"{row['prompt_tokens']:,}" for row in rows]
    slow = "recompute_and_store_s" if "recompute_and_store_s" in rows[0] else "recompute_s"
    made = table([["time to the first token, prompt of", *lengths[:-1], lengths[-1] + " tokens"],
                  ["prefix fetched", *(seconds(row["hit_s"]) for row in rows)],
                  ["computed" + (", and stored" if slow != "recompute_s" else ""),
                   *(seconds(row[slow]) for row in rows)]])
    threads, load = result["threads"], result["load_average"]
    on = f" on {result['cpus']} CPUs" if "cpus" in result else ""
    said = (f"Medians of {result['ttft_median']['rounds']}, in turns, with "
            f"{threads} thread{'s' * (threads != 1)}{on}; load of the machine {load:g}")
    # one more than we use ourselves: the daemon, the script
    busy = load > threads + 1
    return (f"{made}\n{said}" + (": other work ran beside it, so they tell the order, not the "
                                 "size.\n" if busy else ".\n"))


def profiles(result):
    """What profiles make of one prompt."""
    rows = result["profiles"]
    return table([[f"{rows[0]['hit_tokens']} tokens of a prompt fetched, stored as",
                   *(f"`{row['profile']}`" for row in rows)],
                  ["bytes a token in the daemon's memory",
                   *(f"{row['bytes_a_token']:,}" for row in rows)],
                  [f"of {rows[0]['tokens']} tokens the first so many are those without loss",
                   *(str(row["leading_tokens_the_same"]) for row in rows)],
                  ["gap of the first token's logprob",
                   *(f"{row['first_logprob_gap']:.2g}" for row in rows)]])


KINDS = {"ttft_median": ttft, "profiles": profiles}


def make(name):
    """The table of a result."""
    try:
        result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        kind, = (kind for kind in KINDS if kind in result)
        return KINDS[kind](result)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Unusable(f"{name}: no table can be made of it: {error!r}") from error


def main(arguments):
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    old = PAGE.read_text(encoding="utf-8")
    try:
        if PLACE.search(old) is None:
            raise Unusable(f"{PAGE.relative_to(ROOT)} has no place for a table")
        new = PLACE.sub(lambda place: place[1] + make(place[2]) + place[4], old)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    if not arguments:
        PAGE.write_text(new, encoding="utf-8")
    elif new != old:
        print("docs/engines.md is stale: run tests/connectors/make_engines_doc.py",
              file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
