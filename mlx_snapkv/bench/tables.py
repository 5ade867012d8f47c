"""A benchmark's rows as a table, a page and a picture."""

import re
from collections.abc import Callable
from typing import Any

from ..planning.units import format_bytes
from ..reporting.setting import title
from ..reporting.table import Table, as_page
from .speed import Row

REMARK = "The figures hold for this machine; only the ratios carry over, and only to machines of its kind."


def markdown(result: dict[str, Any], picture: str) -> str:
    return as_page("Benchmarks", result, REMARK, [speed(result["speed"])], [picture])


def speed(rows: list[Row]) -> Table:
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


def figure(result: dict[str, Any]) -> Any:
    """Decoding speed and KV memory by context length, as matplotlib's figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    drawn = Figure(figsize=(11, 4.8), layout="constrained")
    drawn.suptitle(title("Decoding by context length", result), fontsize=9, x=0.01, ha="left")
    lines: dict[str, list[Row]] = {}
    for row in (row for row in result["speed"] if "step_seconds" in row):
        # `--max-kv-size` is one line, whatever its size.
        name = re.sub(r"^--max-kv-size .*", "--max-kv-size, as many entries", row["contender"])
        lines.setdefault(name, []).append(row)
    wanted: list[tuple[str, Callable[[Row], float], Callable[[float], str]]] = [
        ("tokens/s, median step", lambda row: 1 / row["step_seconds"], "{:,g}".format),
        ("memory of keys and values", lambda row: row["kv_bytes"], format_bytes),
    ]
    places = sorted({row["context"] for rows in lines.values() for row in rows})
    for axes, (what, value, number) in zip(drawn.subplots(1, 2), wanted):
        axes.set(xlabel="context length (tokens)", ylabel=what, xscale="log", yscale="log")
        for n, (name, rows) in enumerate(lines.items()):
            points = [row["context"] for row in rows], [value(row) for row in rows]
            style = ("-", "--")[n % 2]
            axes.plot(*points, label=name, marker="osdx^v"[n % 6], linestyle=style)
        axes.set_xticks(places, [f"{place:,}" for place in places], rotation=30, ha="right")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda at, _, number=number: number(at))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    drawn.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return drawn
