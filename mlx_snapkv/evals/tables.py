"""Paired differences of scores, and the tables of what was asked about documents, made of one summary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from ..engine.report import format_bytes
from ..reporting.table import Table, as_page
from .answering import BY_MASK, FULL, SETTINGS

RESAMPLES = 10_000
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
class Difference:
    """A mean difference of scores, -1 to 1, its 95% interval, and for how many questions it is above and below 0."""

    mean: float
    low: float
    high: float
    better: int
    worse: int

    def text(self, points: int = 1) -> str:
        """As tables show it, `points` being full marks."""
        if not self.better and not self.worse:
            return "0, each scored the same"
        form = "+.2f" if points == 1 else "+.1f"
        mean, low, high = (format(points * x, form) for x in (self.mean, self.low, self.high))
        return f"{mean} ({low} to {high})"


def difference(
    scores: Sequence[float],
    reference: Sequence[float],
    groups: Sequence[object],
    tasks: Sequence[object] | None = None,
) -> Difference:
    """Paired difference of scores for the same questions, bootstrapped over documents.

    The questions about one document are not independent, so whole documents are drawn, with replacement; the
    percentiles of the means of `RESAMPLES` drawings are the interval. With tasks, as many documents are drawn of each
    as it has, and the means are over tasks, each weighing the same.

    Args:
        groups: the document of each question.
        tasks: the task of each question.
    """
    changes = np.asarray(scores, dtype=float) - np.asarray(reference, dtype=float)
    names = [repr(task) for task in tasks or [None] * len(changes)]
    rng = np.random.default_rng(0)
    means, drawings = [], []
    for name in dict.fromkeys(names):
        own = [i for i, other in enumerate(names) if other == name]
        mean, drawn = _drawn(changes[own], [repr(groups[i]) for i in own], rng)
        means.append(mean)
        drawings.append(drawn)
    low, high = np.percentile(np.mean(drawings, axis=0), [2.5, 97.5])
    better, worse = int((changes > 0).sum()), int((changes < 0).sum())
    return Difference(float(np.mean(means)), float(low), float(high), better, worse)


def _drawn(changes: np.ndarray, groups: list[str], rng) -> tuple[float, np.ndarray]:
    """The mean of one task's changes, and those of its drawings."""
    if not changes.any():
        return 0.0, np.zeros(RESAMPLES)
    _, places = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(places, changes), np.bincount(places)
    drawn = rng.integers(0, len(sums), (RESAMPLES, len(sums)))
    return float(changes.mean()), sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)


def grouped(rows: Records, *keys: str) -> dict[tuple, Records]:
    """Rows by their values of some keys, in the order in which these come first."""
    found: dict[tuple, Records] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


@dataclass(frozen=True)
class Page:
    """How one kind of questions is shown.

    Attributes:
        remark: how an answer is scored.
        points: full marks: 1, or 100 as in the field's papers.
    """

    title: str
    remark: str
    points: int = 1

    def score(self, score: float) -> str:
        return f"{score:.2f}" if self.points == 1 else f"{self.points * score:.1f}"


def summarise(records: Records) -> Summary:
    """One JSON object a method, setting and length; its scores are 0 to 1.

    `uncompressed` counts the prompts that a policy left as they were, the first of them for `reason`.
    """

    def place(record: dict[str, Any]) -> tuple:
        return tuple(record[k] for k in ("setting", "length", "task", "document", "question"))

    full = {place(r): r["score"] for r in records if r["method"] == FULL}
    found = []
    for (method, setting, length), own in grouped(records, "method", "setting", "length").items():
        scores, reference = [r["score"] for r in own], [full[place(r)] for r in own]
        documents, tasks = ([r[key] for r in own] for key in ("document", "task"))
        by_task = {
            task: fmean([r["score"] for r in some])
            for (task,), some in grouped(own, "task").items()
        }
        found.append(
            {
                "method": method,
                "setting": setting,
                "length": length,
                "asked": len(own),
                "score": fmean(list(by_task.values())),
                "by_task": by_task,
                "difference": vars(difference(scores, reference, documents, tasks)),
                "entries": max((r["entries"] for r in own if r["entries"]), default=None),
                "kv_bytes": max((r["kv_bytes"] for r in own if r["kv_bytes"]), default=None),
                "file_bytes": max(r["file_bytes"] for r in own),
                "uncompressed": sum(bool(r["reason"]) for r in own),
                "reason": next((r["reason"] for r in own if r["reason"]), None),
            }
        )
    return found


def tables(summary: Summary, page: Page) -> list[Table]:
    """For each length and setting all methods' figures, and their scores by task; then the lengths side by side."""
    made = []
    lengths = sorted({s["length"] for s in summary}, key=lambda n: n or 0)
    for length, setting in itertools.product(lengths, SETTINGS):
        own = [s for s in summary if (s["length"], s["setting"]) == (length, setting)]
        if own:
            heading = f"Question {setting}" + (f", {length:,} tokens" if length else "")
            made.append(_figures(own, heading, page))
            if len(own[0]["by_task"]) > 1:
                made.append(_by_task(own, f"{heading}, by task", page))
    if len(lengths) > 1 and None not in lengths:
        made += [_by_length(own, page) for own in grouped(summary, "setting").values()]
    return made


def _figures(summary: Summary, heading: str, page: Page) -> Table:
    remarks = [
        f"Not compressed: {s['uncompressed']} of {s['asked']} prompts of {s['method']} ({s['reason']})."
        for s in summary
        if s["reason"]
    ]
    if any(s["method"].endswith(BY_MASK) for s in summary):
        remarks.append(
            "By mask: all entries are held, and every head sees what it would keep, entries in the mean; what the "
            "answer adds stays. Its right answers are measured so, not its memory or speed."
        )
    columns = ["method", "n", "score", "against full", "entries", "KV memory"]
    table = Table(heading, " ".join(remarks), columns)
    for s in summary:
        compared = "" if s["method"] == FULL else Difference(**s["difference"]).text(page.points)
        nothing = s["uncompressed"] == s["asked"]
        memory = "" if s["kv_bytes"] is None else format_bytes(s["kv_bytes"])
        memory += f", {format_bytes(s['file_bytes'])} on disk" if s["file_bytes"] else ""
        table.add(
            s["method"],
            str(s["asked"]),
            *(("not compressed", "") if nothing else (page.score(s["score"]), compared)),
            "all" if s["entries"] is None else f"{s['entries']:,}",
            "by mask" if s["method"].endswith(BY_MASK) else memory,
        )
    return table


def _by_task(summary: Summary, heading: str, page: Page) -> Table:
    """Scores by task, a row each if there are more of them than methods."""
    names = list(dict.fromkeys(name for s in summary for name in s["by_task"]))
    rows = [
        [s["method"], *(page.score(s["by_task"][n]) if n in s["by_task"] else "" for n in names)]
        for s in summary
    ]
    columns = ["method", *names]
    if len(names) > len(summary):
        columns, *rows = map(list, zip(columns, *rows))
        columns[0] = "task"
    return Table(heading, "", columns, rows)


def _by_length(summary: Summary, page: Page) -> Table:
    lengths = sorted({s["length"] for s in summary})
    columns = ["method", *(f"{length:,}" for length in lengths), "mean"]
    table = Table(f"Question {summary[0]['setting']}, by length", "", columns)
    for (method,), own in grouped(summary, "method").items():
        scores = {s["length"]: s["score"] for s in own}
        if len(scores) == len(lengths):
            cells = [scores[length] for length in lengths]
            table.add(method, *map(page.score, [*cells, fmean(cells)]))
    return table


def markdown(result: dict[str, Any], page: Page, pictures: Sequence[str]) -> str:
    """A page of all tables, and of the pictures with these names."""
    remark = f"{page.remark} {REMARK}"
    return as_page(page.title, result, remark, tables(result["summary"], page), pictures)
