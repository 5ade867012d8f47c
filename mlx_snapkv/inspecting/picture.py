"""Inspections as one picture: layers by position, as bright as the share of heads that keep what is there."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..reporting.files import put_figure
from .inspection import Inspection

COLUMNS = 256  # parts of the prompt
TICKS = 16  # layers named, at most


def write_picture(inspections: Sequence[Inspection], model: str, path: Path) -> None:
    """A PNG with a map for each inspection, one below the other."""
    from matplotlib.figure import Figure

    heights = [0.9 + 0.22 * min(len(found.layers), 3 * TICKS) for found in inspections]
    figure = Figure(figsize=(8, sum(heights) + 0.4), layout="constrained")
    rows = figure.subplots(len(inspections), squeeze=False, height_ratios=heights)[:, 0]
    images = [_draw(axes, found) for axes, found in zip(rows, inspections, strict=True)]
    rows[0].set_title(f"{model}, {rows[0].get_title(loc='left')}", fontsize=8, loc="left")
    rows[-1].set_xlabel("position in the prompt (tokens)", fontsize=8)
    bar = figure.colorbar(images[-1], ax=list(rows), format="{x:.0%}")
    bar.set_label("heads that keep the entries", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    put_figure(path, figure, dpi=200)


def _draw(axes: Any, found: Inspection) -> Any:
    n_layers = len(found.layers)
    density = found.density(COLUMNS)
    image = axes.imshow(
        density,
        cmap="Blues",
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, found.n_tokens, n_layers - 0.5, -0.5),
    )
    shown = range(0, n_layers, -(-n_layers // TICKS))
    axes.set_yticks(shown, [f"layer {found.layers[i]}" for i in shown], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(textwrap.fill(f"{found.policy}: {found.report}", 110), fontsize=8, loc="left")
    shares = found.shares
    if any(share is not None for share in shares):
        right = axes.secondary_yaxis("right")
        right.set_yticks(
            shown, ["" if shares[i] is None else f"{shares[i]:.0%}" for i in shown], fontsize=7
        )
        right.set_ylabel("of the votes", fontsize=7)
        right.tick_params(length=0)
    return image
