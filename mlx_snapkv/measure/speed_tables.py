"""A benchmark's rows as a table, a page and a picture."""

import re
from collections.abc import Callable
from typing import Any

from ..planning.units import format_bytes
from .environment import title
from .speed import Row
from .tables import Table, as_page

REMARK = "The figures hold for this machine; only the ratios carry over, and only to machines of its kind."


def markdown(result: dict[str, Any], picture: str) -> str:
    return as_page("Benchmarks", result, REMARK, [speed(result["speed"])], [picture])


def speed(rows: list[Row]) -> Table:
    """What `measure_speed` has measured, a line a contender and context length."""
    table = Table(
        "Decoding and prefill by context length",
        "Decoding: the median step, with the caches taking turns; they hold random entries, since only shapes matter "
        'for speed. Ratios are to the full cache. "Read": seconds from a random prompt to the first token, including '
        "selection, and the peak memory of that. Prompts that the full cache does not read are for policies that evict "
        "during prefill.",
        ["context", "cache", "entries", "tokens/s", "KV memory", "read", "peak memory"],
    )
    full = {row["context"]: row for row in rows if row["contender"] == "full cache"}
    for row in rows:
        base = full.get(row["context"], row)
        step, read = row.get("step_seconds"), row.get("read_seconds")
        table.add(
            f"{row['context']:,}",
            row["contender"],
            f"{row['entries']:,}",
            f"{1 / step:.1f}, {base['step_seconds'] / step:.2f}x" if step else "",
            format_bytes(row["kv_bytes"]),
            f"{read:.2f} s" + _ratio(row, base, "read_seconds") if read else "",
            format_bytes(row["peak_bytes"]) + _ratio(row, base, "peak_bytes") if read else "",
        )
    return table


def _ratio(row: Row, base: Row, figure: str) -> str:
    known = base["contender"] == "full cache" and figure in base
    return f", {row[figure] / base[figure]:.2f}x" if known else ""


# A panel's label, the figure in a row that it shows, its value, and how a tick reads.
PANELS: list[tuple[str, str, Callable[[float], float], Callable[[float], str]]] = [
    ("seconds to the first token", "read_seconds", lambda x: x, "{:,g}".format),
    ("tokens/s, median step", "step_seconds", lambda x: 1 / x, "{:,g}".format),
    ("memory of keys and values", "kv_bytes", lambda x: x, format_bytes),
]


def figure(result: dict[str, Any]) -> Any:
    """Time to the first token, decoding speed and KV memory by context length, as matplotlib's figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(14, 4.8), layout="constrained")
    drawn.suptitle(title("By context length", result), fontsize=9, x=0.01, ha="left")
    lines: dict[str, list[Row]] = {}
    for row in result["speed"]:
        # `--max-kv-size` is one line, whatever its size.
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
    """Both axes logarithmic, with a label for every context length."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(xlabel="context length (tokens)", xscale="log", yscale="log")
    axes.set_xticks(contexts, [f"{n:,}" for n in contexts], rotation=30, ha="right")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda at, _: tick(at))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
