"""How far answers move when a prompt is compressed: docs/quality.md, real language models first.

    make real-models
    python scripts/measure_quality.py                     # writes docs/quality.json and .md
    python scripts/measure_quality.py --documents 50      # fewer texts and questions a cell

Each part is one command of mlx-snapkv. What it has measured stays in build/quality, and a later run goes on from there:
with more documents, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality_page import page
from results_page import ROOT, about, write

REAL = Path("real-models")
SMOLLM2, GEMMA = REAL / "smollm2-135m-instruct", REAL / "gemma-3-270m"
RULER = REAL / "ruler"  # by scripts/make_ruler.py, a folder a model
TASKS = ("niah_single_2", "niah_multivalue", "niah_multiquery", "fwe")  # that the full cache does

PAPER = "pool=avg,pool_kernel=7,obs_window=32,n_window=32,n_sink=0,lookahead=0"
BUDGETS = ("25%", "12.5%", "6.25%")
EVERY_BUDGET = ("snapkv:budget={}", "streaming_llm:budget={},schedule=once")
ONE_BUDGET = (  # beside those at 1/8
    f"snapkv:budget=12.5%,{PAPER}",
    "snapkv:budget=adaptive:12.5%",
    "snapkv:budget=12.5%,critical=true",
    "snapkv:budget=12.5%,n_window=50%",
    "keydiff:budget=12.5%,n_window=10%,schedule=once",
    "keydiff:budget=12.5%,schedule=once",
    "expected_attention:budget=12.5%,schedule=once",
    "lagkv:budget=12.5%,schedule=once",
)
ASKED = (
    "snapkv:budget=25%",
    "snapkv:budget=12.5%",
    "snapkv:budget=6.25%",
    "snapkv:budget=256",
    f"snapkv:budget=12.5%,{PAPER}",
    "streaming_llm:budget=25%,schedule=once",
)
ON_FULL = (  # the answer outgrows the recent window
    "snapkv:budget=12.5%",
    "snapkv:budget=12.5%,on_full=slide",
    "snapkv:budget=12.5%,on_full=keydiff",
)
EMBEDDED = (
    "snapkv:budget=12.5%",
    "snapkv:budget=6.25%",
    "keydiff:budget=25%,n_window=10%,schedule=once",
)


@dataclass(frozen=True)
class Part:
    """A command and how many documents it gets of those that are asked for.

    Attributes:
        share: one in so many; a document of some takes longer.
    """

    arguments: tuple[str, ...]
    share: int = 1


def fidelity(model: Path, share: int) -> Part:
    policies = [form.format(budget) for budget in BUDGETS for form in EVERY_BUDGET]
    settings = [word for setting in ("text", "known", "later") for word in ("--setting", setting)]
    return Part((*_fidelity(model, (*policies, *ONE_BUDGET)), *settings), share)


def on_full(model: Path, share: int) -> Part:
    return Part((*_fidelity(model, ON_FULL), "--continuation", "200"), share)


def _fidelity(model: Path, policies: Sequence[str]) -> tuple[str, ...]:
    return (
        *("eval", "fidelity", "--model", str(model), "--text", str(REAL / "essays")),
        *("--length", "1400"),
        *(word for policy in policies for word in ("--policy", policy)),
    )


def ruler(model: Path, length: int, share: int) -> Part:
    return Part(
        (
            *(
                "eval",
                "data",
                "--model",
                str(model),
                "--data",
                str(RULER / model.name / str(length)),
            ),
            *(word for task in TASKS for word in ("--task", task)),
            *("--setting", "known"),
            *(word for policy in ASKED for word in ("--policy", policy)),
        ),
        share,
    )


def suite() -> Part:
    words = [word for policy in EMBEDDED for word in ("--policy", policy)]
    return Part(("eval", "suite", "--model", "demo-tasks", "--setting", "both", *words), 10)


PARTS = {
    "fidelity-smollm2": fidelity(SMOLLM2, 1),
    "fidelity-gemma": fidelity(GEMMA, 1),
    "on-full-smollm2": on_full(SMOLLM2, 8),
    "ruler-smollm2-2048": ruler(SMOLLM2, 2048, 2),
    "ruler-smollm2-4096": ruler(SMOLLM2, 4096, 2),
    "ruler-gemma-2048": ruler(GEMMA, 2048, 2),
    "ruler-gemma-4096": ruler(GEMMA, 4096, 2),
    "suite": suite(),
}


def measure(name: str, folder: Path, documents: int) -> dict[str, Any]:
    """A part's result, without its records."""
    part, out = PARTS[name], folder / name
    given = [*part.arguments, "--documents", str(max(1, documents // part.share))]
    command = [sys.executable, "scripts/numpy_attention.py", *given, "--output", str(out)]
    subprocess.run(command, check=True, cwd=ROOT)
    result = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    del result["records"]
    return {"part": name, **result, "command": " ".join(["mlx-snapkv", *given])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--documents", type=int, default=100, help="texts; questions are half")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "quality", help="no suffix")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quality")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    known = args.out.with_suffix(".json")
    before = json.loads(known.read_text(encoding="utf-8"))["parts"] if known.exists() else []
    parts = {part["part"]: part for part in before if part["part"] in PARTS}
    for name in args.only:
        parts[name] = measure(name, args.folder, args.documents)
        result = about("measure_quality.py") | {
            "parts": [parts[each] for each in PARTS if each in parts]
        }
        write(args.out, result, page(result))


if __name__ == "__main__":
    main()
