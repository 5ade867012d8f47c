"""The table and the page of lm-evaluation-harness' tasks, made of their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..reporting.table import Table, as_markdown, setting_text
from .answering import FULL
from .paired import difference
from .results import Record

TITLE = "lm-evaluation-harness"
REMARK = (
    "Metrics as lm-evaluation-harness has them, 'mean' over tasks each weighing the same. Against full: the paired "
    "difference to the full cache with a 95% interval bootstrapped over documents, of metrics that are means over "
    "documents. Entries: kept per KV head, the most of any layer and prompt."
)
MEAN = "mean"


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One JSON object a task, metric and method; then a metric's means over the tasks, if there are several."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    methods = list(dict.fromkeys(record["method"] for record in records))
    of = {(record["task"], record["method"]): record for record in records}
    asked = [(task, metric) for task in tasks for metric in _metrics(of[task, FULL])]
    found = [
        _row(task, m, [(of[task, method], of[task, FULL])])
        for task, m in asked
        for method in methods
    ]
    for metric in dict.fromkeys(metric for _, metric in asked):
        own = [task for task, other in asked if other == metric]
        if len(own) > 1:
            found += [
                _row(MEAN, metric, [(of[task, method], of[task, FULL]) for task in own])
                for method in methods
            ]
    return found


def _metrics(full: Record) -> list[str]:
    """A task's metrics. RULER's are named by lengths, and -1 is one that none of its prompts has."""
    return [name for name, x in full["metrics"].items() if not (x == -1 and name[0].isdigit())]


def _row(task: str, metric: str, pairs: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
    """One method's figures of a metric, from its record of each task and the full cache's."""
    own = [record for record, _ in pairs]
    values = [record["metrics"][metric] for record in own]
    entries = [record["entries"] for record in own if record["entries"] is not None]
    return {
        "task": task,
        "metric": metric,
        "method": own[0]["method"],
        "n": sum(record["n"] for record in own),
        "value": sum(values) / len(values),
        "difference": None if own[0]["method"] == FULL else _difference(metric, pairs),
        "entries": max(entries, default=None),
        "prompts": sum(record["prompts"] for record in own),
        "uncompressed": sum(record["uncompressed"] for record in own),
        "reason": next((record["reason"] for record in own if record["reason"]), None),
    }


def _difference(metric: str, pairs: Sequence[tuple[Record, Record]]) -> str | None:
    """The paired difference; None of a metric that is no mean over documents."""
    name, _, kind = metric.partition(",")
    columns: tuple[list, ...] = ([], [], [], [])
    for records in pairs:
        scores = [
            {
                d["document"]: d[name]
                for d in record["documents"]
                if d["filter"] == kind and name in d
            }
            for record in records
        ]
        for record, own in zip(records, scores):
            if not own or not math.isclose(
                sum(own.values()) / len(own), record["metrics"][metric], abs_tol=1e-9
            ):
                return None
        for document in scores[0]:
            values = scores[0][document], scores[1][document], document, records[0]["task"]
            for column, value in zip(columns, values):
                column.append(value)
    return difference(*columns).told()


def table(summary: Sequence[dict[str, Any]]) -> Table:
    """A row a task, metric and method."""
    columns = ["task", "method", "n", "value", "against full", "entries"]
    made, before = Table(TITLE, _remark(summary), columns), ""
    for row in summary:
        place = f"{row['task']}, {row['metric'].removesuffix(',none')}"
        nothing = 0 < row["prompts"] == row["uncompressed"]
        made.add(
            "" if place == before else place,
            row["method"],
            str(row["n"]),
            "not compressed" if nothing else f"{row['value']:.3f}",
            "" if nothing else row["difference"] or "",
            "all" if row["entries"] is None else f"{row['entries']:,}",
        )
        before = place
    return made


def _remark(summary: Sequence[dict[str, Any]]) -> str:
    """Which prompts were left as they were."""
    told = {
        f"Not compressed: {row['uncompressed']} of {row['prompts']} prompts of {row['task']} by {row['method']} "
        f"({row['reason']}).": None
        for row in summary
        if row["reason"] and row["task"] != MEAN
    }
    return " ".join(told)


def markdown(result: dict[str, Any]) -> str:
    made = table(result["summary"])
    parts = [f"# {TITLE}", setting_text(result), REMARK, as_markdown(made), made.remark]
    return "\n\n".join(part for part in parts if part) + "\n"
