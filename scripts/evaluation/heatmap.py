"""Accuracy by prompt length and depth, one picture a method and setting."""

import itertools
import math
import re
import textwrap
from pathlib import Path
from statistics import fmean
from typing import Any

from mlx_snapkv.measure.environment import title
from mlx_snapkv.measure.files import put_figure

LONGEST = 200  # characters of a method in a file's name


def write_heatmaps(result: dict[str, Any], base: Path) -> list[Path]:
    """A `base`-<method>.png for each method and setting of an evaluation's records, in order; their paths."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in result["records"]:
        groups.setdefault((record["method"], record["setting"]), []).append(record)
    paths = [base.with_name(base.name + ending(*group)) for group in groups]
    for path, ((method, setting), own) in zip(paths, groups.items()):
        what = f"{textwrap.fill(method, 60)}\nQuestion {setting}, {len(own)} answers"
        _plot(own, title(what, result), path)
    return paths


def ending(method: str, setting: str) -> str:
    """What follows the base in the name of a method's file."""
    slug = re.sub(r"[^\w.=]+", "-", method.replace("%", "pct")).strip("-")[:LONGEST]
    return f"-{slug}-{setting}.png"


def accuracies(records: list[dict[str, Any]]) -> tuple[list[int], list[float], list[list[float]]]:
    """Lengths, depths, and the mean score by depth, then length, of one method's records.

    NaN where a prompt was not compressed: the answers there are the full cache's.
    """
    right: dict[tuple[float, int], list[float]] = {}
    for r in records:
        mark = r["score"] if r["reason"] is None else math.nan
        right.setdefault((r["depth"], r["length"]), []).append(mark)
    depths, lengths = (sorted(set(places)) for places in zip(*right))
    return lengths, depths, [[fmean(right[d, length]) for length in lengths] for d in depths]


def _plot(records: list[dict[str, Any]], heading: str, path: Path) -> None:
    from matplotlib.figure import Figure

    lengths, depths, grid = accuracies(records)
    size = (max(4.5, 1.5 + 0.8 * len(lengths)), max(2.5, 1.2 + 0.4 * len(depths)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    # Pale enough for black figures.
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto", alpha=0.6)
    for y, x in itertools.product(range(len(depths)), range(len(lengths))):
        text = "not compressed" if math.isnan(grid[y][x]) else f"{grid[y][x]:.2f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("depth")
    axes.set_title(heading, fontsize=8, loc="left")
    figure.colorbar(image, label="right answers")
    put_figure(path, figure)
