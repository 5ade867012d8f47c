"""The tables and the page of what was asked about documents, made of one summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.report import format_bytes
from ..reporting.table import Table, as_markdown, setting_text
from .answering import BY_MASK, FULL, SETTINGS
from .paired import Difference, difference

REMARK = (
    "The same questions for all; the score is the mean over the tasks asked, each weighing the same. The difference to "
    "the full cache is paired, with a 95% interval bootstrapped over documents. Question known: it stands in the "
    "prompt that is compressed. Question later: the document is compressed first. Entries: kept per KV head, the most "
    "of any layer; a block policy holds up to a block more. KV memory: all that is held in memory once the prompt is "
    "compressed, read from the arrays, or of a full cache when the answer is done."
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
    """

    title: str
    remark: str
    points: int = 1

    def told(self, score: float) -> str:
        return f"{score:.2f}" if self.points == 1 else f"{self.points * score:.1f}"


def summarise(records: Records, page: Page) -> Summary:
    """One JSON object a method, setting and length; its scores are 0 to 1.

    `uncompressed` counts the prompts that a policy left as they were, the first of them for `reason`.
    """
    full = {_place(r): r["score"] for r in records if r["method"] == FULL}
    found = []
    for (method, setting, length), own in grouped(records, "method", "setting", "length").items():
        paired = difference(
            [r["score"] for r in own],
            [full[_place(r)] for r in own],
            [r["document"] for r in own],
            [r["task"] for r in own],
        )
        by_task = task_means(own)
        found.append(
            {
                "method": method,
                "setting": setting,
                "length": length,
                "asked": len(own),
                "score": mean(list(by_task.values())),
                "by_task": by_task,
                "difference": vars(paired),
                "entries": max((r["entries"] for r in own if r["entries"]), default=None),
                "kv_bytes": max(r["kv_bytes"] for r in own),
                "file_bytes": max(r["file_bytes"] for r in own),
                "uncompressed": sum(bool(r["reason"]) for r in own),
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


def mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def _place(record: dict[str, Any]) -> tuple:
    return tuple(record[key] for key in ("setting", "length", "task", "document", "question"))


def tables(summary: Summary, page: Page) -> list[Table]:
    """For each length and setting all methods' figures, and their scores by task; then the lengths side by side."""
    made = []
    lengths = list(dict.fromkeys(s["length"] for s in summary))
    for length in sorted(lengths, key=lambda n: n or 0):
        for setting in SETTINGS:
            own = [s for s in summary if (s["length"], s["setting"]) == (length, setting)]
            if own:
                where = _where(setting, length)
                made.append(_figures(own, where, page))
                if len(own[0]["by_task"]) > 1:
                    made.append(_by_task(own, f"{where}, by task", page))
    if len(lengths) > 1 and None not in lengths:
        made += [_by_length(own, page) for own in grouped(summary, "setting").values()]
    return made


def _where(setting: str, length: int | None) -> str:
    return f"Question {setting}" + ("" if length is None else f", {length:,} tokens")


def _figures(summary: Summary, heading: str, page: Page) -> Table:
    told = [
        f"Not compressed: {s['uncompressed']} of {s['asked']} prompts of {s['method']} ({s['reason']})."
        for s in summary
        if s["reason"]
    ]
    if any(s["method"].endswith(BY_MASK) for s in summary):
        told.append(
            "By mask: all entries are held, and every head sees what it would keep, entries in the mean; what the "
            "answer adds stays. Its right answers are measured so, not its memory or speed."
        )
    columns = ["method", "n", "score", "against full", "entries", "KV memory"]
    table = Table(heading, " ".join(told), columns)
    for s in summary:
        stored = f", {format_bytes(s['file_bytes'])} on disk" if s["file_bytes"] else ""
        table.add(
            s["method"],
            str(s["asked"]),
            *_scored(s, page),
            "all" if s["entries"] is None else f"{s['entries']:,}",
            "by mask" if s["method"].endswith(BY_MASK) else format_bytes(s["kv_bytes"]) + stored,
        )
    return table


def _scored(s: dict[str, Any], page: Page) -> tuple[str, str]:
    """Score and difference; neither is a method's that compressed nothing."""
    if s["uncompressed"] == s["asked"]:
        return "not compressed", ""
    paired = "" if s["method"] == FULL else Difference(**s["difference"]).told(page.points)
    return page.told(s["score"]), paired


def _by_task(summary: Summary, heading: str, page: Page) -> Table:
    """Scores by task, a row each if there are more of them than methods."""
    names = list(dict.fromkeys(name for s in summary for name in s["by_task"]))
    rows = [
        [s["method"], *(page.told(s["by_task"][n]) if n in s["by_task"] else "" for n in names)]
        for s in summary
    ]
    columns = ["method", *names]
    if len(names) > len(summary):
        columns, *rows = map(list, zip(columns, *rows))
        columns[0] = "task"
    return Table(heading, "", columns, rows)


def _by_length(summary: Summary, page: Page) -> Table:
    lengths = sorted({s["length"] for s in summary})
    names = [f"{length:,}" for length in lengths]
    table = Table(f"Question {summary[0]['setting']}, by length", "", ["method", *names, "mean"])
    for (method,), own in grouped(summary, "method").items():
        scores = {s["length"]: s["score"] for s in own}
        if len(scores) == len(lengths):
            cells = [scores[length] for length in lengths]
            table.add(method, *map(page.told, [*cells, mean(cells)]))
    return table


def markdown(result: dict[str, Any], page: Page, plots: Sequence[str]) -> str:
    """A page: setting, remark, tables and the pictures of these names."""
    parts = [f"# {page.title}", setting_text(result), f"{page.remark} {REMARK}"]
    for table in tables(result["summary"], page):
        parts += [f"## {table.title}", table.remark, as_markdown(table)]
    parts += [f"![Scores](<{plot}>)" for plot in plots]
    return "\n\n".join(part for part in parts if part) + "\n"
