"""The tables and the page of a suite's records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..engine.report import format_bytes
from ..reporting.ownership import PNG_METADATA
from ..reporting.setting import title
from ..reporting.tables import Table, as_markdown, setting_text
from .paired import difference
from .suite import FULL, SETTINGS

REMARK = (
    "Shares of right answers, the same questions for all; an answer is right if it is the value and nothing else. "
    "The difference to the full cache is paired, with a 95% interval bootstrapped over documents. Question known: it "
    "stands in the prompt that is compressed. Question later: the document is compressed first. KV memory: all that is "
    "held in memory when the answer is done. First token: median seconds, question later without reading the document."
)
Records = list[dict[str, Any]]


def tables(records: Records) -> list[Table]:
    """For each setting and length the figures of every way, and its right answers by task."""
    made = []
    for length in sorted({r["length"] for r in records}):
        for setting in SETTINGS:
            own = [r for r in records if (r["length"], r["setting"]) == (length, setting)]
            if own:
                where = f"Question {setting}, {length:,} tokens"
                made += [_figures(own, where), _by_task(own, f"{where}, by task")]
    return made


def summarise(records: Records) -> list[dict[str, Any]]:
    """One JSON object a way, setting and length."""
    found = []
    for (way, setting, length), own in _grouped(records, "way", "setting", "length").items():
        paired = difference(*_paired(own, records))
        by_task = {key[0]: _share(of_task) for key, of_task in _grouped(own, "task").items()}
        found.append(
            {
                "way": way,
                "setting": setting,
                "length": length,
                "asked": len(own),
                "right": sum(r["right"] for r in own),
                "by_task": by_task,
                "difference": vars(paired),
                "entries": max((r["entries"] for r in own if r["entries"]), default=None),
                "kv_bytes": max(r["kv_bytes"] for r in own),
                "file_bytes": max(r["file_bytes"] for r in own),
                "first_seconds": float(np.median([r["first_seconds"] for r in own])),
                "selection_seconds": float(np.median([r["selection_seconds"] for r in own])),
                "votes": sum(r["votes"] for r in own),
                "reason": next((r["reason"] for r in own if r["reason"]), None),
            }
        )
    return found


def _figures(records: Records, heading: str) -> Table:
    told = dict.fromkeys(
        f"Not compressed: {r['way']} ({r['reason']})." for r in records if r["reason"]
    )
    columns = [
        "way",
        "n",
        "right",
        "against full",
        "entries",
        "KV memory",
        "first token",
        "compression",
    ]
    table = Table(heading, " ".join(told), columns)
    for (way,), own in _grouped(records, "way").items():
        entries = max((r["entries"] for r in own if r["entries"]), default=None)
        stored = max(r["file_bytes"] for r in own)
        table.add(
            way,
            str(len(own)),
            f"{_share(own):.2f}",
            "" if way == FULL else str(difference(*_paired(own, records))),
            "all" if entries is None else f"{entries:,}",
            format_bytes(max(r["kv_bytes"] for r in own))
            + (f", {format_bytes(stored)} on disk" if stored else ""),
            f"{np.median([r['first_seconds'] for r in own]):.2f} s",
            f"{np.median([r['selection_seconds'] for r in own]):.2f} s",
        )
    return table


def _by_task(records: Records, heading: str) -> Table:
    tasks = list(dict.fromkeys(r["task"] for r in records))
    table = Table(heading, "", ["way", *tasks])
    for (way,), own in _grouped(records, "way").items():
        shares = _grouped(own, "task")
        table.add(way, *(f"{_share(shares[task,]):.2f}" for task in tasks))
    return table


def _grouped(records: Records, *keys: str) -> dict[tuple, Records]:
    groups: dict[tuple, Records] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def _share(records: Records) -> float:
    return sum(r["right"] for r in records) / len(records)


def _paired(own: Records, records: Records) -> tuple[list[bool], list[bool], list[Any]]:
    """Right answers, the full cache's to the same questions, and the documents."""
    full = {_place(r): r["right"] for r in records if r["way"] == FULL}
    return (
        [r["right"] for r in own],
        [full[_place(r)] for r in own],
        [(r["task"], r["document"]) for r in own],
    )


def _place(record: dict[str, Any]) -> tuple:
    return tuple(record[key] for key in ("setting", "length", "task", "document", "question"))


def markdown(result: dict[str, Any], plot: str | None) -> str:
    """A page: setting, remark, tables and the picture."""
    parts = ["# Tasks that tell policies apart", setting_text(result), REMARK]
    for table in tables(result["records"]):
        parts += [f"## {table.title}", table.remark, as_markdown(table)]
    if plot:
        parts.append(f"![Right answers by way](<{plot}>)")
    return "\n\n".join(part for part in parts if part) + "\n"


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Right answers of each way, both settings side by side, with the intervals around the full cache's."""
    from matplotlib.figure import Figure

    summary = result["summary"]
    panels = list(dict.fromkeys((s["setting"], s["length"]) for s in summary))
    ways = list(dict.fromkeys(s["way"] for s in summary))
    size = (2.5 + 3.2 * len(panels), 1.4 + 0.34 * len(ways))
    figure = Figure(figsize=size, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        own = {s["way"]: s for s in summary if (s["setting"], s["length"]) == panel}
        full = own[FULL]["right"] / own[FULL]["asked"]
        for y, way in enumerate(ways):
            found = own[way]
            spread = found["difference"]
            axes.plot([full + spread["low"], full + spread["high"]], [y, y], color="0.6", lw=2)
            axes.plot(found["right"] / found["asked"], y, "o", color="#dd4b45")
        axes.axvline(full, color="0.4", ls=":", lw=1)
        axes.set_title(f"question {panel[0]}, {panel[1]:,} tokens", fontsize=9)
        axes.set_xlim(-0.03, 1.03)
        axes.set_xlabel("right answers")
        axes.set_yticks(range(len(ways)), ways, fontsize=7)
        axes.invert_yaxis()
    figure.suptitle(
        title("Right answers, 95% interval of the difference to the full cache", result), fontsize=9
    )
    figure.savefig(path, dpi=120, metadata=PNG_METADATA)
