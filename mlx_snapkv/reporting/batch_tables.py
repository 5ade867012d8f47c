"""What is told of many prompts at once."""

from typing import Any

from ..engine.report import format_bytes
from .table import Table

WHO = ["prompts", "tokens each", "cache"]


def together(result: dict[str, Any]) -> Table:
    table = Table(
        "Decoding many requests together",
        "Steps of mlx-lm's BatchGenerator (the full and the rotating cache) and of ours while all requests decode, "
        "medians; the caches hold random entries. KV memory is that of the arrays, with their room.",
        [*WHO, "ms/step", "tokens/s", "speed-up", "KV memory", "of the full cache"],
    )
    for r, full in _pairs(result):
        table.add(
            *_who(r),
            f"{1000 * r['step_seconds']:.1f}",
            f"{r['tokens_per_second']:.1f}",
            f"{r['tokens_per_second'] / full['tokens_per_second']:.2f}x",
            format_bytes(r["kv_bytes"]),
            f"{r['kv_bytes'] / full['kv_bytes']:.4f}",
        )
    return table


def whole_runs(result: dict[str, Any]) -> Table:
    n = max((r["answer"] for r, _ in _pairs(result)), default=0)
    table = Table(
        "Many prompts at once",
        f"Random prompts, given at once, until {n} tokens are answered to each; one run each, ratios to the full "
        'cache. "First token": of the first request, the middle one and the last; mlx-lm reads up to eight prompts '
        'together, we read one at a time. "Decoding" is mlx-lm\'s own count of tokens/s, also while others are read '
        "and few decode.",
        [*WHO, "whole run", "first token", "decoding", "peak memory"],
    )
    for r, full in _pairs(result):
        first = r["first_seconds"]
        some = [first[0], first[len(first) // 2], first[-1]] if len(first) > 1 else first
        table.add(
            *_who(r),
            f"{r['run_seconds']:.1f} s, {r['run_seconds'] / full['run_seconds']:.3f}",
            " / ".join(f"{seconds:.1f}" for seconds in some) + " s",
            f"{r['run_tokens_per_second']:.1f}",
            f"{format_bytes(r['peak_bytes'])}, {r['peak_bytes'] / full['peak_bytes']:.3f}",
        )
    return table


def _pairs(result: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every record, and that of the full cache with as many prompts as long."""
    records = result.get("batches", [])
    full = {(r["context"], r["batch"]): r for r in records if r["kind"] == "full"}
    return [(r, full[r["context"], r["batch"]]) for r in records]


def _who(record: dict[str, Any]) -> list[str]:
    return [f"{record['batch']}", f"{record['context']:,}", record["contender"]]
