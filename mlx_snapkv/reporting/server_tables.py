"""What is told of servers and their clients."""

import statistics
from typing import Any

from ..engine.report import format_bytes
from .table import Table

WHO = ["clients", "tokens each", "server"]


def waiting(result: dict[str, Any]) -> Table:
    n = max((r["answer"] for r, _ in _pairs(result)), default=0)
    table = Table(
        "Clients of a server",
        "Each client asks about a document of its own and then three more questions, with everything said before sent "
        f"again, streamed over HTTP. All ask at once, and again when the last is answered; {n} tokens are answered to "
        "each, since the token that ends an answer is forbidden. Seconds until the first token: the median client's "
        'and the last\'s. "Tokens/s" is of answers over the whole run, "while all answer" of the time in which every '
        "client gets tokens; the ratios are to mlx_lm.server.",
        [*WHO, "first token", "of follow-ups", "tokens/s", "while all answer"],
    )
    for r, base in _pairs(result):
        table.add(
            *_who(r),
            _seconds(r["first_seconds"]),
            _seconds(r["follow_up_seconds"]),
            _speed(r, base, "tokens_per_second"),
            _speed(r, base, "together_tokens_per_second"),
        )
    return table


def holding(result: dict[str, Any]) -> Table:
    table = Table(
        "What a server holds",
        "KV memory is that of the requests' arrays, with their room, in the median step that answers all of "
        'the first; "prefixes" those kept of all prompts for later ones, at the end. The peak is MLX\'s own, '
        '"process" what the process holds itself, on Linux without the files that the system caches for it. '
        '"Known" is the part of the follow-ups\' tokens that were not read again; an answer is right if the value '
        "stands in it, whatever follows.",
        [*WHO, "KV memory", "of mlx-lm's", "prefixes", "peak", "process", "known", "right"],
    )
    for r, base in _pairs(result):
        table.add(
            *_who(r),
            format_bytes(r["kv_bytes"]) + _of_fewer(r),
            f"{_each(r) / _each(base):.4f}",
            format_bytes(r["prefix_bytes"]),
            format_bytes(r["peak_bytes"]),
            format_bytes(r["own_bytes"]),
            f"{r['cached_tokens'] / r['follow_up_tokens']:.1%}",
            f"{r['right']}/{r['questions']}",
        )
    return table


def _pairs(result: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every record, and that of mlx-lm's server with as many clients and tokens."""
    records = result.get("server", [])
    base = {(r["context"], r["clients"]): r for r in records if r["kind"] == "mlx-lm"}
    return [(r, base[r["context"], r["clients"]]) for r in records]


def _who(record: dict[str, Any]) -> list[str]:
    return [f"{record['clients']}", f"{record['context']:,}", record["contender"]]


def _seconds(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} / {found[-1]:.2f} s"


def _speed(record: dict[str, Any], base: dict[str, Any], key: str) -> str:
    speed, usual = record[key], base[key]
    if speed is None:
        return "never"
    return f"{speed:.1f}" if usual is None else f"{speed:.1f}, {speed / usual:.2f}x"


def _each(record: dict[str, Any]) -> float:
    return record["kv_bytes"] / record["kv_requests"]


def _of_fewer(record: dict[str, Any]) -> str:
    """Where fewer requests than there are clients have answered at once."""
    n = record["kv_requests"]
    return "" if n == record["clients"] else f" of {n}"
