"""Make the README's tables of results: facts found, predictions and memory."""

from functools import cache
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
SNAPKV, STREAMING = "snapkv:budget=12.5%", "streaming_llm:budget=12.5%,schedule=once"
TEXTS = {
    "fidelity": "essays",
    "code": "Python code",
}  # kind of text, by the first word of a part's name
NAMES = {
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder 1.5B",
    "smollm2-135m-instruct": "SmolLM2 135M",
    "gemma-3-270m": "Gemma 3 270M",
}


def results() -> list[str]:
    """Return the tables, each after a sentence that explains it."""
    return [
        "**Facts found**: RULER's score, of 100. SnapKV keeps 1/8 of the entries; with sparse attention a token reads "
        "1/16 of them. The last row is a conversation with a built-in model.",
        "",
        *table(("model, prompt", "full cache", "SnapKV", "sparse"), [*_scores(), _conversation()]),
        "",
        "**Predictions**: KL to the full cache, nats per token, of the 64 tokens after 1,400, with 95% intervals. "
        "SnapKV and StreamingLLM keep 1/8 of the entries; with sparse attention a token reads 1/16. StreamingLLM keeps "
        "the first and the last, whatever the text says.",
        "",
        *table(("model, texts", "SnapKV", "StreamingLLM", "sparse"), _predictions()),
        "",
        "**KV memory**, by arithmetic, for an 8B model (32 layers, 8 KV heads of 128, bfloat16): what an answer is "
        "decoded from, as `mlx-snapkv plan` prints it.",
        "",
        *table(("prompt", *PLANNED), _memory()),
    ]


def named_parts() -> list[dict[str, Any]]:
    """Return the results of docs/quality.json for the models in `NAMES`."""
    named = [(NAMES.get(p["model"].rpartition("/")[2]), p) for p in load("quality")["parts"]]
    return [{**part, "model": name} for name, part in named if name]


def _predictions() -> list[tuple[str, ...]]:
    """Return the KL of texts, with a row for each model and kind of text."""
    parts = {p["part"]: p for p in named_parts() if p["part"].split("-")[0] in TEXTS}
    rows = []
    for name, part in parts.items():
        own = {s["method"]: s for s in part["summary"] if s["setting"] == "text"}
        if SNAPKV not in own:
            continue
        kind = TEXTS[name.split("-")[0]]
        what = f"{part['model']}, {own[FULL_CACHE]['pieces']} pieces of {kind}"
        once = [interval(own[method]["kl"], ".3f") for method in (SNAPKV, STREAMING)]
        rows.append((what, *once, _sparse_kl(parts.get(f"{name}-sparse"))))
    return rows


def _sparse_kl(part: dict[str, Any] | None) -> str:
    if part is None:
        return ""
    _, chosen = part["summary"]
    return f"{interval(chosen['kl'], '.3f')}, {chosen['pieces']} pieces"


def _scores() -> list[tuple[str, ...]]:
    """Return RULER's scores, with a row for each model and length."""
    ruler = {p["part"]: p for p in named_parts() if p["part"].startswith("ruler")}
    rows = []
    for name, part in ruler.items():
        own = {s["method"]: s for s in part["summary"]}
        if SNAPKV not in own:
            continue
        full, again = own[FULL_CACHE], ruler.get(f"{name}-sparse")
        what = f"{part['model']}, {full['length']:,} tokens ({full['asked']} questions)"
        rows.append(
            (what, _score(full), _score(own[SNAPKV]), (again and _sparse_score(again)) or "")
        )
    return rows


def _sparse_score(part: dict[str, Any]) -> str:
    full, chosen = part["summary"]
    return f"{_score(chosen)} (full cache {_score(full)}, {full['asked']} questions)"


def _score(own: dict[str, Any]) -> str:
    return f"{100 * own['score']:.0f}"


def _conversation() -> tuple[str, ...]:
    """Return the facts that conversations with `demo` found."""
    result = load("facts")
    rows = {
        r["name"]: r for r in result["rows"] if (r["table"], r["model"]) == ("memories", "demo")
    }
    what = f"`demo`, {result['facts']} facts of {result['tokens']:,} tokens, one a turn, with 1/16"
    return what, *(right(rows[name]) for name in ("full cache", "SnapKV", "sparse, memory"))


@cache
def _planner() -> Planner:
    """Return the planner of a model in the shape of Llama 3.1 8B in bfloat16, whose weights are never computed."""
    model = llama_8b()
    model.set_dtype(mx.bfloat16)
    return Planner(model)


def _memory() -> list[tuple[str, ...]]:
    """Return the KV memory that `mlx-snapkv plan` computes, with a row for each context length."""
    return [
        (
            f"{n:,} tokens",
            *(format_bytes(_planner().plan(n, policy).kv) for policy in PLANNED.values()),
        )
        for n in PLANNED_CONTEXTS
    ]
