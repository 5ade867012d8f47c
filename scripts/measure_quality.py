"""Measure how compression changes the answers of real language models. Writes docs/quality.json and .md.

    make real-models
    python scripts/measure_quality.py
    python scripts/measure_quality.py --only essays-smollm2 ruler-2048-smollm2

Each part is one command of mlx-snapkv or scripts/evaluate.py. Its records stay in build/quality, so that a later run
continues from them.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quality_page import page
from results_page import ROOT, about, options

from mlx_snapkv.cli.results import write_result

REAL = Path("real-models")
SMOLLM2, GEMMA = REAL / "smollm2-135m-instruct", REAL / "gemma-3-270m"
QWEN = REAL / "qwen2.5-coder-1.5b-instruct"  # takes a minute per text, and three per question
RULER = REAL / "ruler"  # written by scripts/make_ruler.py, with one folder per model
TASKS = ("niah_single_2", "niah_multivalue", "niah_multiquery", "fwe")
TASKS_QWEN = ("niah_single_2", "niah_multikey_2", "niah_multivalue", "niah_multiquery")
TASKS_LONG = ("niah_multikey_2", "niah_multiquery")

EVALUATE = "scripts/evaluate.py"
SNAPKV, STREAMING = "snapkv:budget=12.5%", "streaming_llm:budget=12.5%,schedule=once"
KEYDIFF = "keydiff:budget=12.5%,schedule=once"
FEW = (SNAPKV, STREAMING, KEYDIFF)  # for parts in which each method takes minutes
PAPER = "pool=avg,pool_kernel=7,obs_window=32,n_window=32,n_sink=0,lookahead=0"
POLICIES = (
    "snapkv:budget=25%",
    SNAPKV,
    "snapkv:budget=6.25%",
    f"snapkv:budget=12.5%,{PAPER}",
    STREAMING,
    KEYDIFF,
    "expected_attention:budget=12.5%,schedule=once",
    "lagkv:budget=12.5%,schedule=once",
)
ANSWERED = (SNAPKV, "snapkv:budget=12.5%,lookahead=32", STREAMING)
BLOCKS = (
    "snapkv:budget=25%,schedule=block",
    *(f"{name}:budget=25%" for name in ("expected_attention", "keydiff", "lagkv", "streaming_llm")),
    "keydiff:budget=25% then snapkv:budget=6.25%",
)
SPARSE = ("budget=6.25%", "budget=3.125%")
# Tasks are measured with only one sparse budget, to save time.
SPARSE_TASKS = SPARSE[:1]
STORES = tuple(f"{SPARSE[0]},store={store}" for store in ("memory", "8bit", "file"))
BOTH_READINGS = (*SPARSE_TASKS, f"{SPARSE[0]},read=sparse")


def _repeat_option(option: str, values: Iterable[str]) -> list[str]:
    """Return command-line words that repeat an option for each value."""
    return [word for value in values for word in (option, value)]


def _fidelity(
    model: Path,
    texts: str,
    policies: Iterable[str] = POLICIES,
    length: int = 1400,
    setting: str = "text",
    sparse: Iterable[str] = SPARSE,
) -> list[str]:
    """Return a command that measures how far predictions move."""
    words = ["eval", "fidelity", "--model", str(model), "--text", str(REAL / texts)]
    words += ["--length", str(length), "--setting", setting]
    return [*words, *_repeat_option("--policy", policies), *_repeat_option("--sparse", sparse)]


def _ruler(
    model: Path,
    length: int,
    policies: Iterable[str] = POLICIES[:6],
    tasks: Iterable[str] = TASKS,
    sparse: Iterable[str] = SPARSE_TASKS,
) -> list[str]:
    """Return a command that measures RULER tasks at one length."""
    data = str(RULER / model.name / str(length))
    words = [EVALUATE, "data", "--model", str(model), "--data", data]
    words += [*_repeat_option("--task", tasks), "--setting", "known"]
    return [*words, *_repeat_option("--policy", policies), *_repeat_option("--sparse", sparse)]


# Name -> command, and its number of texts, or of questions per task.
PARTS: dict[str, tuple[list[str], int]] = {
    "code-qwen": (_fidelity(QWEN, "code", FEW), 4),
    "essays-qwen": (_fidelity(QWEN, "essays", FEW), 2),
    "code-smollm2": (_fidelity(SMOLLM2, "code"), 10),
    "essays-smollm2": (_fidelity(SMOLLM2, "essays"), 20),
    "code-gemma": (_fidelity(GEMMA, "code"), 4),
    "code-6000-smollm2": (_fidelity(SMOLLM2, "code", FEW, 6000), 1),
    "essays-6000-smollm2": (_fidelity(SMOLLM2, "essays", FEW, 6000), 2),
    "code-16000-qwen": (_fidelity(QWEN, "code", FEW[:1], 16000), 1),
    "essays-16000-qwen": (_fidelity(QWEN, "essays", FEW[:1], 16000), 1),
    "stores-qwen": (_fidelity(QWEN, "essays", (), sparse=STORES), 2),
    "stores-smollm2": (_fidelity(SMOLLM2, "essays", (), sparse=STORES), 4),
    "known-smollm2": (_fidelity(SMOLLM2, "essays", ANSWERED, setting="known"), 6),
    "later-smollm2": (_fidelity(SMOLLM2, "essays", FEW, setting="later"), 3),
    "ruler-2048-qwen": (_ruler(QWEN, 2048, FEW, TASKS_QWEN), 1),
    "ruler-16384-qwen": (_ruler(QWEN, 16384, FEW, TASKS_LONG, sparse=BOTH_READINGS), 1),
    "ruler-2048-smollm2": (_ruler(SMOLLM2, 2048), 4),
    "ruler-4096-smollm2": (_ruler(SMOLLM2, 4096), 2),
    "ruler-blocks-smollm2": (_ruler(SMOLLM2, 2048, BLOCKS, TASKS[:1], sparse=()), 8),
    "suite": (
        [
            EVALUATE,
            "suite",
            *_repeat_option("--policy", FEW),
            *_repeat_option("--sparse", SPARSE_TASKS),
        ],
        4,
    ),
}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run a part's command and return its result without the records."""
    words, n_documents = PARTS[name]
    words = [*words, "--documents", str(n_documents)]
    out = folder / name
    command = [sys.executable, "scripts/numpy_attention.py", *words, "--output", str(out)]
    subprocess.run(command, check=True, cwd=ROOT)
    result = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    del result["records"]
    is_script = words[0] == EVALUATE
    program = "python" if is_script else "mlx-snapkv"
    return {"part": name, **result, "command": " ".join([program, *words])}


def main() -> None:
    """Measure the requested parts and write them together with the parts measured earlier."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "quality", help="no suffix")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quality")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.out.with_suffix(".json")
    earlier_parts = json.loads(file.read_text(encoding="utf-8"))["parts"] if file.exists() else []
    part_by_name = {part["part"]: part for part in earlier_parts}
    for name in args.only:
        part_by_name[name] = measure(name, args.folder)
        parts = [part_by_name[part_name] for part_name in PARTS if part_name in part_by_name]
        result = about("measure_quality.py") | {"parts": parts}
        write_result(args.out, result, page(result))


if __name__ == "__main__":
    main()
