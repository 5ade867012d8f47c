"""Build the README's results tables: facts found, predictions and memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from model_shapes import llama_8b
from results_page import load, right, table

from mlx_snapkv.measure.intervals import LEAST_TEXTS, interval
from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.planning import scores
from mlx_snapkv.planning.memory_plan import Planner
from mlx_snapkv.planning.units import format_bytes

PLANNED_CONTEXTS = 32768, 131072
PLANNED = {
    "full cache": None,
    "`--snapkv top_k=4096`": "snapkv:top_k=4096",
    "`--sparse budget=6.25%`": "sparse:budget=6.25%",
    "`--sparse budget=6.25% --store 8bit`": "sparse:budget=6.25%,store=8bit",
    "`--sparse top_k=1024 --store file`": "sparse:top_k=1024,store=file",
    '`--policy "keydiff:budget=8192 then snapkv:top_k=2048"`': "keydiff:budget=8192 then snapkv:top_k=2048",
}
# Column heading -> method.
COMPARED = {
    "SnapKV": "snapkv:budget=12.5%",
    "StreamingLLM": "streaming_llm:budget=12.5%,schedule=once",
    "KeyDiff": "keydiff:budget=12.5%,schedule=once",
    "sparse": "sparse:budget=6.25%",
}
NAMES = {
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder 1.5B",
    "smollm2-135m-instruct": "SmolLM2 135M",
    "gemma-3-270m": "Gemma 3 270M",
}
# The parts of docs/quality.json that the README shows. docs/quality.md has all parts.
SHOWN_RULER = "ruler-2048-qwen", "ruler-16384-qwen", "ruler-2048-smollm2"
SHOWN_TEXTS = "code-qwen", "essays-qwen", "code-16000-qwen", "essays-smollm2", "code-6000-smollm2"
FAILS = 0.5  # RULER's best score is 1; the full cache fails at a task with a lower score than this


def results() -> list[str]:
    """Return the tables, each after a sentence that explains it."""
    return [
        "**Facts found**: RULER's score, of 100. Policies evict once and keep 1/8 of the entries; with sparse "
        "attention a token reads 1/16 of them. The last row is a conversation with a built-in model, in which policies "
        "keep 1/16. There KeyDiff has `n_window=10%` and evicts in blocks, so it holds up to 1/8."
        + _gains(),
        "",
        *table(("model", "asked", "full cache", *COMPARED), [*_scores(), _conversation()]),
        "",
        "**Predictions**: KL to the full cache, nats per token, of the 64 tokens after a text, with 95% intervals for "
        f"at least {LEAST_TEXTS} texts. StreamingLLM keeps the first and the last entries, whatever the text says.",
        "",
        *table(("model", "texts", *COMPARED), _predictions()),
        "",
        "**Memory besides the weights**, by arithmetic, for an 8B model (32 layers, 8 KV heads of 128, bfloat16) on a "
        "Mac: the peak while the prompt is read, and the entries from which the answer is decoded. `mlx-snapkv plan "
        "--model MODEL` prints them as *reading*, weights included, and *KV cache*. Real models were measured with at "
        "most 16,384 tokens.",
        "",
        *table(("setting", *_memory_headings()), _memory()),
    ]


def named_parts() -> list[dict[str, Any]]:
    """Return the parts of docs/quality.json for the models in `NAMES`."""
    parts = []
    for part in load("quality")["parts"]:
        folder_name = part["model"].rpartition("/")[2]
        if folder_name in NAMES:
            parts.append({**part, "model": NAMES[folder_name]})
    return parts


def predictions_on_texts() -> Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]:
    """Yield each part that scores both SnapKV's and sparse attention's predictions on texts.

    Yield the part, the kind of text, and the part's rows by method.
    """
    for part in named_parts():
        by_method = {row["method"]: row for row in part["summary"] if row["setting"] == "text"}
        if part["task"] == "fidelity" and _is_shown(by_method):
            yield part, Path(part["text"][0]).name, by_method


def _predictions() -> list[tuple[str, ...]]:
    """Return the KL on texts, with one row per model, kind of text and length."""
    rows = []
    for part, kind, by_method in predictions_on_texts():
        if part["part"] not in SHOWN_TEXTS:
            continue
        n_texts = by_method[FULL_CACHE]["pieces"]
        noun = "text" if n_texts == 1 else "texts"
        texts = f"{n_texts} {noun} of {part['length']:,} tokens of {kind}"
        cells = (
            interval(by_method[method]["kl"], ".3f", by_method[method]["texts"])
            if method in by_method
            else ""
            for method in COMPARED.values()
        )
        rows.append((part["model"], texts, *cells))
    return rows


def _ruler_parts() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield the model and the rows by method of each part in `SHOWN_RULER`."""
    for part in named_parts():
        if part["part"] in SHOWN_RULER:
            yield part["model"], {row["method"]: row for row in part["summary"]}


def _scores() -> list[tuple[str, ...]]:
    """Return RULER's scores, with one row per model and length."""
    rows = []
    for model, by_method in _ruler_parts():
        full = by_method[FULL_CACHE]
        asked = f"{full['asked']} questions, RULER's limit {full['length']:,} tokens"
        cells = (
            score_text(by_method[method]["score"]) if method in by_method else ""
            for method in (FULL_CACHE, *COMPARED.values())
        )
        rows.append((model, asked, *cells))
    return rows


def _gains() -> str:
    """Return a sentence about the tasks in which sparse attention exceeds the full cache, or "" without such tasks."""
    full_scores = [
        by_method[FULL_CACHE]["by_task"][task]
        for _, by_method in _ruler_parts()
        for task, score in by_method[COMPARED["sparse"]]["by_task"].items()
        if score > by_method[FULL_CACHE]["by_task"][task]
    ]
    if not full_scores or max(full_scores) >= FAILS:
        return ""
    return (
        " Sparse attention exceeds the full cache only in tasks at which the full cache mostly fails, so this shows "
        "nothing."
    )


def _is_shown(by_method: dict[str, Any]) -> bool:
    """Return whether both SnapKV and sparse attention were measured."""
    return {COMPARED["SnapKV"], COMPARED["sparse"]} <= by_method.keys()


def score_text(score: float) -> str:
    """Return a RULER score between 0 and 1 as a number out of 100, with three digits."""
    return f"{100 * score:.3g}"


def _conversation() -> tuple[str, ...]:
    """Return the facts that conversations with `demo` found."""
    result = load("facts")
    by_name = {
        row["name"]: row
        for row in result["rows"]
        if row["table"] == "memories" and row["model"] == "demo"
    }
    asked = (
        f"{result['facts']} facts in each of {result['documents']} texts of {result['tokens']:,} tokens, one question "
        "a turn"
    )
    names = ("full cache", "SnapKV", "", "KeyDiff", "sparse, memory")
    return "`demo`", asked, *(right(by_name[name]) if name else "" for name in names)


def _planner() -> Planner:
    """Return a planner for a bfloat16 model in the shape of Llama 3.1 8B, whose weights are never computed."""
    model = llama_8b()
    model.set_dtype(mx.bfloat16)
    return Planner(model)


def _memory_headings() -> Iterator[str]:
    """Yield the headings of the columns of `_memory`."""
    for context in PLANNED_CONTEXTS:
        yield f"reading {context:,} tokens"
        yield "entries kept"


def _memory() -> list[tuple[str, ...]]:
    """Return the memory that `mlx-snapkv plan` computes on a Mac, without the weights, with one row per setting."""
    rows = []
    with mock.patch.object(scores, "on_gpu", return_value=True):
        planner = _planner()
        for setting, policy in PLANNED.items():
            cells = [setting]
            for context in PLANNED_CONTEXTS:
                plan = planner.plan(context, policy)
                cells += [format_bytes(plan.reading - plan.weights), format_bytes(plan.kv)]
            rows.append(tuple(cells))
    return rows
