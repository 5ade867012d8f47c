"""The table and the page of lm-evaluation-harness' tasks, made of their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..reporting.table import Table, as_page
from .answering import FULL
from .loop import Record
from .tables import difference

TITLE = "lm-evaluation-harness"
REMARK = (
    "Metrics as lm-evaluation-harness has them, 'mean' over tasks each weighing the same. Against full: the paired "
    "difference to the full cache with a 95% interval bootstrapped over documents, of metrics that are means over "
    "documents. Entries: kept per KV head, the most of any layer and prompt."
)
MEAN = "mean"


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One JSON object a task, metric and method; then a metric's means over the tasks, if there are several."""
    methods = list(dict.fromkeys(record["method"] for record in records))
    of = {(record["task"], record["method"]): record for record in records}
    tasks: dict[str, list[str]] = {}  # by metric
    rows = []
    for task in dict.fromkeys(record["task"] for record in records):
        for metric, value in of[task, FULL]["metrics"].items():
            if value == -1 and metric[0].isdigit():
                continue  # RULER's metrics are named by lengths, and none of its prompts has this one
            tasks.setdefault(metric, []).append(task)
            rows.append((task, metric, [task]))
    rows += [(MEAN, metric, own) for metric, own in tasks.items() if len(own) > 1]
    return [
        _row(title, metric, [(of[task, method], of[task, FULL]) for task in own])
        for title, metric, own in rows
        for method in methods
    ]


def _row(task: str, metric: str, pairs: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
    """One method's figures of a metric, from its record of each task and the full cache's."""
    own = [record for record, _ in pairs]
    return {
        "task": task,
        "metric": metric,
        "method": own[0]["method"],
        "n": sum(record["n"] for record in own),
        "value": sum(record["metrics"][metric] for record in own) / len(own),
        "difference": None if own[0]["method"] == FULL else _difference(metric, pairs),
        "entries": max((r["entries"] for r in own if r["entries"] is not None), default=None),
        "prompts": sum(record["prompts"] for record in own),
        "uncompressed": sum(record["uncompressed"] for record in own),
        "reason": next((record["reason"] for record in own if record["reason"]), None),
    }


def _difference(metric: str, pairs: Sequence[tuple[Record, Record]]) -> str | None:
    """The paired difference; None of a metric that is no mean over documents."""
    name, _, kind = metric.partition(",")
    rows = []
    for own, full in pairs:
        scores = [
            {d["document"]: d[name] for d in r["documents"] if d["filter"] == kind and name in d}
            for r in (own, full)
        ]
        for record, found in zip((own, full), scores):
            value = sum(found.values()) / len(found) if found else math.nan
            if not math.isclose(value, record["metrics"][metric], abs_tol=1e-9):
                return None
        rows += [
            (x, scores[1][document], document, own["task"]) for document, x in scores[0].items()
        ]
    return difference(*zip(*rows)).text()  # type: ignore[arg-type]


def table(summary: Sequence[dict[str, Any]]) -> Table:
    """A row a task, metric and method; the remark says which prompts were left as they were."""
    remarks = [
        f"Not compressed: {row['uncompressed']} of {row['prompts']} prompts of {row['task']} by {row['method']} "
        f"({row['reason']})."
        for row in summary
        if row["reason"] and row["task"] != MEAN
    ]
    columns = ["task", "method", "n", "value", "against full", "entries"]
    made, before = Table(TITLE, " ".join(dict.fromkeys(remarks)), columns), ""
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


def markdown(result: dict[str, Any]) -> str:
    return as_page(TITLE, result, REMARK, [table(result["summary"])])
