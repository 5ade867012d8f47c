"""Draw docs/benchmarks.png from docs/benchmarks.json, the results of `mlx-snapkv bench`.

python scripts/speed_picture.py
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from results_page import ROOT, load

from mlx_snapkv.measure.speed import Row
from mlx_snapkv.measure.tables import put_figure
from mlx_snapkv.planning.units import format_bytes


class Panel(NamedTuple):
    """One of the picture's diagrams.

    Attributes:
        label: label of the value axis.
        field: the rows' field to draw.
        axis_value: function from the field to the value on the axis.
        tick_text: function from a value on the axis to its tick's text.
    """

    label: str
    field: str
    axis_value: Callable[[float], float]
    tick_text: Callable[[float], str]


PANELS = [
    Panel("seconds to the first token", "read_seconds", lambda seconds: seconds, "{:,g}".format),
    Panel("tokens/s, median step", "step_seconds", lambda seconds: 1 / seconds, "{:,g}".format),
    Panel("memory of keys and values", "kv_bytes", lambda n_bytes: n_bytes, format_bytes),
]


def figure(result: dict[str, Any]) -> Any:
    """Return a matplotlib figure of time to first token, decoding speed and KV memory by context length."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(14, 4.8), layout="constrained")
    machine = result["machine"]
    machine_text = f"{machine['processor']}, {machine['cores']} cores, {machine['device']}"
    title = f"By context length\nModel: {result['model']}\n{machine_text}"
    picture.suptitle(title, fontsize=9, x=0.01, ha="left")
    rows_by_line: dict[str, list[Row]] = {}
    for row in result["speed"]:
        # Draw `--max-kv-size` as one line, although its size differs between context lengths.
        name = re.sub(r"^--max-kv-size .*", "--max-kv-size, as many entries", row["contender"])
        rows_by_line.setdefault(name, []).append(row)
    for axes, panel in zip(picture.subplots(1, len(PANELS)), PANELS):
        all_contexts = set()
        for i, (name, line_rows) in enumerate(rows_by_line.items()):
            rows = [row for row in line_rows if row.get(panel.field)]
            contexts = [row["context"] for row in rows]
            values = [panel.axis_value(row[panel.field]) for row in rows]
            style = {"marker": "osdx^v"[i % 6], "linestyle": ("-", "--")[i % 2], "color": f"C{i}"}
            axes.plot(contexts, values, label=name, **style)
            all_contexts |= set(contexts)
        axes.set_ylabel(panel.label)
        _scale(axes, sorted(all_contexts), panel.tick_text)
    handles_and_labels = axes.get_legend_handles_labels()
    picture.legend(*handles_and_labels, loc="outside lower center", ncols=4, fontsize=8)
    return picture


def _scale(axes: Any, contexts: list[int], tick_text: Callable[[float], str]) -> None:
    """Make both axes logarithmic, with a tick for every context length."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(xlabel="context length (tokens)", xscale="log", yscale="log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts], rotation=30, ha="right")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: tick_text(value))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    put_figure(ROOT / "docs" / "benchmarks.png", figure(load("benchmarks")))
