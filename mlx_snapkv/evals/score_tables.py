"""The tables, the page and the picture of what was asked about documents, made of one summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.report import format_bytes
from ..reporting.ownership import PNG_METADATA
from ..reporting.setting import title
from ..reporting.table import Table, as_markdown, setting_text
from ..whole_files import put_figure
from .asking import BY_MASK, FULL, SETTINGS
from .paired import Difference, difference

REMARK = (
    "The same questions for all; the score is the mean over the tasks asked, each weighing the same. The difference to "
    "the full cache is paired, with a 95% interval bootstrapped over documents. Question known: it stands in the "
    "prompt that is compressed. Question later: the document is compressed first. KV memory: all that is held in "
    "memory once the prompt is compressed, or of a full cache when the answer is done. First token, compression: "
    "median seconds, measured where answers are given one at a time (--batch-size 1); question later without reading "
    "the document."
)
Records = list[dict[str, Any]]
Summary = list[dict[str, Any]]


@dataclass(frozen=True)
class Page:
    """How one kind of questions is told.

    Attributes:
        title: of the page.
        remark: how an answer is scored.
        points: what full marks are: 1, or 100 as in the field's papers.
        averages: the means that its paper reports, by name, of one way's records in a setting and length; 0 to 1.
    """

    title: str
    remark: str
    points: int = 1
    averages: Callable[[Records], dict[str, float]] = lambda records: {}

    def told(self, score: float) -> str:
        return f"{score:.2f}" if self.points == 1 else f"{self.points * score:.1f}"


def summarise(records: Records, page: Page) -> Summary:
    """One JSON object a way, setting and length; its scores are 0 to 1."""
    full = {_place(r): r["score"] for r in records if r["way"] == FULL}
    found = []
    for (way, setting, length), own in grouped(records, "way", "setting", "length").items():
        paired = difference(
            [r["score"] for r in own],
            [full[_place(r)] for r in own],
            [r["document"] for r in own],
            [r["task"] for r in own],
        )
        by_task = task_means(own)
        found.append(
            {
                "way": way,
                "setting": setting,
                "length": length,
                "asked": len(own),
                "score": mean(list(by_task.values())),
                "by_task": by_task,
                "averages": page.averages(own),
                "difference": vars(paired),
                "entries": max((r["entries"] for r in own if r["entries"]), default=None),
                "kv_bytes": max(r["kv_bytes"] for r in own),
                "file_bytes": max(r["file_bytes"] for r in own),
                "first_seconds": _median(own, "first_seconds"),
                "selection_seconds": _median(own, "selection_seconds"),
                "votes": sum(r["votes"] for r in own),
                "reason": next((r["reason"] for r in own if r["reason"]), None),
            }
        )
    return found


def grouped(records: Records, *keys: str) -> dict[tuple, Records]:
    groups: dict[tuple, Records] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def task_means(records: Records) -> dict[str, float]:
    """The mean score of each task."""
    tasks = grouped(records, "task").items()
    return {task: mean([r["score"] for r in own]) for (task,), own in tasks}


def _median(records: Records, key: str) -> float | None:
    """Of what was measured; None if nothing was."""
    measured = [r[key] for r in records if r[key] is not None]
    return float(np.median(measured)) if measured else None


def mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def _place(record: dict[str, Any]) -> tuple:
    return tuple(record[key] for key in ("setting", "length", "task", "document", "question"))


def tables(summary: Summary, page: Page) -> list[Table]:
    """For each length and setting the figures of every way, and its scores by task; then the lengths side by side."""
    made = []
    lengths = list(dict.fromkeys(s["length"] for s in summary))
    for length in sorted(lengths, key=lambda n: n or 0):
        for setting in SETTINGS:
            own = [s for s in summary if (s["length"], s["setting"]) == (length, setting)]
            if own:
                where = _where(setting, length)
                made += [_figures(own, where, page), _by_task(own, f"{where}, by task", page)]
    if len(lengths) > 1 and None not in lengths:
        made += [_by_length(own, page) for own in grouped(summary, "setting").values()]
    return made


def _where(setting: str, length: int | None) -> str:
    return f"Question {setting}" + ("" if length is None else f", {length:,} tokens")


def _figures(summary: Summary, heading: str, page: Page) -> Table:
    told = [f"Not compressed: {s['way']} ({s['reason']})." for s in summary if s["reason"]]
    if any(s["way"].endswith(BY_MASK) for s in summary):
        told.append(
            "By mask: all entries are held, and every head sees what it would keep, entries in the mean; what the "
            "answer adds stays. Its right answers are measured so, not its memory or speed."
        )
    timed = any(s["first_seconds"] is not None for s in summary)
    columns = ["way", "n", "score", "against full", "entries", "KV memory"]
    columns += ["first token", "compression"] if timed else []
    table = Table(heading, " ".join(told), columns)
    for s in summary:
        stored = f", {format_bytes(s['file_bytes'])} on disk" if s["file_bytes"] else ""
        table.add(
            s["way"],
            str(s["asked"]),
            page.told(s["score"]),
            "" if s["way"] == FULL else Difference(**s["difference"]).told(page.points),
            "all" if s["entries"] is None else f"{s['entries']:,}",
            "by mask" if s["way"].endswith(BY_MASK) else format_bytes(s["kv_bytes"]) + stored,
            *(map(_seconds, (s["first_seconds"], s["selection_seconds"])) if timed else ()),
        )
    return table


def _seconds(measured: float | None) -> str:
    return "" if measured is None else f"{measured:.2f} s"


def _by_task(summary: Summary, heading: str, page: Page) -> Table:
    """Scores by task, then the averages; a row each if there are more of them than ways."""
    scores = {s["way"]: s["by_task"] | s["averages"] for s in summary}
    names = list(dict.fromkeys(name for own in scores.values() for name in own))

    def cell(way: str, name: str) -> str:
        return page.told(scores[way][name]) if name in scores[way] else ""

    if len(names) <= len(scores):
        rows = [[way, *(cell(way, name) for name in names)] for way in scores]
        return Table(heading, "", ["way", *names], rows)
    rows = [[name, *(cell(way, name) for way in scores)] for name in names]
    return Table(heading, "", ["task", *scores], rows)


def _by_length(summary: Summary, page: Page) -> Table:
    lengths = sorted({s["length"] for s in summary})
    names = [f"{length:,}" for length in lengths]
    table = Table(f"Question {summary[0]['setting']}, by length", "", ["way", *names, "mean"])
    for (way,), own in grouped(summary, "way").items():
        scores = {s["length"]: s["score"] for s in own}
        if len(scores) == len(lengths):
            cells = [scores[length] for length in lengths]
            table.add(way, *map(page.told, [*cells, mean(cells)]))
    return table


def markdown(result: dict[str, Any], page: Page, plot: str | None) -> str:
    """A page: setting, remark, tables and the picture."""
    parts = [f"# {page.title}", setting_text(result), f"{page.remark} {REMARK}"]
    for table in tables(result["summary"], page):
        parts += [f"## {table.title}", table.remark, as_markdown(table)]
    if plot:
        parts.append(f"![Scores by way](<{plot}>)")
    return "\n\n".join(part for part in parts if part) + "\n"


def write_plot(result: dict[str, Any], page: Page, path: Path) -> None:
    """The score of each way, settings side by side, with the intervals around the full cache's."""
    from matplotlib.figure import Figure

    summary, points = result["summary"], page.points
    panels = list(dict.fromkeys((s["setting"], s["length"]) for s in summary))
    ways = list(dict.fromkeys(s["way"] for s in summary))
    size = (2.5 + 3.2 * len(panels), 1.4 + 0.34 * len(ways))
    figure = Figure(figsize=size, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        own = {s["way"]: s for s in summary if (s["setting"], s["length"]) == panel}
        full = points * own[FULL]["score"]
        for y, way in enumerate(ways):
            spread = own[way]["difference"]
            ends = [full + points * spread["low"], full + points * spread["high"]]
            axes.plot(ends, [y, y], color="0.6", lw=2)
            axes.plot(points * own[way]["score"], y, "o", color="#dd4b45")
        axes.axvline(full, color="0.4", ls=":", lw=1)
        axes.set_title(_where(*panel).lower(), fontsize=9)
        axes.set_xlim(-0.03 * points, 1.03 * points)
        axes.set_xlabel("score")
        axes.set_yticks(range(len(ways)), ways, fontsize=7)
        axes.invert_yaxis()
    what = title("Scores, 95% interval of the difference to the full cache", result)
    figure.suptitle(what, fontsize=9)
    put_figure(path, figure, dpi=120, metadata=PNG_METADATA)
