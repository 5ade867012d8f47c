"""A result as tables: the same for the terminal and for the docs."""

from typing import Any

from ..engine.report import format_bytes
from . import batch_tables, server_tables
from .plots import figures
from .table import Table, as_markdown, setting_text


def tables(result: dict[str, Any]) -> list[Table]:
    """All tables of a result, in reading order; those without records are left out."""
    made = [
        part(result)
        for part in (
            _decoding,
            _verified,
            _requests,
            _bounded,
            _books,
            _questions,
            batch_tables.together,
            batch_tables.whole_runs,
            server_tables.waiting,
            server_tables.holding,
            _needles,
        )
    ]
    return [table for table in made if table.rows]


def markdown(result: dict[str, Any], name: str) -> str:
    """A page of the docs: setting, tables, and the plots whose file names start with `name`."""
    what = "Figures are for this machine; the ratios are what carries over, and only to machines of its kind."
    lines = ["# Benchmarks", "", f"{setting_text(result)} {what}"]
    for table in tables(result):
        lines += ["", f"## {table.title}", "", table.remark, "", as_markdown(table)]
    if drawn := figures(result):
        lines += ["", "## Plots", "", *(f"![{plot}]({name}-{plot}.png)" for plot in drawn)]
    return "\n".join(lines) + "\n"


def _of_contexts(records: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["context"], []).append(record)
    return groups


def _decoding(result: dict[str, Any]) -> Table:
    table = Table(
        "Decoding by context length",
        "Steps of all caches in turn, medians; the caches hold random entries, since only shapes matter for speed. "
        '"Same entries" compares with mlx-lm\'s plain cache holding as many: what a step costs at least. '
        '"4 fed, 3 back" is what a draft\'s check costs the caches of all layers, attention left out.',
        [
            "context",
            "cache",
            "entries",
            "tokens/s",
            "speed-up",
            "same entries",
            "4 fed, 3 back",
            "KV memory",
        ],
    )
    for context, records in _of_contexts(result["decode"]).items():
        full = records[0]["step_seconds"]
        plain = next((r["step_seconds"] for r in records if r["kind"] == "plain"), None)
        for r in records:
            own = r["kind"] == "snapkv" and plain is not None
            table.add(
                f"{context:,}",
                r["contender"],
                f"{r['entries']:,}",
                f"{r['tokens_per_second']:.1f}",
                f"{full / r['step_seconds']:.2f}x",
                f"{r['step_seconds'] / plain:.3f}" if own else "",
                f"{1000 * r['rollback_seconds']:.2f} ms" if "rollback_seconds" in r else "",
                format_bytes(r["kv_bytes"]),
            )
    return table


def _verified(result: dict[str, Any]) -> Table:
    table = Table(
        "Verified answers by context length",
        "verify=unsure where a token votes with the given chance, and verify=all where a draft is right with the given "
        'chance, whatever the random entries make of it. "Drafted" is the share of the tokens that were, the last '
        "column the bytes of keys and values that a token reads.",
        ["context", "cache", "tokens/s", "speed-up", "drafted", "entries read"],
    )
    for context, records in _of_contexts(result.get("verified", [])).items():
        full = records[0]["tokens_per_second"]
        for r in records:
            table.add(
                f"{context:,}",
                r["contender"],
                f"{r['tokens_per_second']:.1f}",
                f"{r['tokens_per_second'] / full:.2f}x",
                f"{r['accepted']:.0%}" if "accepted" in r else "",
                format_bytes(r["bytes_per_token"]),
            )
    return table


def _requests(result: dict[str, Any]) -> Table:
    trials = max((r["trials"] for r in result["requests"]), default=0)
    table = Table(
        "Whole requests",
        f"Seconds until the first token, selection included; medians of {trials} requests made in turn (the full cache "
        "and SnapKV; the others made one, kv-bits at the first length only). "
        'KV memory is read from the arrays after the answer. Ratios are to the full cache, "entries" is the part kept. '
        "The rotating cache is put in by hand where mlx-lm ignores --max-kv-size, as it does for this and most models.",
        ["prompt", "cache", "prefill", "selection", "peak memory", "KV memory", "entries"],
    )
    for context, records in _of_contexts(result["requests"]).items():
        full = records[0]
        for r in records:
            selection = r["selection_seconds"]
            share = selection / r["prefill_seconds"]
            table.add(
                f"{context:,}",
                r["contender"],
                f"{r['prefill_seconds']:.2f} s, {r['prefill_seconds'] / full['prefill_seconds']:.3f}",
                f"{selection:.2f} s, {share:.1%}" if selection else "",
                f"{format_bytes(r['peak_bytes'])}, {r['peak_bytes'] / full['peak_bytes']:.3f}",
                f"{format_bytes(r['kv_bytes'])}, {r['kv_bytes'] / full['kv_bytes']:.4f}",
                f"{min(1, r['entries'] / context):.4f}",
            )
    return table


def _bounded(result: dict[str, Any]) -> Table:
    records = result["bounded"]
    table = Table(
        "Reading within a fixed budget",
        "Entries are evicted while the prompt is read; one request each. Ratios are to the shortest prompt under the "
        "same policy; KV memory is that of the buffers, room for the next block included.",
        ["prompt", "cache", "entries at most", "prefill", "eviction", "peak memory", "KV memory"],
    )
    first: dict[str, Any] = next((r for r in records if r["kind"] == "bounded"), {})
    for r in records:
        own = r["kind"] == "bounded"
        table.add(
            f"{r['context']:,}",
            r["contender"],
            f"{r['entries']:,}",
            f"{r['prefill_seconds']:.1f} s, {r['prefill_seconds'] / first['prefill_seconds']:.2f}",
            f"{r['selection_seconds']:.2f} s" if own else "",
            f"{format_bytes(r['peak_bytes'])}, {r['peak_bytes'] / first['peak_bytes']:.3f}",
            format_bytes(r["kv_bytes"]),
        )
    return table


def _books(result: dict[str, Any]) -> Table:
    records = sorted(result.get("book", []), key=_by_context)
    table = Table(
        "Reading a book",
        "A prompt of random tokens, read once. A book is read by KeyDiff within so many resident entries, and every "
        'entry goes to a file. "Process" is what the process holds itself, on Linux without the files that the system '
        'caches for it; "entries" those in memory afterwards, room for the next block included. '
        + _read_in_full(records),
        [
            "prompt",
            "cache",
            "resident",
            "read",
            "tokens/s",
            "peak",
            "process",
            "entries",
            "disk/token",
        ],
    )
    for r in records:
        disk = r["disk_bytes_per_token"]
        table.add(
            f"{r['context']:,}",
            r["contender"],
            f"{r['entries']:,}",
            f"{r['read_seconds']:.1f} s",
            f"{r['tokens_per_second']:.0f}",
            format_bytes(r["peak_bytes"]),
            format_bytes(r["own_bytes"]),
            format_bytes(r["kv_bytes"]),
            format_bytes(disk) if disk else "",
        )
    return table


def _read_in_full(records: list[dict[str, Any]]) -> str:
    """What was not measured."""
    full = [r["context"] for r in records if r["kind"] == "full"]
    if not full:
        return "The full cache was not read."
    return f"The full cache was not read beyond {max(full):,} tokens: its seconds grow with the square."


def _questions(result: dict[str, Any]) -> Table:
    table = Table(
        "Asking a book",
        "A question of 32 tokens until its answer's first token, medians of 3: read over the resident entries, votes "
        "over all of them, the best gathered, and the question read again over those.",
        ["prompt", "cache", "gathered", "question", "votes", "gathering", "read again"],
    )
    for r in sorted(result.get("book", []), key=_by_context):
        parts = [r.get(f"{part}_seconds") for part in ("vote", "gather", "read_again")]
        table.add(
            f"{r['context']:,}",
            r["contender"],
            f"{r['gathered']:,}" if r["gathered"] else "",
            f"{r['question_seconds']:.2f} s",
            *("" if seconds is None else f"{seconds:.2f} s" for seconds in parts),
        )
    return table


def _by_context(record: dict[str, Any]) -> int:
    return record["context"]


def _needles(result: dict[str, Any]) -> Table:
    table = Table(
        "Retrieval",
        "Facts hidden in one document and asked for one by one; an answer is right if the exact value stands in it.",
        ["prompt", "cache", "entries", "right"],
    )
    for r in result["needle"]:
        table.add(
            f"{r['context']:,}",
            r["contender"],
            f"{r['entries']:,}",
            f"{r['right']}/{r['questions']}",
        )
    return table
