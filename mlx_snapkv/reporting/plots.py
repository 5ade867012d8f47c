"""The plots of a result: speed and memory against context length, and against how many requests there are."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.report import format_bytes
from ..errors import SnapKVError
from ..whole_files import put_figure
from .ownership import PNG_METADATA
from .setting import title


@dataclass(frozen=True)
class Line:
    """How the line of a contender looks: those that may lie on each other differ in width, dashes and marks."""

    name: str
    color: str
    style: str = "-"
    marker: str = "o"
    width: float = 2


LINES = {
    "full cache": Line("full cache", "0.4"),
    "snapkv": Line("SnapKV", "#dd4b45", width=6),
    "rotating": Line("max-kv-size,\nas many entries", "black", "--", "x", 1.2),
    "kv-bits 8": Line("kv-bits 8", "#5a9bd4", marker="s", width=5),
    "kv-bits 4": Line("kv-bits 4", "#0b2a6b", "--", "d", 1.2),
    "small cache": Line("small cache", "#dd4b45", width=6),
    "unsure, 30% vote": Line("unsure,\n30% vote", "#0b2a6b", marker="s"),
    "all, 70% right": Line("all, 70% of the\ndrafts right", "#5a9bd4", "--", "d"),
    "book": Line("a book", "#dd4b45", width=4),
    "full cache, read": Line("full cache,\nreading", "0.4"),
    "full cache, question": Line("full cache,\na question", "0.4", "--", "d"),
    "book, read": Line("a book,\nreading", "#dd4b45", width=4),
    "book, question": Line("a book,\na question", "#0b2a6b", "--", "s", 1.2),
}
GAP = 0.075  # between two names beside the lines, as a part of the height of the plot

PLOTS = ("decoding", "memory", "verified", "peak", "seconds", "throughput")


def require_matplotlib() -> None:
    """Raises: SnapKVError: matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SnapKVError(
            "the plots need matplotlib: pip install 'mlx-snapkv[plots]', or leave --output out"
        ) from None


def write_plots(result: dict[str, Any], base: Path) -> list[Path]:
    """The plots of what was measured, as `base`-NAME.png each."""
    paths = []
    for name, figure in figures(result).items():
        paths.append(base.with_name(f"{base.name}-{name}.png"))
        put_figure(paths[-1], figure, dpi=120, metadata=PNG_METADATA)
    return paths


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """The same as matplotlib's figures, by name, of `PLOTS`."""
    decode, verified = result["decode"], result.get("verified", [])
    books = [r for r in result.get("book", []) if r["kind"] in ("book", "full")]
    steps = max((r["steps"] for r in decode + verified), default=0)
    speed = f"Decoded tokens/s, median of {steps} steps"
    plots = {
        "decoding": (decode, "tokens_per_second", speed, "{:,g}".format),
        "memory": (decode, "kv_bytes", "Memory of keys and values, one run", format_bytes),
        "verified": (
            verified,
            "tokens_per_second",
            f"Verified answers, tokens/s, mean of {steps} steps",
            "{:,g}".format,
        ),
        "peak": (books, "peak_bytes", "Peak memory of reading and asking, one run", format_bytes),
        "seconds": (
            _parts(books, ("read", "question")),
            "seconds",
            "Seconds to read once, and until the answer to a question",
            "{:,g} s".format,
        ),
    }
    drawn = {name: _figure(result, *plot) for name, plot in plots.items() if plot[0]}
    batches = result.get("batches", [])
    if batches:
        longest = max(r["context"] for r in batches)
        what = f"Tokens/s of requests that decode together, after prompts of {longest:,} tokens"
        wanted = [r for r in batches if r["context"] == longest], "tokens_per_second", what
        drawn["throughput"] = _figure(
            result, *wanted, "{:,g}".format, across="batch", label="requests"
        )
    return drawn


def _parts(records: list[dict[str, Any]], parts: tuple[str, ...]) -> list[dict[str, Any]]:
    """A line for each part of every contender's seconds."""
    return [
        {
            "context": r["context"],
            "kind": f"{r['contender']}, {part}",
            "seconds": r[f"{part}_seconds"],
        }
        for r in records
        for part in parts
    ]


def _figure(
    result: dict[str, Any],
    records: list[dict[str, Any]],
    key: str,
    what: str,
    number: Callable[[float], str],
    across: str = "context",
    label: str = "context length (tokens)",
) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = []
    for line, points in _lines(records, key, across):
        axes.plot(
            *zip(*points),
            color=line.color,
            linestyle=line.style,
            linewidth=line.width,
            marker=line.marker,
            markersize=max(6, 2 * line.width),
        )
        ends.append((points[-1][1], line))
    _name_lines(axes, ends)
    places = sorted({r[across] for r in records})
    axes.set_xticks(places, [f"{place:,}" for place in places], rotation=30, ha="right")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.set_title(title(what, result), fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    return figure


def _name_lines(axes: Any, ends: list[tuple[float, Line]]) -> None:
    """Put each line's name beside its last point."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ends = sorted(ends, key=lambda end: end[0])
    at = [(math.log(value) - low) / (high - low) for value, _ in ends]
    heights = [GAP * (1 + line.name.count("\n")) for _, line in ends]
    for place, (_, line) in zip(_apart(at, heights), ends):
        name = {"color": line.color, "fontsize": 9, "va": "center"}
        axes.annotate(line.name, (1.02, place), xycoords="axes fraction", **name)


def _apart(at: list[float], heights: list[float]) -> list[float]:
    """Places in ascending order, moved from each other until things of these heights don't overlap."""
    at = list(at)
    for _ in range(100):
        for i in range(len(at) - 1):
            over = (heights[i] + heights[i + 1]) / 2 - (at[i + 1] - at[i])
            if over > 0:
                at[i], at[i + 1] = at[i] - over / 2, at[i + 1] + over / 2
    return at


def _lines(
    records: list[dict[str, Any]], key: str, across: str
) -> list[tuple[Line, list[tuple[int, float]]]]:
    """Every line and its points, the wide ones first: the narrow ones are seen on them."""
    points: dict[str, list[tuple[int, float]]] = {}
    for r in records:
        name = r["kind"] if r["kind"] in LINES else r["contender"]
        if name in LINES:
            points.setdefault(name, []).append((r[across], r[key]))
    found = [(LINES[name], sorted(line)) for name, line in points.items()]
    return sorted(found, key=lambda each: -each[0].width)
