"""Measure how compression changes answers, with real language models; writes docs/quality.json and .md.

    make real-models
    python scripts/measure_quality.py
    python scripts/measure_quality.py --documents 50      # fewer texts and questions

Each part is one command of mlx-snapkv or of scripts/evaluate.py. Its records stay in build/quality, and a later run
continues from them, also with more documents.
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
QWEN = REAL / "qwen2.5-coder-1.5b-instruct"  # takes a minute for a text, and three for a question
RULER = REAL / "ruler"  # written by scripts/make_ruler.py, with a folder for each model
TASKS = ("niah_single_2", "niah_multivalue", "niah_multiquery", "fwe")
OTHERS = (  # tasks for the full cache only
    *("niah_single_1", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("vt", "cwe"),
)
MORE = ("niah_single_1", "niah_single_3", "niah_multikey_1")  # OTHERS that models can solve
MORE_GEMMA = (*MORE, "niah_multikey_2")
TASKS_QWEN = ("niah_single_2", "niah_multikey_2", "niah_multivalue", "niah_multiquery")
FEWER = ("niah_single_2", "fwe")  # tasks for methods that read the prompt again for every question

EVALUATE = "scripts/evaluate.py"
PAPER = "pool=avg,pool_kernel=7,obs_window=32,n_window=32,n_sink=0,lookahead=0"
BUDGETS = ("25%", "12.5%", "6.25%")
EVERY_BUDGET = ("snapkv:budget={}", "streaming_llm:budget={},schedule=once")
ONE_BUDGET = (  # further policies, at 1/8 only
    "snapkv:budget=12.5%,lookahead=32",
    f"snapkv:budget=12.5%,{PAPER}",
    "snapkv:budget=12.5%,n_window=50%",
    "keydiff:budget=12.5%,n_sink=0,n_window=10%,schedule=once",
    "keydiff:budget=12.5%,n_sink=0,schedule=once",
    "expected_attention:budget=12.5%,schedule=once",
    "lagkv:budget=12.5%,schedule=once",
)
ASKED = (
    "snapkv:budget=25%",
    "snapkv:budget=12.5%",
    "snapkv:budget=6.25%",
    "snapkv:budget=256",
    "snapkv:budget=12.5%,lookahead=32",
    f"snapkv:budget=12.5%,{PAPER}",
    "streaming_llm:budget=25%,schedule=once",
)
ASKED_MORE = (
    "snapkv:budget=25%",
    "snapkv:budget=12.5%",
    "snapkv:budget=6.25%",
    "snapkv:budget=12.5%,lookahead=32",
    "streaming_llm:budget=25%,schedule=once",
)
KEPT_FOR_LATER = ("h2o", "expected_attention", "keydiff", "lagkv", "streaming_llm")
LATER = (
    "snapkv:budget=25%",
    *(f"{name}:budget=25%,schedule=once" for name in KEPT_FOR_LATER),
)
SPARSE = ("budget=6.25%",)
BLOCKS = (
    "snapkv:budget=25%,schedule=block",
    *(f"{name}:budget=25%" for name in KEPT_FOR_LATER),
)
SINKS = ("keydiff:budget=12.5%,schedule=once", "keydiff:budget=12.5%,n_sink=0,schedule=once")
ON_FULL = (  # for answers that are longer than the recent window
    "snapkv:budget=12.5%",
    "snapkv:budget=12.5%,on_full=slide",
)
EMBEDDED = (
    "snapkv:budget=12.5%",
    "snapkv:budget=6.25%",
    "keydiff:budget=25%,n_sink=0,n_window=10%,schedule=once",
)


def _each(option: str, values: Iterable[str]) -> list[str]:
    """Return command-line words that give an option several values."""
    return [word for value in values for word in (option, value)]


def _fidelity(model: Path, policies: Iterable[str], *more: str, texts: str = "essays") -> list[str]:
    """Return a command that measures fidelity."""
    words = ["eval", "fidelity", "--model", str(model), "--text", str(REAL / texts)]
    return [*words, "--length", "1400", *_each("--policy", policies), *more]


def _ruler(
    model: Path,
    length: int,
    policies: Iterable[str] = ASKED,
    tasks: Iterable[str] = TASKS,
    setting: str = "known",
    option: str = "--policy",
) -> list[str]:
    """Return a command that measures RULER's tasks at a length."""
    data = str(RULER / model.name / str(length))
    words = [EVALUATE, "data", "--model", str(model), "--data", data]
    return [*words, *_each("--task", tasks), "--setting", setting, *_each(option, policies)]


def _sparse(model: Path, length: int, *more: Any) -> list[str]:
    """Return a command that measures RULER's tasks with sparse attention."""
    return _ruler(model, length, SPARSE, *more, option="--sparse")


COMPARED = [form.format(budget) for budget in BUDGETS for form in EVERY_BUDGET] + [*ONE_BUDGET]
ENTRIES = [form.format(budget) for budget in ("512", "256") for form in EVERY_BUDGET]
CODE = [form.format("12.5%") for form in EVERY_BUDGET] + [f"snapkv:budget=12.5%,{PAPER}"]
ONE_EIGHTH = CODE[:2]
ANSWERED = (
    *("snapkv:budget=25%", "snapkv:budget=12.5%", "snapkv:budget=6.25%"),
    *("snapkv:budget=12.5%,lookahead=32", "streaming_llm:budget=12.5%,schedule=once"),
)
SETTINGS = _each("--setting", ("text", "later"))
READ_FEW = _each("--sparse", SPARSE)
SUITE = f"{EVALUATE} suite --model demo-tasks --setting both".split()
# Name: a command, and the number by which --documents is divided for it, since some commands take longer.
PARTS: dict[str, tuple[list[str], int]] = {
    "code-qwen": (_fidelity(QWEN, ONE_EIGHTH, texts="code"), 10),
    "fidelity-qwen": (_fidelity(QWEN, ONE_EIGHTH), 12),
    "code-qwen-sparse": (_fidelity(QWEN, (), *READ_FEW, texts="code"), 5),
    "fidelity-qwen-sparse": (_fidelity(QWEN, (), *READ_FEW), 12),
    "ruler-qwen-2048": (_ruler(QWEN, 2048, ONE_EIGHTH, TASKS_QWEN), 8),
    "ruler-qwen-4096": (_ruler(QWEN, 4096, ONE_EIGHTH, TASKS_QWEN), 8),
    "ruler-qwen-2048-sparse": (_sparse(QWEN, 2048, TASKS_QWEN), 25),
    "ruler-qwen-4096-sparse": (_sparse(QWEN, 4096, TASKS_QWEN), 12),
    "ruler-qwen-16384-sparse": (_sparse(QWEN, 16384, TASKS_QWEN), 33),
    "fidelity-smollm2": (_fidelity(SMOLLM2, COMPARED, *SETTINGS), 1),
    "fidelity-gemma": (_fidelity(GEMMA, COMPARED, *SETTINGS), 1),
    "known-smollm2": (_fidelity(SMOLLM2, ANSWERED, "--setting", "known"), 4),
    "known-gemma": (_fidelity(GEMMA, ANSWERED, "--setting", "known"), 4),
    "entries-smollm2": (_fidelity(SMOLLM2, ENTRIES, *SETTINGS), 5),
    "code-smollm2": (_fidelity(SMOLLM2, CODE, texts="code"), 1),
    "code-gemma": (_fidelity(GEMMA, CODE, texts="code"), 1),
    "fidelity-smollm2-sparse": (_fidelity(SMOLLM2, (), *READ_FEW), 2),
    "code-smollm2-sparse": (_fidelity(SMOLLM2, (), *READ_FEW, texts="code"), 5),
    "on-full-smollm2": (_fidelity(SMOLLM2, ON_FULL, "--continuation", "200"), 8),
    "on-full-gemma": (_fidelity(GEMMA, ON_FULL, "--continuation", "200"), 10),
    "ruler-smollm2-2048": (_ruler(SMOLLM2, 2048), 2),
    "ruler-smollm2-4096": (_ruler(SMOLLM2, 4096), 2),
    "ruler-smollm2-2048-sparse": (_sparse(SMOLLM2, 2048), 2),
    "ruler-smollm2-4096-sparse": (_sparse(SMOLLM2, 4096), 2),
    "ruler-gemma-2048": (_ruler(GEMMA, 2048), 2),
    "ruler-gemma-4096": (_ruler(GEMMA, 4096), 2),
    "more-smollm2-2048": (_ruler(SMOLLM2, 2048, ASKED_MORE, MORE), 2),
    "more-gemma-2048": (_ruler(GEMMA, 2048, ASKED_MORE, MORE_GEMMA), 2),
    "later-smollm2-2048": (_ruler(SMOLLM2, 2048, LATER, FEWER, "later"), 12),
    "later-gemma-2048": (_ruler(GEMMA, 2048, LATER, FEWER, "later"), 12),
    "later-smollm2-2048-sparse": (_sparse(SMOLLM2, 2048, FEWER, "later"), 12),
    "later-gemma-2048-sparse": (_sparse(GEMMA, 2048, FEWER, "later"), 12),
    "sinks-smollm2": (_fidelity(SMOLLM2, SINKS), 4),
    "sinks-gemma": (_fidelity(GEMMA, SINKS), 4),
    "blocks-fidelity-smollm2": (_fidelity(SMOLLM2, BLOCKS), 12),
    "blocks-fidelity-gemma": (_fidelity(GEMMA, BLOCKS), 12),
    "blocks-smollm2-2048": (_ruler(SMOLLM2, 2048, BLOCKS, FEWER[:1]), 12),
    "blocks-gemma-2048": (_ruler(GEMMA, 2048, BLOCKS, FEWER[:1]), 12),
    "others-smollm2-2048": (_ruler(SMOLLM2, 2048, (), OTHERS), 12),
    "others-gemma-2048": (_ruler(GEMMA, 2048, (), OTHERS), 12),
    "suite": ([*SUITE, *_each("--policy", EMBEDDED)], 10),
}


def measure(name: str, folder: Path, documents: int) -> dict[str, Any]:
    """Run a part's command, and return its result without the records."""
    (words, share), out = PARTS[name], folder / name
    given = [*words, "--documents", str(max(1, documents // share))]
    command = [sys.executable, "scripts/numpy_attention.py", *given, "--output", str(out)]
    subprocess.run(command, check=True, cwd=ROOT)
    result = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    del result["records"]
    program = "python" if words[0] == EVALUATE else "mlx-snapkv"
    return {"part": name, **result, "command": " ".join([program, *given])}


def main() -> None:
    """Measure the parts of the command line, and write them beside the parts measured before."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--documents", type=int, default=100, help="texts; questions are half")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "quality", help="no suffix")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quality")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    known = args.out.with_suffix(".json")
    before = json.loads(known.read_text(encoding="utf-8"))["parts"] if known.exists() else []
    parts = {part["part"]: part for part in before}
    for name in args.only:
        parts[name] = measure(name, args.folder, args.documents)
        found = [parts[each] for each in PARTS if each in parts]
        result = about("measure_quality.py") | {"parts": found}
        write_result(args.out, result, page(result))


if __name__ == "__main__":
    main()
