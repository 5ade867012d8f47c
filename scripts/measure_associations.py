"""Measure which facts methods find if the question shares no word with the fact. Writes docs/associations.json.

    make real-models
    python scripts/measure_associations.py --model real-models/smollm2-135m-instruct --lengths 2048; make docs

The texts mix essays, code, logs, dialogues and tables (scripts/evaluation/associations.py). A text is read once for
the full cache and sparse attention, and once for the policies. Policies are asked in two settings: the question is in
the prompt that is compressed (known), or the text is compressed before the question is read (later). Sparse attention
evicts nothing: it reads each question after the text, as the next turn.

Every answer is added to build/associations/MODEL.jsonl immediately. A later run continues from there, even with
more lengths, texts and methods. A run replaces each part of the result all of whose questions it asked again.
"""

import json
from pathlib import Path
from typing import Any

import numpy_attention
from associations_page import KEYS
from evaluation.answering import run
from evaluation.associations import VARIANTS, associations, facts
from evaluation.datasets import Dataset
from evaluation.haystack import Haystack
from results_page import ROOT, Row, about, options, shown_arguments

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.cli.progress import StepBars
from mlx_snapkv.cli.results import VERSION, write_json
from mlx_snapkv.measure.methods import ANSWER_SETTINGS, FULL_CACHE, LATER, Method
from mlx_snapkv.measure.records import Record, Results
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.planning.settings import setting_named
from mlx_snapkv.sparse.options import MIN_BUDGET, Sparse

RECORDS = ROOT / "build" / "associations"
METHODS = (
    "snapkv:budget=12.5%",
    "keydiff:budget=12.5%,schedule=once",
    "sparse:budget=6.25%",
    "sparse:budget=3.125%",
)
# A token reads at least this many entries by default. In short texts, the budgets above are much smaller.
SMALLEST_DEFAULT = f"sparse:budget={MIN_BUDGET}"


def summarised(records: list[Record]) -> list[Row]:
    """Count the facts asked, found and kept for each length, variant, method and setting.

    `full` is the number of questions that the full cache answers correctly, and `kept` the number that both answer
    correctly.
    """
    rows = [record | {"variant": record["task"]} for record in records]
    full_right = {_place(row) for row in rows if row["method"] == FULL_CACHE and row["score"]}
    summaries = []
    for key_values, group_rows in grouped(rows, *KEYS).items():
        asked = {_place(row) for row in group_rows}
        right = {_place(row) for row in group_rows if row["score"]}
        counts = {
            "asked": len(group_rows),
            "found": len(right),
            "kept": len(right & full_right),
            "full": len(asked & full_right),
        }
        summaries.append(dict(zip(KEYS, key_values)) | counts)
    return summaries


def missed(records: list[Record]) -> list[Row]:
    """Return the questions that the full cache answers correctly and a method does not, with the method's answer."""
    full_answers = {
        _place(record): record["answer"]
        for record in records
        if record["method"] == FULL_CACHE and record["score"]
    }
    return [
        {key: record[key] for key in ("method", "setting", "length", "document")}
        | {"variant": record["task"], **record["expected"]}
        | {"answer": record["answer"].strip(), "full": full_answers[_place(record)].strip()}
        for record in records
        if not record["score"] and _place(record) in full_answers
    ]


def _place(record: Record) -> tuple:
    """Return the values that identify a question."""
    return tuple(record[key] for key in ("length", "task", "document", "question"))


def measure(
    model: Any, dataset: Dataset, methods: list[Method], results: Results, bars: StepBars
) -> list[Record]:
    """Ask the full cache and policies in both settings, and sparse attention after the text."""
    sparse_methods = [method for method in methods if isinstance(method.policy, Sparse)]
    policy_methods = [method for method in methods if method not in sparse_methods]
    full_and_sparse = [Method(), *sparse_methods]  # their answers do not depend on the setting
    bars.start("texts, full cache and sparse attention", len(dataset.places))
    records = run(model, dataset, full_and_sparse, [LATER], results, bars.count_step)
    if policy_methods:
        bars.start("texts, policies", len(dataset.places))
        records += run(model, dataset, policy_methods, ANSWER_SETTINGS, results, bars.count_step)
    return records


def main() -> None:
    """Measure a model, and add a part to the result."""
    numpy_attention.install()
    parser = options(__doc__)
    parser.add_argument("--model", default="real-models/qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048], help="tokens")
    parser.add_argument("--texts", type=int, nargs="+", default=[2], help="by length, per variant")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--methods", nargs="+", default=[*METHODS, SMALLEST_DEFAULT])
    parser.add_argument("--haystack", type=Path, default=ROOT / "real-models")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "associations")
    args = parser.parse_args()
    name = Path(args.model).name
    model, tokenizer = load_model(args.model)
    haystack = Haystack(args.haystack, [value for fact in facts() for value in fact.values])
    texts = args.texts * len(args.lengths) if len(args.texts) == 1 else args.texts
    dataset = associations(tokenizer, haystack, args.variants, args.lengths, texts)
    RECORDS.mkdir(parents=True, exist_ok=True)
    shared_fields = dataset.setting | {"model": name} | VERSION
    methods = [Method(setting_named(method)) for method in args.methods]
    path = RECORDS / f"{name}.jsonl"
    with Results(shared_fields, path) as results, StepBars(path) as bars:
        records = measure(model, dataset, methods, results, bars)
    part = {"model": name, "rows": summarised(records), "missed": missed(records)}
    put_part(args.out, about("measure_associations.py", *shown_arguments()) | part)


def put_part(out: Path, new_part: dict[str, Any]) -> None:
    """Write a part next to those with a row that it lacks, or has with fewer questions."""
    file = out.with_suffix(".json")
    parts = json.loads(file.read_text(encoding="utf-8"))["parts"] if file.exists() else []
    n_new = _n_asked(new_part)
    other_parts = [
        part for part in parts if any(n > n_new.get(row, 0) for row, n in _n_asked(part).items())
    ]
    write_json(out, {"parts": [*other_parts, new_part]})


def _n_asked(part: dict[str, Any]) -> dict[tuple, int]:
    """Return how many questions a part asked, by model, length, variant, method and setting."""
    return {(part["model"], *(row[key] for key in KEYS)): row["asked"] for row in part["rows"]}


if __name__ == "__main__":
    main()
