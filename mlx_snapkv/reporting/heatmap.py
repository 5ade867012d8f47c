"""Accuracy by prompt length and depth, one picture a method and setting."""

import math
import re
import textwrap
from pathlib import Path
from typing import Any

from .files import put_figure
from .setting import title

LONGEST = 200  # characters of a method in a file's name


def write_heatmaps(result: dict[str, Any], base: Path) -> list[Path]:
    """A `base`-<method>.png for each method and setting of an evaluation's records, in order; their paths."""
    paths = []
    records = result["records"]
    for method, setting in dict.fromkeys((r["method"], r["setting"]) for r in records):
        paths.append(base.with_name(base.name + ending(method, setting)))
        own = [r for r in records if (r["method"], r["setting"]) == (method, setting)]
        what = f"{textwrap.fill(method, 60)}\nQuestion {setting}, {len(own)} answers"
        _plot(own, title(what, result), paths[-1])
    return paths


def ending(method: str, setting: str) -> str:
    """What follows the base in the name of a method's file."""
    slug = re.sub(r"[^\w.=]+", "-", method.replace("%", "pct")).strip("-")[:LONGEST]
    return f"-{slug}-{setting}.png"


def accuracies(records: list[dict[str, Any]]) -> tuple[list[int], list[float], list[list[float]]]:
    """Lengths, depths, and the mean score by depth, then length, of one method's records.

    NaN where a prompt was not compressed: the answers there are the full cache's.
    """
    lengths = sorted({r["length"] for r in records})
    depths = sorted({r["depth"] for r in records})
    right: dict[tuple[float, int], list[float]] = {}
    for r in records:
        mark = r["score"] if r["reason"] is None else math.nan
        right.setdefault((r["depth"], r["length"]), []).append(mark)
    shares = {cell: sum(marks) / len(marks) for cell, marks in right.items()}
    return lengths, depths, [[shares[depth, length] for length in lengths] for depth in depths]


def _plot(records: list[dict[str, Any]], heading: str, path: Path) -> None:
    from matplotlib.figure import Figure

    lengths, depths, grid = accuracies(records)
    size = (max(4.5, 1.5 + 0.8 * len(lengths)), max(2.5, 1.2 + 0.4 * len(depths)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(grid):
        for x, share in enumerate(row):
            text = "not compressed" if math.isnan(share) else f"{share:.2f}"
            color = "black" if math.isnan(share) else readable_on(image.cmap(share))
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("depth")
    axes.set_title(heading, fontsize=8, loc="left")
    figure.colorbar(image, label="right answers")
    put_figure(path, figure)


def readable_on(color: tuple[float, ...]) -> str:
    """Black on light colours, white on dark ones, by their relative luminance."""
    red, green, blue, _ = color
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
