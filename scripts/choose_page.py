"""docs/choose.md: the table of `mlx-snapkv policies --choose`, with its figures from the results in docs/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from readme_tables import load_result, one_row, right_of
from results_page import table

from mlx_snapkv.cli.choices import CHOICES
from mlx_snapkv.engine.report import format_bytes

PAGE = """# Which one to take

Written by `python scripts/write_docs.py`: the rows from `mlx-snapkv policies --choose`, the figures from the results of
the pages they link to, never typed. They are what the embedded models, or a random LLaMA where it is about memory, gave
on a CPU: they tell policies apart, and are no promise for a large model. Why, and what else there is:
[choosing-a-policy.md](choosing-a-policy.md).

{rows}

## Commands

Put your own for MODEL, TEXT and QUESTION. Budgets are shares of the prompt; a number of entries, such as `budget=4096`,
keeps memory the same for any prompt. Recent windows are those of short prompts
(quality.md had 48 entries for questions): leave `n_window` out where the budget is in the thousands.

{commands}
To see what a policy keeps of your own prompt: [`mlx-snapkv inspect`](commands.md#mlx-snapkv-inspect).
"""

BATCH = 8  # prompts at once
DISTANCE = 1024  # tokens between a fact and its use in a long answer
READ = 16384  # tokens read


def page() -> str:
    """docs/choose.md."""
    rows = [(c.when, c.why, FIGURES[c.name](), _links(c.pages)) for c in CHOICES]
    commands = "".join(
        f"{c.when[0].upper()}{c.when[1:]}:\n\n```\n{_folded(c.command)}\n```\n\n" for c in CHOICES
    )
    return PAGE.format(
        rows="\n".join(table(("you have", "what to do", "measured", "table"), rows)),
        commands=commands.rstrip("\n") + "\n",
    )


def _links(pages: tuple[str, ...]) -> str:
    return ", ".join(f"[{page.partition('.md')[0]}]({page})" for page in pages)


def _folded(command: str) -> str:
    """A command in lines that fit a page, broken before its options."""
    lines = [""]
    for word in command.replace(" --", "\n--").split("\n"):
        fits = len(lines[-1]) + len(word) < 100 or not lines[-1]
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if fits else [lines[-1], word]
    return " \\\n    ".join(lines)


def _quality(part: str, share: int, line: str) -> dict[str, Any]:
    rows = [row for row in load_result("quality")["rows"] if row["part"] == part]
    full = one_row(rows, line="full cache")
    return {"full": full, **one_row(rows, line=line, share=share)}


def _tasks(part: str, share: int, line: str, than: str) -> str:
    """Right answers to the harder tasks, beside those of another way, and KV memory."""
    ours, other = _quality(part, share, line), _quality(part, share, than)
    full = ours["full"]
    return (
        f"{ours['score']:.2f} of the tasks right with 1/{share} of the entries (`{than}` {other['score']:.2f}, "
        f"full cache {full['score']:.2f}); KV memory {_bytes(full['kv_bytes'], ours['kv_bytes'])}"
    )


def _turns(model: str) -> str:
    rows = [row for row in load_result("turns")["rows"] if row["model"] == model]
    full, recall, drop = (
        one_row(rows, way=way) for way in ("full cache", "SnapKV, recall", "SnapKV, drop")
    )
    small = _bytes(full["decoding_bytes"], recall["decoding_bytes"])
    return (
        f"{right_of(recall)} facts found, one a turn (`drop` {right_of(drop)}, full cache {right_of(full)}); "
        f"decoded from {small}"
    )


def _agent() -> str:
    rows = load_result("benchmarks-batches")["batches"]
    full, ours = (one_row(rows, kind=kind, batch=BATCH) for kind in ("full", "snapkv"))
    middle = [sorted(row["first_seconds"])[len(row["first_seconds"]) // 2] for row in (full, ours)]
    return (
        f"{BATCH} prompts of {full['context']:,} tokens at once: done in {full['run_seconds']:.0f} s → "
        f"{ours['run_seconds']:.0f} s, the middle one's first token after {middle[0]:.0f} s → {middle[1]:.0f} s, "
        f"peak memory {_bytes(full['peak_bytes'], ours['peak_bytes'])} "
        "(with `drop`; `recall` keeps all entries as well)"
    )


def _book() -> str:
    found = [row for row in load_result("book")["rows"] if row["about"] == "shares"]
    rows = [row for row in found if row["model"] == "demo" and row["tokens"] == 4096]
    ours, alone = (one_row(rows, way=way, share=32) for way in ("this", "KeyDiff alone"))
    read = load_result("benchmarks-book")["book"]
    full, book = (one_row(read, context=READ, contender=name) for name in ("full cache", "book"))
    return (
        f"{right_of(ours)} facts found with 1/32 resident (`keydiff` alone {right_of(alone)}); "
        f"peak memory of reading {READ:,} tokens {_bytes(full['peak_bytes'], book['peak_bytes'])}"
    )


def _long() -> str:
    first = next(found for found in load_result("long-answers") if found["model"] == "demo")
    rows = [
        row for row in first["rows"] if row["distance"] == DISTANCE and row["place"] == "answer"
    ]
    ours, slide = (one_row(rows, way=way) for way in ("keydiff", "slide"))
    return f"a fact that the answer told {DISTANCE:,} tokens ago: {right_of(ours)} (`slide` {right_of(slide)})"


def _small() -> str:
    rows = [row for row in load_result("kv-bits")["rows"] if row["model"] == "demo"]
    full = one_row(rows, policy="full cache", bits=None)
    ours = next(row for row in rows if " then " in row["policy"] and row["bits"] == 4)
    read = load_result("benchmarks")["bounded"]
    whole, bounded = (one_row(read, context=READ, kind=kind) for kind in ("full", "bounded"))
    return (
        f"{right_of(ours)} facts found; KV memory {_bytes(full['kv_bytes'], ours['kv_bytes'])}; "
        f"peak memory of reading {READ:,} tokens within a budget {_bytes(whole['peak_bytes'], bounded['peak_bytes'])}"
    )


def _bytes(before: float, after: float) -> str:
    return f"{format_bytes(before)} → {format_bytes(after)}"


FIGURES: dict[str, Callable[[], str]] = {
    "one": lambda: _tasks("known", 8, "snapkv, adaptive", "snapkv"),
    "several": lambda: _tasks("known", 16, "snapkv, recall, unsure", "snapkv"),
    "many": lambda: _turns("demo"),
    "later": lambda: _tasks("later", 4, "kvzip, adaptive", "snapkv"),
    "agent": _agent,
    "book": _book,
    "long": _long,
    "hybrid": lambda: _turns("demo-qwen3-next"),
    "small": _small,
}
