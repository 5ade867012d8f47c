"""What every policy still answers, the question known when compressing or coming later: docs/quality.md.

    python scripts/measure_quality.py                    # writes docs/quality.json, .md and .png

The tasks are those of `mlx-snapkv eval suite`, and six-digit codes on `demo`. Every answer is kept in build/quality/
as it comes, and a later run goes on from there. With --only and --minutes less is asked; the page has what was asked in
full by then.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quality_page import page, write_plot
from quality_ways import Line, keydiff_kernels, lines, needles, snapkv_options
from results_page import ROOT, about, mlx_versions, write

from mlx_snapkv import __version__
from mlx_snapkv.chat.common_prefix import common_prefix
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.documents import make_document, make_facts
from mlx_snapkv.demo.questions import question_prompt, token_counter
from mlx_snapkv.evals.asking import FULL, KEYS, KNOWN, LATER, Paper, Question, Way, run
from mlx_snapkv.evals.results import Record, Results
from mlx_snapkv.evals.score_tables import summarise
from mlx_snapkv.evals.suite import MAX_TOKENS, PAGE, QUESTION_TOKENS, Suite

SEED, LENGTH = 7_000_000, 2048
TASKS = ("single", "look-alikes", "overwritten", "several", "three-links")
DOCUMENTS, QUESTIONS = 5, 4  # documents of each task, questions about each
NEEDLE_DOCUMENTS, NEEDLES = 25, 4


class SixDigits(Suite):
    """Access codes of six digits, all of one document asked for."""

    def setting(self) -> dict[str, Any]:
        return {"task": "six digits", "seed": self.seed}

    def paper(self, task: str, length: int, document: int) -> Paper:
        rng = random.Random(f"{self.seed} {task} {length} {document}")
        facts = make_facts(rng, self.n_questions, attributes=["access code"])
        count = token_counter(self.tokenizer)
        text = make_document(rng, facts, length - QUESTION_TOKENS, count)
        prompts = [question_prompt(self.tokenizer, text, fact.question) for fact in facts]
        asked = [
            Question(prompt, fact.value, partial(_equal, fact.value), MAX_TOKENS)
            for prompt, fact in zip(prompts, facts)
        ]
        return Paper(asked, common_prefix(prompts))


def _equal(value: str, answer: str) -> float:
    return float(answer.strip() == value)


class Made(list):
    """A suite's papers, made once for all ways."""

    def __init__(self, suite: Suite):
        super().__init__(suite)
        self.tokenizer = suite.tokenizer


PARTS: dict[str, tuple[str, str, list[Line]]] = {
    "known": ("demo-tasks", KNOWN, lines(KNOWN)),
    "later": ("demo-tasks", LATER, lines(LATER)),
    "needles": ("demo", KNOWN, needles()),
    "options": ("demo-tasks", KNOWN, snapkv_options()),
    "kernels": ("demo-tasks", LATER, keydiff_kernels()),
}


def papers(model: str, tokenizer) -> Suite:
    if model == "demo":
        return SixDigits(tokenizer, ["six digits"], [LENGTH], NEEDLE_DOCUMENTS, NEEDLES, SEED)
    return Suite(tokenizer, TASKS, [LENGTH], DOCUMENTS, QUESTIONS, SEED)


def measure(part: str, folder: Path, until: float) -> Iterator[dict[str, Any]]:
    """A JSON object a cell, the full cache's first; after the time `until` only of what was asked in full before."""
    name, setting, listed = PARTS[part]
    model, tokenizer = load_model(name)
    suite = papers(name, tokenizer)
    asked = Made(suite)
    fixed = {**suite.setting(), "model": name, "mlx-snapkv": __version__}
    results = Results(fixed, folder / f"{name}-{setting}.jsonl", KEYS)
    cells = [(FULL, 1, Way(FULL))]
    cells += [(line.name, share, line.way(share)) for share, line in by_share(listed)]
    records: dict[str, list[Record]] = {}
    for line, share, way in cells:
        if line == FULL or time.time() < until or complete(asked, way, setting, results):
            records[way.name] = run(model, asked, [way], [setting], results)
            print(f"{part}: {line}, 1/{share}", flush=True)
    base = listed[0]
    for line, share, way in cells:
        if own := records.get(way.name):
            row = {"part": part, "model": name, "line": line, "share": share, "base": base.name}
            row |= compared(own, records[FULL])
            del row["first_seconds"], row["selection_seconds"]  # no timing on a busy machine
            if share in base.shares and line != base.name:
                reference = records.get(base.way(share).name)
                row["to_base"] = reference and compared(own, reference)["difference"]
            yield row


def compared(own: list[Record], reference: list[Record]) -> dict[str, Any]:
    """What tables tell of these answers, with their difference to the others."""
    others = [record | {"way": FULL} for record in reference if own is not reference]
    return next(s for s in summarise([*others, *own], PAGE) if s["way"] == own[0]["way"])


def by_share(listed: Sequence[Line]) -> list[tuple[int, Line]]:
    return [(share, line) for line in listed for share in line.shares]


def complete(asked: Made, way: Way, setting: str, results: Results) -> bool:
    """Whether all questions have been answered in this way."""
    for place, paper in asked:
        here = {"way": way.name, "setting": setting, **place}
        for i in range(len(paper.questions)):
            if results.get(here | {"question": i}) is None:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "quality", help="without its suffix"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="ask nothing new after so many"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quality")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * args.minutes
    ends = {part: until if part in args.only else 0 for part in PARTS}
    rows = [row for part, end in ends.items() for row in measure(part, args.folder, end)]
    result = {
        **about("measure_quality.py"),
        "versions": mlx_versions(),
        "length": LENGTH,
        "tasks": TASKS,
        "rows": rows,
    }
    write(args.out, result, page(result))
    write_plot(result, args.out.with_suffix(".png"))
    print(page(result))


if __name__ == "__main__":
    main()
