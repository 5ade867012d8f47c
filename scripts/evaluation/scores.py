"""Summaries of answer scores, as JSON and as tables."""

import itertools
from collections.abc import Callable
from operator import itemgetter
from statistics import fmean

from mlx_snapkv.measure.intervals import LEAST_TEXTS, difference, interval
from mlx_snapkv.measure.methods import ANSWER_SETTINGS, FULL_CACHE
from mlx_snapkv.measure.records import Record
from mlx_snapkv.measure.tables import Page, Summary, Table, grouped, table_of
from mlx_snapkv.planning.units import format_bytes

SCORES = (
    "All methods answer the same questions. The score, 0 to 100, is the mean over tasks of equal weight. The "
    f"difference to the full cache is paired. With at least {LEAST_TEXTS} documents per task, it has a 95% interval, "
    "bootstrapped over the documents of each task. Question known: the compressed prompt contains the question. "
    "Question later: the document is compressed before the question is read. Entries: kept per KV head, the maximum "
    "over layers; a block policy holds up to one block more. KV memory: all entries held in memory after the "
    "compression, read from the arrays; a full cache's figure may include the answer."
)
BEFORE = (
    "Before compression: the share of the answers' tokens that were decoded before the prompt was compressed, on all "
    "entries or on those that block prefill had kept. These tokens say nothing about the entries kept."
)


def summarise(records: list[Record]) -> Summary:
    """Return a JSON object for each method, setting and length, with scores from 0 to 1.

    `texts` is the number of documents in the task that has fewest.
    `uncompressed` is the number of prompts that the policy did not compress, and `reason` says why the first one was
    not. `before` is how many of the `answer_tokens` were decoded before the compression.
    """
    question_of = itemgetter("setting", "length", "task", "document", "question")
    full_scores = {
        question_of(record): record["score"] for record in records if record["method"] == FULL_CACHE
    }
    summaries = []
    groups = grouped(records, "method", "setting", "length")
    for (method, setting, length), group_records in groups.items():
        task_groups = grouped(group_records, "task")
        score_by_task = {
            task: fmean(record["score"] for record in task_records)
            for (task,), task_records in task_groups.items()
        }
        difference_to_full = difference(
            scores=[record["score"] for record in group_records],
            reference=[full_scores[question_of(record)] for record in group_records],
            groups=[record["document"] for record in group_records],
            tasks=[record["task"] for record in group_records],
        )
        reasons = [record["reason"] for record in group_records if record["reason"]]
        summaries.append(
            {
                "method": method,
                "setting": setting,
                "length": length,
                "asked": len(group_records),
                "texts": min(
                    len({record["document"] for record in task_records})
                    for task_records in task_groups.values()
                ),
                "score": fmean(score_by_task.values()),
                "by_task": score_by_task,
                "difference": difference_to_full,
                "entries": _maximum(group_records, "entries"),
                "kv_bytes": _maximum(group_records, "kv_bytes"),
                "answer_tokens": sum(record["answer_tokens"] for record in group_records),
                "before": sum(record["before"] for record in group_records),
                "uncompressed": len(reasons),
                "reason": reasons[0] if reasons else None,
            }
        )
    return summaries


def _maximum(records: list[Record], name: str) -> int | None:
    """Return a field's maximum, or None if no record has a value."""
    return max(record[name] or 0 for record in records) or None


def tables(summary: Summary) -> list[Table]:
    """Return two tables for each length and setting: the figures of all methods, and their scores by task."""
    all_tables = []
    lengths = sorted({row["length"] for row in summary}, key=lambda length: length or 0)
    for length, setting in itertools.product(lengths, ANSWER_SETTINGS):
        rows = [row for row in summary if row["length"] == length and row["setting"] == setting]
        if not rows:
            continue
        heading = f"Question {setting}"
        if length:
            heading += f", {length:,} tokens"
        all_tables.append(_score_table(rows, heading))
        n_tasks = len(rows[0]["by_task"])
        if n_tasks > 1:
            all_tables.append(_task_table(rows, f"{heading}, by task"))
    return all_tables


def _score_table(summary: Summary, heading: str) -> Table:
    """Return a table of all methods' figures."""

    def score(row: Record) -> str:
        if row["uncompressed"] == row["asked"]:
            return "not compressed"
        return f"{100 * row['score']:.1f}"

    def against_full(row: Record) -> str:
        if row["method"] == FULL_CACHE or row["uncompressed"] == row["asked"]:
            return ""
        figures = row["difference"]
        is_equal = not figures["better"] and not figures["worse"]
        if is_equal:
            return "0, each scored the same"
        return interval(figures, "+.1f", row["texts"], 100)

    def before(row: Record) -> str:
        is_full = row["method"] == FULL_CACHE
        return "" if is_full else f"{row['before'] / row['answer_tokens']:.0%}"

    def memory(row: Record) -> str:
        return "" if row["kv_bytes"] is None else format_bytes(row["kv_bytes"])

    def entries(row: Record) -> str:
        return "all" if row["entries"] is None else f"{row['entries']:,}"

    remark = "Not compressed: {uncompressed} of {asked} prompts of {method} ({reason})."
    remarks = [remark.format_map(row) for row in summary if row["reason"]]
    columns: dict[str, Callable[[Record], str]] = {
        "method": itemgetter("method"),
        "n": "{asked}".format_map,
        "score": score,
        "against full": against_full,
        "before compression": before,
        "entries": entries,
        "KV memory": memory,
    }
    return table_of(heading, " ".join([*remarks, BEFORE]), columns, summary)


def _task_table(summary: Summary, heading: str) -> Table:
    """Return a table of scores by task. If there are more tasks than methods, tasks are rows."""
    tasks = list(dict.fromkeys(task for row in summary for task in row["by_task"]))
    cells = [["method", *tasks]]
    for row in summary:
        scores = (row["by_task"].get(task) for task in tasks)
        score_cells = ("" if score is None else f"{100 * score:.1f}" for score in scores)
        cells.append([row["method"], *score_cells])
    if len(tasks) > len(summary):
        cells[0][0] = "task"
        cells = [list(column) for column in zip(*cells)]
    header, *rows = cells
    return Table(heading, "", header, rows)


def scores_page(title: str, remark: str) -> Page:
    """Return an evaluation's page. `remark` explains how an answer is scored."""
    return Page(title, f"{remark} {SCORES}", summarise, tables)
