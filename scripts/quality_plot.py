"""docs/quality.png: scores by budget, a curve a policy, the question known and the question later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quality_ways import controls

from mlx_snapkv.evals.answering import FULL, KNOWN, LATER
from mlx_snapkv.reporting.ownership import PNG_METADATA

COLORS = ("#dd4b45", "#0b2a6b", "#5a9bd4", "#e39b3b", "#3d8b5f", "#8a5fb0", "#7a5c44")
COLORS += ("#d169a8", "#222222", "#8fb339", "#16a3a3", "#b8860b", "#a00040")
MARKERS = "osDv^P*XdphH<"
APART = 0.012  # of curves at one budget, as a factor
Styles = dict[str, tuple[str, str]]  # color and mark of each line


def write_plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["part"] in (KNOWN, LATER)]
    others = {line.name for line in controls(1)}
    names = dict.fromkeys(r["line"] for r in rows if r["line"] not in {FULL, *others})
    styles = dict(zip(names, zip(COLORS * 2, MARKERS * 2)))
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    for axes, setting in zip(figure.subplots(1, 2, sharey=True), (KNOWN, LATER)):
        panel(axes, setting, [row for row in rows if row["part"] == setting], styles)
    about = f"demo-tasks, {result['length']:,} tokens, 95% intervals of the difference to the full cache"
    figure.suptitle(f"Right answers by budget; {about}", fontsize=10)
    figure.savefig(path, dpi=110, metadata=PNG_METADATA)


def panel(axes: Any, setting: str, rows: list[dict[str, Any]], styles: Styles) -> None:
    """A curve for each line that has a style, and dots for the rest."""
    full = next(row["score"] for row in rows if row["line"] == FULL)
    axes.axhline(full, color="0.4", ls=":", lw=1, label=FULL)
    names = dict.fromkeys(row["line"] for row in rows if row["line"] in styles)
    for i, name in enumerate(names):
        own, (color, marker) = [row for row in rows if row["line"] == name], styles[name]
        places = [row["share"] * (1 + APART * (i - len(names) / 2)) for row in own]
        ends = [[full + row["difference"][end] for row in own] for end in ("low", "high")]
        axes.vlines(places, *ends, color=color, lw=1, alpha=0.45)
        scores = [row["score"] for row in own]
        axes.plot(places, scores, color=color, marker=marker, ms=5, lw=1.6, label=name)
    rest = [row for row in rows if row["line"] not in {FULL, *names}]
    if rest:
        dots = [[row[key] for row in rest] for key in ("share", "score")]
        axes.plot(*dots, "x", color="0.5", ms=5, label="the other policies")
    shares = sorted({row["share"] for row in rows if row["line"] != FULL})
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [f"1/{share}" for share in shares])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("entries kept")
    axes.set_title(f"question {setting}", fontsize=10)
    axes.grid(axis="y", color="0.92")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
