"""Build the README's results tables: facts found, predictions and memory."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from model_shapes import llama_8b
from results_page import load, right, table

from mlx_snapkv.measure.intervals import interval
from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.planning.memory_plan import Planner
from mlx_snapkv.planning.units import format_bytes

PLANNED_CONTEXTS = 8192, 32768, 131072
PLANNED = {
    "full cache": None,
    "`--sparse budget=6.25%`": "sparse:budget=6.25%",
    "`--snapkv top_k=4096`": "snapkv:top_k=4096",
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


def results() -> list[str]:
    """Return the tables, each after a sentence that explains it."""
    return [
        "**Facts found**: RULER's score, of 100. Policies keep 1/8 of the entries; with sparse attention a token reads "
        "1/16 of them. The last row is a conversation with a built-in model, in which policies keep 1/16.",
        "",
        *table(("model", "asked", "full cache", *COMPARED), [*_scores(), _conversation()]),
        "",
        "**Predictions**: KL to the full cache, nats per token, of the 64 tokens after a text, with 95% intervals. "
        "StreamingLLM keeps the first and the last entries, whatever the text says.",
        "",
        *table(("model", "texts", *COMPARED), _predictions()),
        "",
        "**KV memory**, by arithmetic, for an 8B model (32 layers, 8 KV heads of 128, bfloat16): what an answer is "
        "decoded from, as `mlx-snapkv plan` prints it.",
        "",
        *table(("prompt", *PLANNED), _memory()),
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
        n_texts = by_method[FULL_CACHE]["pieces"]
        texts = f"{n_texts} texts of {part['length']:,} tokens of {kind}"
        cells = (
            interval(by_method[method]["kl"], ".3f") if method in by_method else ""
            for method in COMPARED.values()
        )
        rows.append((part["model"], texts, *cells))
    return rows


def _scores() -> list[tuple[str, ...]]:
    """Return RULER's scores with the question known, with one row per model and length."""
    rows = []
    for part in named_parts():
        by_method = {row["method"]: row for row in part["summary"] if row["setting"] == "known"}
        if part["task"] != "data" or not _is_shown(by_method):
            continue
        full = by_method[FULL_CACHE]
        asked = f"{full['asked']} questions of {full['length']:,} tokens"
        cells = (
            _score_text(by_method[method]) if method in by_method else ""
            for method in (FULL_CACHE, *COMPARED.values())
        )
        rows.append((part["model"], asked, *cells))
    return rows


def _is_shown(by_method: dict[str, Any]) -> bool:
    """Return whether both SnapKV and sparse attention were measured."""
    return {COMPARED["SnapKV"], COMPARED["sparse"]} <= by_method.keys()


def _score_text(row: dict[str, Any]) -> str:
    return f"{100 * row['score']:.0f}"


def _conversation() -> tuple[str, ...]:
    """Return the facts that conversations with `demo` found."""
    result = load("facts")
    by_name = {
        row["name"]: row
        for row in result["rows"]
        if row["table"] == "memories" and row["model"] == "demo"
    }
    asked = f"{result['facts']} facts of {result['tokens']:,} tokens, one a turn"
    names = ("full cache", "SnapKV", "", "KeyDiff", "sparse, memory")
    return "`demo`", asked, *(right(by_name[name]) if name else "" for name in names)


@cache
def _planner() -> Planner:
    """Return a planner for a bfloat16 model in the shape of Llama 3.1 8B, whose weights are never computed."""
    model = llama_8b()
    model.set_dtype(mx.bfloat16)
    return Planner(model)


def _memory() -> list[tuple[str, ...]]:
    """Return the KV memory that `mlx-snapkv plan` computes, with one row per context length."""
    planner = _planner()
    rows = []
    for context in PLANNED_CONTEXTS:
        cells = (format_bytes(planner.plan(context, policy).kv) for policy in PLANNED.values())
        rows.append((f"{context:,} tokens", *cells))
    return rows
