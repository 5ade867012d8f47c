"""Facts asked for one a turn of one reading within a fixed budget, every entry stored, and votes over all of them.

    python scripts/measure_book.py                       # writes docs/book.json and docs/book.md

Every cell is kept in build/book/cells.json when it is measured, and a later run goes on from there.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from book_page import cost, page
from results_page import ROOT, about, mlx_versions, shared_options, write

from mlx_snapkv import Conversation
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import is_right, make_haystack, token_counter
from mlx_snapkv.demo.tasks import make_task

SEED = 15_000_000
LENGTHS = (4096, 16000)
SHARES = (8, 16, 32, 64)  # one entry in so many is resident
SHARE = 32  # where one thing at a time is changed
BLOCK = 256
KERNELS = (1, 7, 13, 21, 31)
LEAST = 128  # gathered for an answer
GATHERED = (32, 64, 96, 128, 256, 512)
MEMORIES = (
    "recall", "recall:8bit", "recall:4bit", "recall:file", "recall:file:8bit", "recall:file:4bit",
)  # fmt: skip
FACTS = 10  # of a document
TASKS = ("several", "two-links", "three-links")
THIS = "recall:file"


@dataclass(frozen=True)
class Cell:
    """One figure: what is asked of which model, how its document is read, and what is remembered of it.

    Attributes:
        about: the table it stands in: "shares", "kernels", "gathered", "memories" or "tasks".
        way: its name there; task: one of `TASKS`, or "facts".
        share: one entry in so many is resident; 0 for the full cache.
        value: what is changed, if anything is.
    """

    about: str
    model: str
    tokens: int
    way: str
    policy: str | None
    memory: str
    share: int = 0
    value: str = ""
    task: str = "facts"
    verify: str | None = None


def snapkv(entries: int, kernel: int = 21, lookahead: int = 0) -> str:
    """SnapKV with so many entries, half of them recent at most.

    A book's answer looks ahead nowhere: with `lookahead`, full reading decodes the first tokens on all entries.
    """
    n_window = min(32, entries // 2)
    size = f"budget={entries},n_sink=4,n_window={n_window},obs_window={n_window}"
    return f"snapkv:{size},pool_kernel={kernel},lookahead={lookahead},min_ctx=0"


def two_stages(resident: int, gathered: int, kernel: int = 21) -> str:
    return f"keydiff:budget={resident},block={BLOCK} then {snapkv(gathered, kernel)}"


def share_cells(model: str, tokens: int) -> Iterable[Cell]:
    yield Cell("shares", model, tokens, "full cache", None, "drop")
    for share in SHARES:
        n = tokens // share
        stages = two_stages(n, max(n, LEAST))
        for way, policy, memory in (
            ("full reading, recall", snapkv(max(n, LEAST)), "recall"),
            ("KeyDiff alone", f"keydiff:budget={n},block={BLOCK}", "drop"),
            ("two stages", stages, "drop"),
            ("this", stages, THIS),
        ):
            yield Cell("shares", model, tokens, way, policy, memory, share)


def changed_cells(model: str, tokens: int) -> Iterable[Cell]:
    """One thing changed at a time."""
    n = tokens // SHARE
    about = {"model": model, "tokens": tokens, "way": "this", "share": SHARE}
    whole = {"model": model, "tokens": tokens, "memory": "recall", "share": SHARE}
    for kernel in KERNELS:
        wanted = {"policy": two_stages(n, n, kernel), "memory": THIS, "value": f"{kernel}"}
        yield Cell("kernels", **about, **wanted)
    for gathered in GATHERED:
        wanted = {"policy": two_stages(n, gathered), "memory": THIS, "value": f"{gathered}"}
        yield Cell("gathered", **about, **wanted)
        for way, lookahead in (("full reading, recall", 0), ("the same, lookahead=4", 4)):
            policy = snapkv(gathered, lookahead=lookahead)
            yield Cell("gathered", **whole, way=way, policy=policy, value=f"{gathered}")
    for memory in MEMORIES:
        yield Cell("memories", **about, policy=two_stages(n, n), memory=memory, value=memory)


def task_cells(model: str, tokens: int) -> Iterable[Cell]:
    n = tokens // SHARE
    for task in TASKS:
        yield Cell("tasks", model, tokens, "full cache", None, "drop", task=task)
        for way, policy, memory, verify in (
            ("full reading, recall", snapkv(n), "recall", None),
            ("full reading, recall, unsure", snapkv(n), "recall", "unsure"),
            ("KeyDiff alone", f"keydiff:budget={n},block={BLOCK}", "drop", None),
            ("two stages", two_stages(n, n), "drop", None),
            ("this", two_stages(n, n), THIS, None),
            ("this, unsure", two_stages(n, n), THIS, "unsure"),
        ):
            yield Cell("tasks", model, tokens, way, policy, memory, SHARE, "", task, verify)


def all_cells(models: list[str], lengths: Iterable[int]) -> list[Cell]:
    """Those that matter most first."""
    shortest, *longer = lengths
    cells = [c for model in models for c in share_cells(model, shortest)]
    cells += task_cells("demo-tasks", shortest)
    cells += [c for model in models for c in changed_cells(model, shortest)]
    cells += [c for n in longer for model in models for c in share_cells(model, n)]
    return cells


def documents(cell: Cell, tokenizer, asked: int) -> Iterable[tuple[str, list[Any]]]:
    """Documents with their questions, so many in all; the same for every way."""
    count_tokens = token_counter(tokenizer)
    n = 0
    while asked > 0:
        rng = random.Random(f"{SEED} {cell.task} {cell.tokens} {n}")
        if cell.task == "facts":
            document, questions = make_haystack(tokenizer, rng, min(FACTS, asked), cell.tokens)
        else:
            document, questions = make_task(cell.task, rng, cell.tokens, count_tokens)
        yield document, questions[:asked]
        asked -= len(questions)
        n += 1


@cache
def loaded(name: str) -> Any:
    return load_model(name)


def measure(cell: Cell, asked: int) -> dict[str, Any]:
    """The cell as a JSON object with what came of it; `wrong` are the values and answers that differ."""
    model, tokenizer = loaded(cell.model)
    wrong, report = [], None
    for document, questions in documents(cell, tokenizer, asked):
        ways = {"policy": cell.policy, "memory": cell.memory, "verify": cell.verify}
        conversation = Conversation(model, tokenizer, **ways, max_tokens=60)
        conversation.attach(document)
        for question in questions:
            said = "".join(r.text for r in conversation.send(question.question)).strip()
            right = is_right(question, said) if cell.task == "facts" else said == question.value
            if not right:
                wrong.append([question.value, said])
        report = conversation.report
    figures: dict[str, Any] = {"right": asked - len(wrong), "asked": asked, "wrong": wrong}
    if report is not None and report.book is not None:
        figures["stored_bytes"] = report.book.stored_bytes or report.book.file_bytes
    return asdict(cell) | figures


def measured(cells: list[Cell], asked: int, kept: Path) -> list[dict[str, Any]]:
    """All cells, those from the file as they are there; it is written after each of the others."""
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    rows = []
    for i, cell in enumerate(cells):
        wanted = asdict(cell) | {"asked": asked}
        row = next((r for r in found if wanted.items() <= r.items()), None)
        if row is None:
            row = measure(cell, asked)
            found.append(row)
            kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            told = [cell.model, f"{cell.tokens}", cell.about, cell.task, cell.way]
            told += [f"1/{cell.share}" if cell.share else "", cell.value]
            print(
                f"{i + 1}/{len(cells)}", *filter(None, told), f"{row['right']}/{asked}", flush=True
            )
        rows.append({key: value for key, value in row.items() if key != "wrong"})
    return rows


def main() -> None:
    parser = shared_options(__doc__, "book")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--asked", type=int, default=20, help="questions a cell")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "book" / "cells.json")
    args = parser.parse_args()
    args.kept.parent.mkdir(parents=True, exist_ok=True)
    here = about("measure_book.py", *sys.argv[1:])
    rows = measured(all_cells(args.models, args.lengths), args.asked, args.kept)
    fixed = {"asked": args.asked, "facts": FACTS, "block": BLOCK, "least": LEAST}
    result = {**here, "versions": mlx_versions(), **fixed, "rows": rows}
    text = page(result, cost())
    write(args.out, result, text)
    print(text)


if __name__ == "__main__":
    main()
