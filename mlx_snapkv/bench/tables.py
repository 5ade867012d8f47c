"""A benchmark's rows as tables, for the terminal and for a page, and as a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..engine.report import format_bytes
from ..paths import put_figure
from ..reporting.files import PNG_METADATA
from ..reporting.setting import title
from ..reporting.table import Table, as_markdown, setting_text
from .speed import Row

REMARK = "Figures are for this machine; the ratios are what carries over, and only to machines of its kind."


def tables(result: dict[str, Any]) -> list[Table]:
    """All tables of a result, in reading order; those without rows are left out."""
    made = [speed(result["speed"]), *books(result["book"])]
    return [table for table in made if table.rows]


def markdown(result: dict[str, Any], picture: str | None) -> str:
    """A page: setting, tables, and the picture of this name, if there is one."""
    lines = ["# Benchmarks", "", f"{setting_text(result)} {REMARK}"]
    for table in tables(result):
        lines += ["", f"## {table.title}", "", table.remark, "", as_markdown(table)]
    if picture is not None:
        lines += ["", f"![speed and memory by context length]({picture})"]
    return "\n".join(lines) + "\n"


def speed(rows: list[Row]) -> Table:
    """Decoding and reading by context length."""
    table = Table(
        "Decoding and reading by context length",
        "Steps of all caches in turn, medians; the caches hold random entries, since only shapes matter for speed. "
        'Ratios are to the full cache. "Read": seconds until the first token after a random prompt, selection '
        "included, and the peak memory then. Prompts that the full cache does not read are for policies that evict "
        "meanwhile.",
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


def books(rows: list[Row]) -> list[Table]:
    """What reading a book and asking it costs."""
    full = [row["context"] for row in rows if row["contender"] == "full cache"]
    beyond = f"beyond {max(full):,} tokens: its seconds grow with the square" if full else "at all"
    reading = Table(
        "Reading a book",
        "A prompt of random tokens, read once. A book is read by KeyDiff within so many resident entries, and every "
        'entry goes to a file. "Process" is what the process holds itself, on Linux without the files that the system '
        'caches for it; "entries" those in memory afterwards, room for the next block included. The full cache was not '
        f"read {beyond}.",
        ["prompt", "cache", "resident", "read", "tokens/s", "peak", "process", "entries", "disk/token"],
    )  # fmt: skip
    asking = Table(
        "Asking a book",
        "A question of 32 tokens until its answer's first token, medians of 3: read over the resident entries, votes "
        "over all of them, the best gathered, and the question read again over those.",
        ["prompt", "cache", "gathered", "question", "votes", "gathering", "read again"],
    )
    for row in rows:
        who = f"{row['context']:,}", row["contender"]
        disk = row["disk_bytes_per_token"]
        sizes = [format_bytes(row[f"{what}_bytes"]) for what in ("peak", "process", "kv")]
        reading.add(
            *who,
            f"{row['entries']:,}",
            f"{row['read_seconds']:.1f} s",
            f"{row['context'] / row['read_seconds']:.0f}",
            *sizes,
            format_bytes(disk) if disk else "",
        )
        parts = [row.get(f"{part}_seconds") for part in ("vote", "gather", "read_again")]
        asking.add(
            *who,
            f"{row['gathered']:,}" if row["gathered"] else "",
            f"{row['question_seconds']:.2f} s",
            *("" if seconds is None else f"{seconds:.2f} s" for seconds in parts),
        )
    return [reading, asking]


def write_picture(result: dict[str, Any], path: Path) -> None:
    """Decoding speed and KV memory by context length."""
    put_figure(path, figure(result), dpi=120, metadata=PNG_METADATA)


def figure(result: dict[str, Any]) -> Any:
    """The same as matplotlib's figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = [row for row in result["speed"] if "step_seconds" in row]
    drawn = Figure(figsize=(11, 4.8), layout="constrained")
    drawn.suptitle(title("Decoding by context length", result), fontsize=9, x=0.01, ha="left")
    wanted: list[tuple[str, Callable[[Row], float], Callable[[float], str]]] = [
        ("tokens/s, median step", lambda row: 1 / row["step_seconds"], "{:,g}".format),
        ("memory of keys and values", lambda row: row["kv_bytes"], format_bytes),
    ]
    for axes, (what, value, number) in zip(drawn.subplots(1, 2), wanted):
        axes.set(xlabel="context length (tokens)", ylabel=what, xscale="log", yscale="log")
        for n, (name, points) in enumerate(_lines(rows, value).items()):
            axes.plot(
                *zip(*points), label=name, marker="osdx^v"[n % 6], linestyle=("-", "--")[n % 2]
            )
        places = sorted({row["context"] for row in rows})
        axes.set_xticks(places, [f"{place:,}" for place in places], rotation=30, ha="right")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda at, _, number=number: number(at))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    drawn.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return drawn


def _lines(rows: list[Row], value: Callable[[Row], float]) -> dict[str, list[tuple[int, float]]]:
    """The points of every contender; `--max-kv-size` is one, whatever its size."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = row["contender"]
        name = "--max-kv-size, as many entries" if name.startswith("--max") else name
        lines.setdefault(name, []).append((row["context"], value(row)))
    return lines
