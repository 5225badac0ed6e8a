#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print codec_tq_codebook.h: the levels and thresholds of the tq codec.

    codec/codebooks.py            print the header
    codec/codebooks.py --check F  fail if F is something else
    codec/codebooks.py --table    print distortions, for docs/block-format.md

Lloyd-Max levels of the unit Gaussian, the limit of the coordinates of a rotated vector, by fixed
point: a level is the mean of its cell, a threshold the middle between levels. Both are then brought
to integers: levels in some unit, at most 127, so that sums of 16 are exact in fp16, levels are
exact in bf16 and sums of 256 are exact in fp32; thresholds in some other unit, at most 127, so that
what is compared with them has 8 bits. Each unit is searched for the least distortion.
"""
import argparse
import math
import struct
import sys

WIDTHS = (1, 2, 3, 4)
MOST = 127
BIAS = 128
STEPS = 20000


def density(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def cells(thresholds):
    """(probability, first moment) of each cell of the positive half."""
    edges = [0.0] + thresholds + [40.0]
    return [(below(b) - below(a), density(a) - density(b)) for a, b in zip(edges, edges[1:])]


def means(thresholds):
    return [moment / probability for probability, moment in cells(thresholds)]


def distortion(levels, thresholds):
    total = 1.0
    for level, (probability, moment) in zip(levels, cells(thresholds)):
        total += 2 * (level * level * probability - 2 * level * moment)
    return total


def middles(levels):
    return [(a + b) / 2 for a, b in zip(levels, levels[1:])]


def lloyd_max(width):
    n = 1 << (width - 1)
    levels = [(i + 0.5) * 3 / n for i in range(n)]
    for _ in range(100000):
        better = means(middles(levels))
        change = max(abs(a - b) for a, b in zip(levels, better))
        levels = better
        if change < 1e-13:
            return levels
    raise RuntimeError("the levels do not settle")


def search(largest, cost):
    """The unit, as fp32, that costs least of those with which the largest number is 51 to 127."""
    best = None
    for i in range(STEPS):
        unit = float32(largest / (MOST + 0.49) * (1 + 1.5 * i / STEPS))
        if round(largest / unit) <= MOST:
            found = (cost(unit), unit)
            best = found if best is None or found < best else best
    return best[1]


def codebook(width):
    """Levels and thresholds as integers, and the units of both."""
    best = lloyd_max(width)
    if width == 1:
        return [1], [], float32(best[0]), float32(1 / 64)
    wanted = middles(best)
    step = search(wanted[-1], lambda u: distortion(means([round(t / u) * u for t in wanted]),
                                                   [round(t / u) * u for t in wanted]))
    thresholds = [round(t / step) for t in wanted]
    wanted = [t * step for t in thresholds]
    exact = means(wanted)
    unit = search(exact[-1], lambda u: distortion([round(c / u) * u for c in exact], wanted))
    return [round(c / unit) for c in exact], thresholds, unit, step


def float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def c_float(x):
    """A C literal of this fp32 number."""
    mantissa, exponent = math.frexp(x)
    return f"0x{int(mantissa * (1 << 24)):x}p{exponent - 24}f"


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


HEAD = """/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_tq_codebook.h: levels and thresholds of tq. Printed by codebooks.py, which says how they
 * come about; a test compares. Read by C and by CUDA.
 *
 * Levels by code, plus 128, in units; thresholds above 0, in steps; the other half mirrors them.
 * Units and steps are shares of the standard deviation. CRC: CRC-32C over the levels, a byte each,
 * and the unit, fp32.
 */
#ifndef KVF_CODEC_CODEC_TQ_CODEBOOK_H
#define KVF_CODEC_CODEC_TQ_CODEBOOK_H
"""


def header():
    lines = [HEAD]
    for width in WIDTHS:
        levels, thresholds, unit, step = codebook(width)
        by_code = [BIAS - level for level in reversed(levels)] + [BIAS + level for level in levels]
        crc = crc32c(bytes(by_code) + struct.pack("<f", unit))
        lines += [f"#define KVF_TQ_LEVELS_{width} {', '.join(map(str, by_code))}", ""]
        rows = []
        if thresholds:
            rows.append(("THRESHOLDS", ", ".join(map(str, thresholds))))
        rows += [("UNIT", c_float(unit)), ("STEP", c_float(step)), ("CRC", f"0x{crc:08x}U")]
        names = [f"#define KVF_TQ_{name}_{width}" for name, _ in rows]
        most = max(map(len, names))
        lines += [f"{name:{most}} {value}" for name, (_, value) in zip(names, rows)] + [""]
    return "\n".join(lines + ["#endif /* KVF_CODEC_CODEC_TQ_CODEBOOK_H */", ""])


def table():
    for width in WIDTHS:
        levels, thresholds, unit, step = codebook(width)
        best = lloyd_max(width)
        ideal = distortion(best, middles(best))
        ours = distortion([c * unit for c in levels], [t * step for t in thresholds])
        print(f"| {width} | {ideal:.6f} | {ours:.6f} | {math.sqrt(1 - ideal):.5f} | "
              f"{', '.join(map(str, levels))} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", metavar="FILE")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        table()
    elif arguments.check:
        with open(arguments.check, encoding="utf-8") as file:
            if file.read() != header():
                sys.exit(f"{arguments.check} is not what codebooks.py prints")
    else:
        sys.stdout.write(header())


if __name__ == "__main__":
    main()
