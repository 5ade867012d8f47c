"""What was measured, summed up as JSON and shown as tables; paired differences and their intervals."""

import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ..planning.units import format_bytes
from ..reporting.table import Table, as_page
from .methods import BY_MASK, FULL, SETTINGS

RESAMPLES = 10_000
Record = dict[str, Any]
Summary = list[Record]

SCORES = (
    "All methods answer the same questions. The score, 0 to 100, is the mean over tasks of equal weight. The "
    "difference to the full cache is paired, with a 95% interval bootstrapped over documents. Question known: the "
    "compressed prompt contains the question. Question later: the document is compressed before the question is read. "
    "Entries: kept per KV head, the maximum over layers; a block policy holds up to one block more. KV memory: all "
    "entries held in memory after the compression, read from the arrays; a full cache's figure may include the answer."
)
BEFORE = (
    "Before compression: the share of the answers' tokens that were decoded before the prompt was compressed, on all "
    "entries or on those that block prefill had kept. These tokens say nothing about the entries kept."
)
MASKED = (
    'By mask: all entries are held, and every head sees only those that it would keep; "entries" is the mean. The '
    "answer's own entries stay. This measures accuracy, not memory or speed."
)


def difference(
    scores: Sequence[float],
    reference: Sequence[float],
    groups: Sequence[object],
    tasks: Sequence[object] | None = None,
) -> dict[str, float]:
    """Paired difference of scores for the same questions: a mean over tasks, each weighing the same.

    The questions about one document are not independent, so whole documents are drawn, with replacement, as many of
    each task as it has; the percentiles of the means of `RESAMPLES` drawings are the interval.

    Args:
        groups, tasks: the document and the task of each question.

    Returns: The `mean`, `low` and `high` of its 95% interval, and how many questions are `better` and `worse`.
    """
    changes = np.subtract(scores, reference, dtype=float)
    places = np.array([repr(group) for group in groups])
    names = [repr(task) for task in tasks or [None] * len(changes)]
    own = [np.array(names) == name for name in dict.fromkeys(names)]
    rng = np.random.default_rng(0)
    means, drawings = zip(*(_drawn(changes[some], places[some], rng) for some in own))
    low, high = np.percentile(np.mean(drawings, axis=0), [2.5, 97.5])
    found = {"mean": float(np.mean(means)), "low": float(low), "high": float(high)}
    return found | {"better": int((changes > 0).sum()), "worse": int((changes < 0).sum())}


def _drawn(changes: np.ndarray, groups: np.ndarray, rng: Any) -> tuple[float, np.ndarray]:
    """The mean of one task's changes, and those of its drawings."""
    _, places = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(places, changes), np.bincount(places)
    drawn = rng.integers(0, len(sums), (RESAMPLES, len(sums)))
    return float(changes.mean()), sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)


def interval(found: dict[str, float], form: str, scale: float = 1) -> str:
    """A difference's mean and its interval."""
    mean, low, high = (format(scale * found[key], form) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def grouped(rows: list[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Rows by their values of some keys, in the order in which these come first."""
    found: dict[tuple, list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def table_of(
    title: str, remark: str, columns: dict[str, Callable[[Record], str]], rows: Summary
) -> Table:
    return Table(title, remark, [*columns], [[cell(s) for cell in columns.values()] for s in rows])


def summarise(records: list[Record]) -> Summary:
    """One JSON object a method, setting and length; its scores are 0 to 1.

    `uncompressed` counts the prompts that a policy left as they were, the first of them for `reason`; `before` the
    tokens of the `answer_tokens` that were decoded before the compression. Both are None where no record tells.
    """
    place = itemgetter("setting", "length", "task", "document", "question")
    full = {place(r): r["score"] for r in records if r["method"] == FULL}
    found = []
    for (method, setting, length), own in grouped(records, "method", "setting", "length").items():
        scores, documents, tasks = ([r[key] for r in own] for key in ("score", "document", "task"))
        by_task = {
            task: fmean(r["score"] for r in some) for (task,), some in grouped(own, "task").items()
        }
        reasons = [r["reason"] for r in own if r["reason"]]
        found.append(
            {
                "method": method,
                "setting": setting,
                "length": length,
                "asked": len(own),
                "score": fmean(by_task.values()),
                "by_task": by_task,
                "difference": difference(scores, [full[place(r)] for r in own], documents, tasks),
                **{key: max(r[key] or 0 for r in own) or None for key in ("entries", "kv_bytes")},
                "file_bytes": max(r["file_bytes"] for r in own),
                **{key: _total(own, key) for key in ("answer_tokens", "before")},
                "uncompressed": len(reasons),
                "reason": reasons[0] if reasons else None,
            }
        )
    return found


def _total(records: list[Record], key: str) -> int | None:
    return sum(r[key] for r in records) if all(key in r for r in records) else None


def tables(summary: Summary) -> list[Table]:
    """For each length and setting all methods' figures, and their scores by task."""
    made = []
    lengths = sorted({s["length"] for s in summary}, key=lambda n: n or 0)
    for length, setting in itertools.product(lengths, SETTINGS):
        own = [s for s in summary if (s["length"], s["setting"]) == (length, setting)]
        if own:
            heading = f"Question {setting}" + (f", {length:,} tokens" if length else "")
            made.append(_scores(own, heading))
            if len(own[0]["by_task"]) > 1:
                made.append(_by_task(own, f"{heading}, by task"))
    return made


def _scores(summary: Summary, heading: str) -> Table:
    def score(s: Record) -> str:
        return "not compressed" if s["uncompressed"] == s["asked"] else f"{100 * s['score']:.1f}"

    def against_full(s: Record) -> str:
        if s["method"] == FULL or s["uncompressed"] == s["asked"]:
            return ""
        found = s["difference"]
        changed = found["better"] or found["worse"]
        return interval(found, "+.1f", 100) if changed else "0, each scored the same"

    def memory(s: Record) -> str:
        if s["method"].endswith(BY_MASK):
            return "by mask"
        held = "" if s["kv_bytes"] is None else format_bytes(s["kv_bytes"])
        return held + (f", {format_bytes(s['file_bytes'])} on disk" if s["file_bytes"] else "")

    left = "Not compressed: {uncompressed} of {asked} prompts of {method} ({reason}).".format_map
    remarks = [left(s) for s in summary if s["reason"]]
    if any(s["method"].endswith(BY_MASK) for s in summary):
        remarks.append(MASKED)
    columns: dict[str, Callable[[Record], str]] = {
        "method": itemgetter("method"),
        "n": "{asked}".format_map,
        "score": score,
        "against full": against_full,
        "before compression": before_compression,
        "entries": lambda s: "all" if s["entries"] is None else f"{s['entries']:,}",
        "KV memory": memory,
    }
    if any(map(before_compression, summary)):
        remarks.append(BEFORE)
    else:
        del columns["before compression"]
    return table_of(heading, " ".join(remarks), columns, summary)


def before_compression(s: Record) -> str:
    """The share of the answers' tokens that is not the compressed cache's; nothing where that is not known."""
    if s["method"] == FULL or s.get("before") is None:
        return ""
    return f"{s['before'] / s['answer_tokens']:.0%}"


def _by_task(summary: Summary, heading: str) -> Table:
    """Scores by task, a row each if there are more of them than methods."""
    names = list(dict.fromkeys(name for s in summary for name in s["by_task"]))
    cells = [["method", *names]]
    for s in summary:
        scores = (s["by_task"].get(name) for name in names)
        cells.append([s["method"], *("" if x is None else f"{100 * x:.1f}" for x in scores)])
    if len(names) > len(summary):
        cells[0][0] = "task"
        cells = [*map(list, zip(*cells))]
    return Table(heading, "", cells[0], cells[1:])


class Page(NamedTuple):
    """How one kind of records is summed up and shown; the remark says what its figures mean."""

    title: str
    remark: str
    summarise: Callable[[list[Record]], Summary] = summarise
    tables: Callable[[Summary], list[Table]] = tables

    def markdown(self, result: Record, pictures: Sequence[str] = ()) -> str:
        """A page of all tables, and of the pictures with these names."""
        made = self.tables(result["summary"])
        return as_page(self.title, result, self.remark, made, pictures)
