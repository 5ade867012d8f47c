"""Facts found with every policy, under both schedules and at several budgets, on both embedded models.

    python scripts/measure_quality.py                    # writes docs/quality.json and docs/quality.md

Every answer is kept in build/quality/ as it comes, and a later run goes on from there. Each cell's documents are
those of `mlx-snapkv eval needle --needles 4`, with fixed seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality_page import page
from results_page import ROOT, about, mlx_versions, shared_options, write

from mlx_snapkv import __version__
from mlx_snapkv.cli.asking import BATCH_SIZE
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.evals.grid import cells
from mlx_snapkv.evals.needle import Needle
from mlx_snapkv.evals.results import Results
from mlx_snapkv.evals.run import FULL, check, contenders, run
from mlx_snapkv.evals.summary import summarise
from mlx_snapkv.policies import POLICIES

SEED, NEEDLES, DEPTHS = 7_000_000, 4, 5
SHARES = (4, 8, 16, 32)  # one entry in so many is kept
BLOCK = 256  # tokens read at a time under schedule=block
N_SINK, N_WINDOW = 4, 32  # SnapKV's, whose defaults are larger than these budgets
SLACK = 64  # tokens that a prompt may be shorter than its length


def ways(share: int, length: int) -> dict[tuple[str, str], str]:
    """The policies to measure at a budget, by (policy, schedule) as the page lists them."""
    budget = f"budget={100 / share:g}%"
    n_window = min(N_WINDOW, (length - SLACK) // share // 2)
    size = f"n_sink={N_SINK},n_window={n_window},obs_window={n_window},min_ctx=0"
    found = {}
    for schedule in ("once", "block"):
        for name, cls in POLICIES.items():
            if schedule not in cls.schedules:
                continue
            options = [budget, f"schedule={schedule}"]
            options += [f"block={BLOCK}"] if schedule == "block" else []
            options += [size, "lookahead=0"] if name == "snapkv" else []
            found[name, schedule] = f"{name}:{','.join(options)}"
    found["snapkv, lookahead=4", "once"] = f"snapkv:{budget},{size},lookahead=4"
    prefill = f"keydiff:budget={min(50, 400 / share):g}%,block={BLOCK}"
    decode = f"snapkv:{budget},{size},lookahead=0"
    found["keydiff, then snapkv", "block, then once"] = f"{prefill} then {decode}"
    return found


def measure(
    name: str, length: int, shares: Sequence[int], questions: int, folder: Path
) -> list[dict[str, Any]]:
    """A JSON object a way and share: right answers, entries and bytes; the full cache first, with share 1."""
    model, tokenizer = load_model(name)
    task = Needle(tokenizer, SEED, NEEDLES)
    grid = cells([length], DEPTHS, questions)
    listed = [(share, way, text) for share in shares for way, text in ways(share, length).items()]
    names = [next(n for n in contenders([text]) if n != FULL) for _, _, text in listed]
    chosen = contenders([text for _, _, text in listed])
    check(model, chosen, [length - SLACK, length])
    fixed = {**task.setting(), "model": name, "mlx-snapkv": __version__}
    results = Results(fixed, folder / f"{name}-{length}.jsonl")
    total = len(grid) * len(chosen)
    done = sum(
        results.get({"policy": n, **vars(cell)}) is not None for cell in grid for n in chosen
    )

    def on_answer() -> None:
        nonlocal done
        done += 1
        print(f"{name}, {length} tokens: {done}/{total}", end="\r", flush=True)

    given = tokenizer, task, grid, chosen, results, on_answer
    records = run(model, *given, batch_size=BATCH_SIZE)
    print()
    found = {summary["policy"]: summary for summary in summarise(records)}
    rows = [{"way": FULL, "schedule": "", "share": 1, **found[FULL]}]
    for (share, (way, schedule), _), policy in zip(listed, names):
        rows.append({"way": way, "schedule": schedule, "share": share, **found[policy]})
    return [{"model": name, **row} for row in rows]


def main() -> None:
    parser = shared_options(__doc__, "quality")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES)
    parser.add_argument("--questions", type=int, default=4, help="asked at each depth")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quality")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.models:
        for length in args.lengths:
            rows += measure(name, length, args.shares, args.questions, args.folder)
    result = {
        **about("measure_quality.py", *sys.argv[1:]),
        "versions": mlx_versions(),
        "block": BLOCK,
        "depths": DEPTHS,
        "needles": NEEDLES,
        "questions": args.questions,
        "rows": rows,
    }
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
