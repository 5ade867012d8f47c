"""Right answers by policy and length, and the tables made of them."""

import itertools
from typing import Any

from ..engine.report import format_bytes
from ..reporting.table import Table, as_markdown, setting_text
from .results import Record

REMARK = (
    "Right answers of those asked for; an answer is right if the exact value stands in it. Entries are those kept per "
    "KV head, the most of any layer; under schedule=block up to `block` more are held until the next eviction. KV "
    "memory is read from the arrays, once the prompt is compressed, or of a full cache when the answer is done."
)


def summarise(records: list[Record]) -> list[dict[str, Any]]:
    """One JSON object a policy and length, policies first; `reason` is set if a prompt was not compressed."""
    groups: dict[str, dict[int, list[Record]]] = {}
    for record in records:
        groups.setdefault(record["policy"], {}).setdefault(record["length"], []).append(record)
    return [
        {
            "policy": policy,
            "length": length,
            "right": sum(r["right"] for r in group),
            "asked": len(group),
            "entries": max(r["entries"] for r in group),
            "kv_bytes": max(r["kv_bytes"] for r in group),
            "reason": next((r["reason"] for r in group if r["reason"] is not None), None),
        }
        for policy, lengths in groups.items()
        for length, group in lengths.items()
    ]


def table(summary: list[dict[str, Any]], title: str) -> Table:
    """A row a policy; for each length the right answers, the entries and the KV memory."""
    lengths = sorted({s["length"] for s in summary})
    columns = ["policy"]
    for length in lengths:
        columns += [f"{length:,} tokens", "entries", "KV memory"]
    remarks = [
        f"Not compressed, so not counted: {s['policy']} at {s['length']:,} tokens ({s['reason']})."
        for s in summary
        if s["reason"] is not None
    ]
    cells = {(s["policy"], s["length"]): _cells(s) for s in summary}
    rows = [
        [policy, *itertools.chain.from_iterable(cells[policy, length] for length in lengths)]
        for policy in dict.fromkeys(s["policy"] for s in summary)
    ]
    return Table(title, " ".join([REMARK, *remarks]), columns, rows)


def _cells(found: dict[str, Any]) -> list[str]:
    right = f"{found['right']}/{found['asked']}"
    if found["reason"] is not None:
        right = "not compressed"
    return [right, f"{found['entries']:,}", format_bytes(found["kv_bytes"])]


def markdown(result: dict[str, Any], plots: list[str]) -> str:
    """A page: setting, table, and the heat maps with the file names `plots`."""
    made = table(result["summary"], f"Retrieval: {result['task']}")
    pictures = "\n".join(f"![{plot}](<{plot}>)" for plot in plots)
    parts = [f"# {made.title}", setting_text(result), made.remark, as_markdown(made), pictures]
    return "\n\n".join(parts) + "\n"
