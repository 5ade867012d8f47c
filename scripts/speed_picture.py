"""Draw docs/benchmarks.png from docs/benchmarks.json, the results of `mlx-snapkv bench`.

python scripts/speed_picture.py
"""

import re
from collections.abc import Callable
from typing import Any

from results_page import ROOT, load

from mlx_snapkv.measure.speed import Row
from mlx_snapkv.measure.tables import put_figure
from mlx_snapkv.planning.units import format_bytes

# Panel label, row field, function from the field to the axis value, and tick format.
PANELS: list[tuple[str, str, Callable[[float], float], Callable[[float], str]]] = [
    ("seconds to the first token", "read_seconds", lambda x: x, "{:,g}".format),
    ("tokens/s, median step", "step_seconds", lambda x: 1 / x, "{:,g}".format),
    ("memory of keys and values", "kv_bytes", lambda x: x, format_bytes),
]


def figure(result: dict[str, Any]) -> Any:
    """Return a matplotlib figure of time to first token, decoding speed and KV memory by context length."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(14, 4.8), layout="constrained")
    machine = result["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['device']}"
    title = f"By context length\nModel: {result['model']}\n{where}"
    drawn.suptitle(title, fontsize=9, x=0.01, ha="left")
    lines: dict[str, list[Row]] = {}
    for row in result["speed"]:
        # Draw `--max-kv-size` as one line, although its size differs between context lengths.
        name = re.sub(r"^--max-kv-size .*", "--max-kv-size, as many entries", row["contender"])
        lines.setdefault(name, []).append(row)
    for axes, (label, figure, value, tick) in zip(drawn.subplots(1, len(PANELS)), PANELS):
        for n, (name, rows) in enumerate(lines.items()):
            points = [(row["context"], value(row[figure])) for row in rows if row.get(figure)]
            style = {"marker": "osdx^v"[n % 6], "linestyle": ("-", "--")[n % 2], "color": f"C{n}"}
            axes.plot(*zip(*points) if points else ([], []), label=name, **style)
        axes.set_ylabel(label)
        _scale(axes, sorted({row["context"] for row in result["speed"] if row.get(figure)}), tick)
    drawn.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return drawn


def _scale(axes: Any, contexts: list[int], tick: Callable[[float], str]) -> None:
    """Make both axes logarithmic, with a tick for every context length."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(xlabel="context length (tokens)", xscale="log", yscale="log")
    axes.set_xticks(contexts, [f"{n:,}" for n in contexts], rotation=30, ha="right")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda at, _: tick(at))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    put_figure(ROOT / "docs" / "benchmarks.png", figure(load("benchmarks")))
