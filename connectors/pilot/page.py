# SPDX-License-Identifier: Apache-2.0
"""The statistics of a pilot's runs, and the page that shows them.

Each run gives one figure of a kind; arms are compared within a repeat, which has run all of them.
The ratio is the median over the repeats, with a bootstrap 95 % interval; of fewer than four repeats
there is none that means anything, and none is given."""
import random
import statistics

RESAMPLES = 4000
SEED = 1
REPEATS_MIN = 4
KINDS = (("warm_first_p50_s", "TTFT, warm, median", 1000, "ms"),
         ("warm_first_p99_s", "TTFT, warm, 99 of 100", 1000, "ms"),
         ("cold_first_p50_s", "TTFT, cold, median", 1000, "ms"),
         ("cold_between_p50_s", "between tokens, cold, median", 1000, "ms"),
         ("warm_tokens_a_s", "prompt tokens a second, warm", 1, ""))


def quantile(values, share):
    """Of sorted values, the one below which so many lie."""
    values = sorted(values)
    return values[min(int(share * len(values)), len(values) - 1)]


def figures(measured, options):
    """One number of each kind from a run."""
    cold, warm = measured["rounds"][0], measured["rounds"][1:]
    firsts = [row["first_s"] for part in warm for row in part["requests"]]
    between = [value for row in cold["requests"] for value in row["between_s"]]
    tokens = options["document_tokens"] + options["question_tokens"]
    queried = sum(part["queried_tokens"] for part in warm)
    return {"warm_first_p50_s": statistics.median(firsts),
            "warm_first_p99_s": quantile(firsts, 0.99),
            "cold_first_p50_s": statistics.median(row["first_s"] for row in cold["requests"]),
            "cold_between_p50_s": statistics.median(between) if between else None,
            "warm_tokens_a_s": len(firsts) * tokens / sum(part["seconds"] for part in warm),
            "gpu_hits": sum(p["gpu_hit_tokens"] for p in warm) / queried if queried else None,
            "external_hits": (sum(p["external_hit_tokens"] for p in warm) / queried
                              if queried else None)}


def interval(values):
    """Bootstrap 95 % interval of the median, from a fixed seed; None: too few values."""
    if len(values) < REPEATS_MIN:
        return None
    generator = random.Random(SEED)
    medians = sorted(statistics.median(generator.choices(values, k=len(values)))
                     for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def compared(runs, arm, base, kind):
    """(median ratio, interval or None, pairs) of an arm to another one, within repeats; None."""
    by_repeat = {(run["arm"], run["repeat"]): run["figures"][kind] for run in runs
                 if run["figures"][kind]}
    ratios = [value / by_repeat[base, repeat] for (name, repeat), value in by_repeat.items()
              if name == arm and (base, repeat) in by_repeat]
    if not ratios:
        return None
    return statistics.median(ratios), interval(ratios), len(ratios)


def same_answers(runs, arm, base):
    """Of the warm requests of both in a repeat, the share with the same text; None: none."""
    answers = {}
    for run in runs:
        for part in run["measured"]["rounds"][1:]:
            for row in part["requests"]:
                answers[run["arm"], run["repeat"], row["round"], row["document"]] = row["answer"]
    pairs = [(answer, answers.get((base, *where))) for (name, *where), answer in answers.items()
             if name == arm and (base, *where) in answers]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def number(value):
    return "" if value is None else f"{value:.3g}"


def ratio_text(found):
    if found is None:
        return ""
    ratio, ends, pairs = found
    between = f"{ends[0]:.3g}..{ends[1]:.3g}" if ends else f"{pairs} pairs, no interval"
    return f"{ratio:.3g} ({between})"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def kind_rows(runs, arms, kind, scale):
    for arm in arms:
        values = [run["figures"][kind] for run in runs
                  if run["arm"] == arm and run["figures"][kind] is not None]
        median = statistics.median(values) * scale if values else None
        yield (arm, number(median), *(ratio_text(compared(runs, arm, base, kind))
                                      if base != arm else "" for base in ("none", "native")))


def hit_rows(runs, arms):
    for arm in arms:
        mine = [run for run in runs if run["arm"] == arm]
        row = [arm]
        for kind in ("gpu_hits", "external_hits"):
            values = [run["figures"][kind] for run in mine if run["figures"][kind] is not None]
            row.append(number(statistics.median(values)) if values else "")
        peaks = [run["measured"]["store_peak_bytes"] for run in mine
                 if run["measured"]["store_peak_bytes"]]
        row.append(f"{max(peaks) / (1 << 30):.3g}" if peaks else "")
        row.append("" if arm == "none" else number(same_answers(runs, arm, "none")))
        yield row


def machine_text(machine):
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items()
                         if version)
    gpus = "; ".join(machine["gpus"]) or "NO GPU: these figures mean nothing"
    return (f"{gpus}. {machine['cpu']}, {machine['cores']} CPUs, "
            f"{machine['memory_free_bytes'] >> 30} GiB free, Linux {machine['kernel']}, Python "
            f"{machine['python']}, {versions}. {machine['date']}.")


def text(report):
    """The page."""
    options = report["options"]
    runs = [{**run, "figures": figures(run["measured"], options)} for run in report["runs"]
            if "measured" in run]
    failed = [run for run in report["runs"] if "failed" in run]
    arms = [arm for arm in options["arms"] if any(run["arm"] == arm for run in runs)]
    lines = ["# kvferry pilot", "", machine_text(report["machine"]), "",
             f"Model {options['model']}; {options['documents']} documents of "
             f"{options['document_tokens']} tokens, {options['rounds']} warm rounds, "
             f"{options['concurrency']} requests at a time, {options['host_bytes'] >> 20} MiB of "
             f"host memory an arm, {options['repeats']} repeats, seed {options['seed']}; vLLM's "
             f"arguments: {' '.join(options['of_vllm']) or 'none'}.", "",
             "Ratios are medians over repeats, with bootstrap 95 % intervals. Balanced is lossy "
             "and not calibrated for this model here: its speed is shown, not its quality.", ""]
    for kind, title, scale, unit in KINDS:
        lines += [f"## {title}", ""]
        lines += table(("arm", unit or "value", "to none", "to native"),
                       kind_rows(runs, arms, kind, scale))
    lines += ["## Hits of warm prompts, memory, answers", ""]
    lines += table(("arm", "hit in the GPU", "hit outside", "store's peak GiB",
                    "same text as none"), hit_rows(runs, arms))
    lines += ["Text may differ without an error: other batches and shapes give other sums.", ""]
    idle = [arm for arm in arms if arm != "none" and not any(
        run["figures"]["external_hits"] for run in runs if run["arm"] == arm)]
    lines += [f"{arm} has hit nothing outside the GPU: its figures are those of an engine without "
              "it. Either the documents fit into the GPU's KV cache, or vllm.log in the folders of "
              "its runs says why.\n" for arm in idle]
    lines += ["## Runs that failed", ""] if failed else ["No run failed.", ""]
    for run in failed:
        lines += [f"- repeat {run['repeat']}, {run['arm']}: {run['failed'].splitlines()[0]}"]
    return "\n".join(lines) + "\n"
