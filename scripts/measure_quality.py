"""What every policy still answers, the question known when compressing or coming later: docs/quality.md.

    python scripts/measure_quality.py                    # writes docs/quality.json, .md and .png

The tasks are those of `mlx-snapkv eval suite`, and six-digit codes on `demo`. Every answer is kept in build/quality/
as it comes, and a later run goes on from there. With --minutes less is asked, and the page has what was asked in full
by then; with --only it says of the other parts what it said before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quality_page import page, write_plot
from quality_parts import LENGTH, PARTS, TASKS
from quality_ways import Line
from results_page import ROOT, about, mlx_versions, write

from mlx_snapkv import __version__
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.evals.answering import FULL, Method
from mlx_snapkv.evals.asking import run
from mlx_snapkv.evals.results import Record, Results
from mlx_snapkv.evals.score_tables import summarise
from mlx_snapkv.evals.suite import PAGE, Suite


class Made(list):
    """A suite's documents, made once for all methods."""

    def __init__(self, suite: Suite):
        super().__init__(suite)
        self.tokenizer = suite.tokenizer


def measure(part: str, folder: Path, until: float) -> Iterator[dict[str, Any]]:
    """A JSON object a cell, the full cache's first; after the time `until` only of what was asked in full before."""
    wanted = PARTS[part]
    name, setting, listed = wanted.model, wanted.setting, wanted.lines
    model, tokenizer = load_model(name)
    suite = wanted.documents_of(tokenizer)
    asked = Made(suite)
    fixed = {**suite.setting(), "model": name, "mlx-snapkv": __version__}
    results = Results(fixed, folder / f"{name}-{setting}.jsonl")
    cells = [(FULL, 1, Method(FULL))]
    cells += [(line.name, share, line.method(share)) for share, line in by_share(listed)]
    records: dict[str, list[Record]] = {}
    for line, share, method in cells:
        if line == FULL or time.time() < until or complete(asked, method, setting, results):
            records[method.name] = run(model, asked, [method], [setting], results)
            print(f"{part}: {line}, 1/{share}", flush=True)
    base = listed[0]
    for line, share, method in cells:
        if own := records.get(method.name):
            row = {"part": part, "model": name, "line": line, "share": share, "base": base.name}
            row |= compared(own, records[FULL])
            row["way"] = row.pop("method")
            if share in base.shares and line != base.name:
                reference = records.get(base.method(share).name)
                row["to_base"] = reference and compared(own, reference)["difference"]
            yield row


def compared(own: list[Record], reference: list[Record]) -> dict[str, Any]:
    """What tables tell of these answers, with their difference to the others."""
    others = [record | {"method": FULL} for record in reference if own is not reference]
    return next(s for s in summarise([*others, *own], PAGE) if s["method"] == own[0]["method"])


def read_json(out: Path) -> dict[str, Any]:
    """What was measured before."""
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


def by_share(listed: Sequence[Line]) -> list[tuple[int, Line]]:
    return [(share, line) for line in listed for share in line.shares]


def complete(asked: Made, method: Method, setting: str, results: Results) -> bool:
    """Whether all questions have been answered by this method."""
    for place, document in asked:
        here = {"method": method.name, "setting": setting, **place}
        for i in range(len(document.questions)):
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
    here = about("measure_quality.py")
    before = {"rows": []} if set(args.only) == set(PARTS) else read_json(args.out)
    rows = [row for row in before["rows"] if row["part"] not in args.only]
    for part in args.only:
        rows += [row | {"commit": here["commit"]} for row in measure(part, args.folder, until)]
    rows.sort(key=lambda row: list(PARTS).index(row["part"]))
    result = {
        **here,
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
