"""Summaries of answer scores, as JSON and as tables."""

import itertools
from collections.abc import Callable
from operator import itemgetter
from statistics import fmean

from mlx_snapkv.measure.intervals import difference, interval
from mlx_snapkv.measure.methods import ANSWER_SETTINGS, FULL_CACHE
from mlx_snapkv.measure.records import Record
from mlx_snapkv.measure.tables import Page, Summary, Table, grouped, table_of
from mlx_snapkv.planning.units import format_bytes

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


def summarise(records: list[Record]) -> Summary:
    """Return a JSON object for each method, setting and length, with scores from 0 to 1.

    `uncompressed` is the number of prompts that the policy did not compress, and `reason` says why the first one was
    not. `before` is how many of the `answer_tokens` were decoded before the compression; None if the records do not
    say.
    """
    place = itemgetter("setting", "length", "task", "document", "question")
    full = {place(r): r["score"] for r in records if r["method"] == FULL_CACHE}
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
                **{key: _total(own, key) for key in ("answer_tokens", "before")},
                "uncompressed": len(reasons),
                "reason": reasons[0] if reasons else None,
            }
        )
    return found


def _total(records: list[Record], key: str) -> int | None:
    return sum(r[key] for r in records) if all(key in r for r in records) else None


def tables(summary: Summary) -> list[Table]:
    """Return two tables for each length and setting: the figures of all methods, and their scores by task."""
    result = []
    lengths = sorted({s["length"] for s in summary}, key=lambda n: n or 0)
    for length, setting in itertools.product(lengths, ANSWER_SETTINGS):
        own = [s for s in summary if (s["length"], s["setting"]) == (length, setting)]
        if own:
            heading = f"Question {setting}" + (f", {length:,} tokens" if length else "")
            result.append(_scores(own, heading))
            if len(own[0]["by_task"]) > 1:
                result.append(_by_task(own, f"{heading}, by task"))
    return result


def _scores(summary: Summary, heading: str) -> Table:
    def score(s: Record) -> str:
        return "not compressed" if s["uncompressed"] == s["asked"] else f"{100 * s['score']:.1f}"

    def against_full(s: Record) -> str:
        if s["method"] == FULL_CACHE or s["uncompressed"] == s["asked"]:
            return ""
        found = s["difference"]
        changed = found["better"] or found["worse"]
        return interval(found, "+.1f", 100) if changed else "0, each scored the same"

    def memory(s: Record) -> str:
        return "" if s["kv_bytes"] is None else format_bytes(s["kv_bytes"])

    left = "Not compressed: {uncompressed} of {asked} prompts of {method} ({reason}).".format_map
    remarks = [left(s) for s in summary if s["reason"]]
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
    """Return the percentage of answer tokens decoded before the compression, or "" if it is unknown."""
    if s["method"] == FULL_CACHE or s.get("before") is None:
        return ""
    return f"{s['before'] / s['answer_tokens']:.0%}"


def _by_task(summary: Summary, heading: str) -> Table:
    """Return a table of scores by task. If there are more tasks than methods, tasks are rows."""
    names = list(dict.fromkeys(name for s in summary for name in s["by_task"]))
    cells = [["method", *names]]
    for s in summary:
        scores = (s["by_task"].get(name) for name in names)
        cells.append([s["method"], *("" if x is None else f"{100 * x:.1f}" for x in scores)])
    if len(names) > len(summary):
        cells[0][0] = "task"
        cells = [*map(list, zip(*cells))]
    return Table(heading, "", cells[0], cells[1:])


def scores_page(title: str, remark: str) -> Page:
    """Return an evaluation's page. `remark` explains how an answer is scored."""
    return Page(title, f"{remark} {SCORES}", summarise, tables)
