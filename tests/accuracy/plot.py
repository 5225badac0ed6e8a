# SPDX-License-Identifier: Apache-2.0
"""Scatter plots as SVG: bits a value across, a loss upwards on a logarithmic axis. Same points,
same bytes. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL_WIDTH, PANEL_HEIGHT = 420, 360
LEFT, TOP, GAP = 60, 50, 80
LEGEND_LINE, LEGEND_COLUMNS = 22, 4
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666", "#e69f00", "#56b4e9", "#000000")
SHAPES = ("circle", "square", "up", "down", "diamond", "cross", "circle", "square")


@dataclass(frozen=True)
class Point:
    family: str
    name: str
    bits: float
    loss: float


class Axes:
    """Where values are in a panel."""

    def __init__(self, points: list[Point], left: float) -> None:
        self.left = left
        self.bits = (math.floor(min(p.bits for p in points)),
                     math.ceil(max(p.bits for p in points) + 1e-9))
        self.decades = (math.floor(math.log10(min(p.loss for p in points))),
                        math.ceil(math.log10(max(p.loss for p in points)) + 1e-9))

    def x(self, bits: float) -> float:
        low, high = self.bits
        return self.left + (bits - low) / (high - low) * PANEL_WIDTH

    def y(self, loss: float) -> float:
        low, high = self.decades
        return TOP + (high - math.log10(loss)) / (high - low) * PANEL_HEIGHT


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" fill="none"/>'


def label(x: float, y: float, text: str, anchor: str = "middle", size: int = 11) -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(text)}</text>")


def mark(shape: str, x: float, y: float, colour: str, title: str = "") -> str:
    r = 4
    paths = {
        "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        "up": f"M{x:.1f} {y - r:.1f}l{r} {2 * r}h{-2 * r}z",
        "down": f"M{x:.1f} {y + r:.1f}l{r} {-2 * r}h{-2 * r}z",
        "diamond": f"M{x:.1f} {y - r:.1f}l{r} {r}l{-r} {r}l{-r} {-r}z",
        "cross": f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}",
        "circle": f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
    }
    named = f"<title>{escape(title)}</title>" if title else ""
    return (f'<path d="{paths[shape]}" stroke="{colour}" fill="{colour}" fill-opacity="0.35">'
            f"{named}</path>")


def frame(axes: Axes, title: str) -> list[str]:
    right, bottom = axes.left + PANEL_WIDTH, TOP + PANEL_HEIGHT
    parts = [label(axes.left + PANEL_WIDTH / 2, TOP - 12, title, size=13)]
    for bits in range(axes.bits[0], axes.bits[1] + 1):
        x = axes.x(bits)
        parts += [line(x, TOP, x, bottom, "#dddddd"), label(x, bottom + 16, str(bits))]
    for decade in range(axes.decades[0], axes.decades[1] + 1):
        y = axes.y(10.0**decade)
        parts += [line(axes.left, y, right, y, "#dddddd"),
                  label(axes.left - 6, y + 4, f"{10.0**decade:g}", "end")]
    parts += [line(axes.left, TOP, axes.left, bottom, "#333333"),
              line(axes.left, bottom, right, bottom, "#333333"),
              label(axes.left + PANEL_WIDTH / 2, bottom + 34, "bits a value")]
    return parts


def svg(title: str, panels: list[tuple[str, list[Point]]]) -> str:
    """Panels side by side, one legend. Every mark says its name and values when pointed at."""
    families = sorted({point.family for _, points in panels for point in points})
    style = {name: (SHAPES[(i + i // len(COLOURS)) % len(SHAPES)], COLOURS[i % len(COLOURS)])
             for i, name in enumerate(families)}
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP)
    legend_lines = math.ceil(len(families) / LEGEND_COLUMNS)
    height = TOP + PANEL_HEIGHT + 56 + LEGEND_LINE * legend_lines
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             f'font-family="sans-serif">',
             f'<rect width="{width}" height="{height}" fill="white"/>',
             label(width / 2, 20, title, size=15)]
    for i, (name, points) in enumerate(panels):
        axes = Axes(points, LEFT + i * (PANEL_WIDTH + GAP))
        parts += frame(axes, name)
        for point in sorted(points, key=lambda point: (point.family, point.name)):
            shape, colour = style[point.family]
            parts.append(mark(shape, axes.x(point.bits), axes.y(point.loss), colour,
                              f"{point.name}: {point.bits:.3f} bits, {point.loss:.2g}"))
    for i, name in enumerate(families):
        x = LEFT + (i % LEGEND_COLUMNS) * (width - LEFT) / LEGEND_COLUMNS
        y = TOP + PANEL_HEIGHT + 60 + LEGEND_LINE * (i // LEGEND_COLUMNS)
        parts += [mark(style[name][0], x, y, style[name][1]), label(x + 10, y + 4, name, "start")]
    return "\n".join([*parts, "</svg>", ""])
