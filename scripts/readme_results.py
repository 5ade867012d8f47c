"""Make the README's tables of results: predictions, facts found, speed and memory."""

from collections.abc import Callable
from typing import Any

from results_page import Row, load, right, table

from mlx_snapkv.measure.intervals import interval
from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.planning.units import format_bytes

CONTEXT, LONG = 32768, 16384
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
        "**Predictions**: KL to the full cache, nats per token, of the 64 tokens after 1,400. SnapKV and StreamingLLM "
        "keep 1/8 of the entries; with sparse attention a token reads 1/16.",
        "",
        *table(("model, texts", "SnapKV", "StreamingLLM", "sparse"), _predictions()),
        "",
        "**Facts**: RULER's score. SnapKV keeps 1/8 of the entries; with sparse attention a token reads 1/16 of all.",
        "",
        *table(("model, prompt", "full cache", "SnapKV", "sparse"), _scores()),
        "",
        "**Speed and memory**: a random LLaMA, in which attention dominates. The chat is with `demo`.",
        "",
        *table(("", "full cache", "compressed or sparse"), [*_speed(), _facts()]),
    ]


def _parts() -> list[dict[str, Any]]:
    """Return the results of docs/quality.json for the models in `NAMES`."""
    named = [(NAMES.get(p["model"].rpartition("/")[2]), p) for p in load("quality")["parts"]]
    return [{**part, "model": name} for name, part in named if name]


def _predictions() -> list[tuple[str, ...]]:
    """Return the KL of texts, with a row for each model and kind of text."""
    parts = {p["part"]: p for p in _parts() if p["part"].split("-")[0] in TEXTS}
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
    ruler = {p["part"]: p for p in _parts() if p["part"].startswith("ruler")}
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


def _speed() -> list[tuple[str, ...]]:
    """Return speed and memory of the random model."""
    result = load("benchmarks")

    def found(context: int, name: str) -> Row:
        own = [row for row in result["speed"] if row["context"] == context]
        return next(row for row in own if row["contender"].lower().startswith(name))

    def row(what: str, context: int, names: dict[str, str], figures: Callable[[Row], str]):
        full, *ours = (figures(found(context, name)) for name in ("full cache", *names))
        return what, full, "; ".join(f"{name} {x}" for name, x in zip(names.values(), ours))

    return [
        row(
            f"tokens per second, KV memory: 1/16 of {CONTEXT:,} entries",
            CONTEXT,
            {"snapkv": "SnapKV", "sparse": "sparse"},
            lambda x: f"{1 / x['step_seconds']:.1f}, {format_bytes(x['kv_bytes'])}",
        ),
        row(
            f"reading {LONG:,} tokens, peak memory",
            LONG,
            {"keydiff": "KeyDiff, 2,048 entries", "sparse": "sparse"},
            lambda x: f"{x['read_seconds']:.0f} s, {format_bytes(x['peak_bytes'])}",
        ),
    ]


def _facts() -> tuple[str, ...]:
    """Return the facts that conversations found."""
    result = load("facts")
    rows = {
        r["name"]: r for r in result["rows"] if (r["table"], r["model"]) == ("memories", "demo")
    }
    what = f"{result['facts']} facts of {result['tokens']:,} tokens, one a turn, with 1/16"
    found = {"sparse": "sparse, memory", "SnapKV": "SnapKV"}
    ways = ", ".join(f"{name} {right(rows[row])}" for name, row in found.items())
    return what, right(rows["full cache"]), ways
