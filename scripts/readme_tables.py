"""The README's tables: the policies, and what was measured, from the results in docs/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import policies_page
from results_page import table

from mlx_snapkv.engine.report import format_bytes

DOCS = Path(__file__).resolve().parent.parent / "docs"

# Which of the figures are shown.
CONTEXT, LONG, RESIDENT = 32768, 16384, 32
SNAPKV, WINDOW = "snapkv:budget=12.5%", "streaming_llm:budget=12.5%,schedule=once"


def filled(readme: str) -> str:
    """The README with its tables as they are now."""
    text = between(readme, "policies", policies_page.summary_table("docs/policies.md"))
    return between(text, "results", results())


def results() -> list[str]:
    """What was measured, as Markdown lines."""
    rows = [*_fidelity(), *_speed(), *_bounded(), _turns(), _book(), _bits()]
    return table(("measured", "full cache", "compressed", "page", "printed by"), rows)


def between(text: str, name: str, lines: list[str]) -> str:
    """A page with these lines between the marks of this name."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = text.split(start)
    _, after = rest.split(end)
    return "\n".join([before + start, "", *lines, "", end + after])


def load_result(name: str) -> dict[str, Any]:
    return json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))


def _source(name: str, command: str) -> tuple[str, str]:
    return f"[{name}](docs/{name}.md)", f"`{command}`"


def one_row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The row that has all these values."""
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def _pair(full: Any, ours: Any, shown: Callable[[Any], str]) -> tuple[str, str]:
    return shown(full), shown(ours)


def _speed() -> list[tuple[str, ...]]:
    rows = load_result("benchmarks")["decode"]
    full = one_row(rows, context=CONTEXT, kind="full")
    ours = one_row(rows, context=CONTEXT, kind="snapkv")
    what = f"after {CONTEXT:,} tokens, SnapKV with {_share(full, ours)} of the entries"
    source = _source("benchmarks", "make bench")
    speeds = _pair(full, ours, lambda row: f"{row['tokens_per_second']:.1f}")
    sizes = _pair(full, ours, lambda row: format_bytes(row["kv_bytes"]))
    return [
        (f"tokens decoded per second {what} (random LLaMA)", *speeds, *source),
        ("KV memory then", *sizes, *source),
    ]


def _bounded() -> list[tuple[str, ...]]:
    rows = load_result("benchmarks")["bounded"]
    full = one_row(rows, context=LONG, kind="full")
    ours = one_row(rows, context=LONG, kind="bounded")
    source = _source("benchmarks", "make bench")
    seconds = _pair(full, ours, lambda row: f"{row['prefill_seconds']:.1f} s")
    peaks = _pair(full, ours, lambda row: format_bytes(row["peak_bytes"]))
    what = f"seconds to read {LONG:,} tokens, `{ours['contender']}` (random LLaMA)"
    return [(what, *seconds, *source), ("peak memory then", *peaks, *source)]


def _fidelity() -> list[tuple[str, ...]]:
    """KL of text and known answers, of the models measured."""
    rows = []
    for part in load_result("quality")["parts"]:
        if part["task"] != "fidelity":
            continue
        model = part["model"].rpartition("/")[2]
        for setting, what in (("text", "text that goes on"), ("known", "the full cache's answer")):
            own = [s for s in part["summary"] if s["setting"] == setting]
            kl = {s["method"]: s["kl"]["mean"] for s in own}
            told = f"SnapKV {kl[SNAPKV]:.3f}, StreamingLLM {kl[WINDOW]:.3f}"
            pieces = f"{own[0]['pieces']} essays of {part['length']:,} tokens"
            named = f"KL to the full cache with 1/8 of the entries, {what}, nats a token (`{model}`, {pieces})"
            rows.append((named, "0", told, *_source("quality", "make eval")))
    return rows


def _turns() -> tuple[str, ...]:
    result = load_result("turns")
    rows = [row for row in result["rows"] if row["model"] == "demo"]
    what = f"{result['turns']} facts asked for one a turn, SnapKV with 1/{result['share']} (`demo`)"
    kept = {way: right_of(one_row(rows, way=f"SnapKV, {way}")) for way in ("recall", "drop")}
    shown = ", ".join(f"`{way}` {right}" for way, right in kept.items())
    full = right_of(one_row(rows, way="full cache"))
    return what, full, shown, *_source("turns", "python scripts/measure_turns.py")


def _book() -> tuple[str, ...]:
    result = load_result("book")
    rows = [row for row in result["rows"] if (row["about"], row["model"]) == ("shares", "demo")]
    length = min(row["tokens"] for row in rows)
    rows = [row for row in rows if row["tokens"] == length]
    what = f"{result['facts']} facts of {length:,} tokens asked for one a turn, 1/{RESIDENT} resident (`demo`)"
    shown = {"all on disk": "this", "`keydiff` alone": "KeyDiff alone"}
    ours = ", ".join(
        f"{name} {right_of(one_row(rows, way=way, share=RESIDENT))}" for name, way in shown.items()
    )
    return what, right_of(one_row(rows, way="full cache")), ours, *_source("book", "make eval")


def _bits() -> tuple[str, ...]:
    rows = [row for row in load_result("kv-bits")["rows"] if row["model"] == "demo"]
    snapkv = next(row["policy"] for row in rows if row["policy"].startswith("snapkv:"))
    full = one_row(rows, policy="full cache", bits=None)
    ours = one_row(rows, policy=snapkv, bits=4)
    share = f"{_share(full, one_row(rows, policy=snapkv, bits=None))} of the entries in 4 bits"
    what = f"facts found in {full['length']:,} tokens, SnapKV with {share}; KV memory (`demo`)"
    found = _pair(full, ours, lambda row: f"{right_of(row)}, {format_bytes(row['kv_bytes'])}")
    return what, *found, *_source("kv-bits", "make eval")


def _share(full: dict[str, Any], ours: dict[str, Any]) -> str:
    return f"1/{round(full['kv_bytes'] / ours['kv_bytes'])}"


def right_of(row: dict[str, Any]) -> str:
    return f"{row['right']}/{row['asked']}"
