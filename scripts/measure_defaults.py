"""Answers kept by every way to vote, on both embedded models: the measurement behind SnapKV's defaults.

    python scripts/measure_defaults.py                   # prints the tables, writes docs/defaults.json and .md

Each question is asked at the end of a document. The prompt is read once on the full cache, then every
setting compresses a copy of that cache with the queries it would have observed and answers greedily from there,
exactly as `generate_step` does. Accuracy is exact match; "full cache" is mlx-lm's own.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from results_page import about, mlx_versions, shared_options, write

from mlx_snapkv import SnapKV, compress_prompt_cache
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import is_right, make_haystack, question_prompt
from mlx_snapkv.models.patch import recording

N_SINK, N_WINDOW, SHARE = 4, 32, 16
KERNELS = (1, 5, 7, 13, 21)
LOOKAHEADS = (2, 4, 8)
MAX_TOKENS = 14
WAYS = {
    "pull request (max logit, shared, prompt[:-1])": {"heads": "shared", "last_token": False},
    "window of prompt[:-1]": {"last_token": False},
    "window with the last token": {"lookahead": 0},
    **{f"lookahead={n}": {"lookahead": n} for n in LOOKAHEADS},
}
VARIANTS = {
    "max pooling": {"lookahead": 0, "pool": "max"},
    "obs_window=8": {"lookahead": 0, "obs_window": 8},
    "obs_window=16": {"lookahead": 0, "obs_window": 16},
    "shared heads": {"lookahead": 0, "heads": "shared"},
    "lookahead=4, max pooling": {"lookahead": 4, "pool": "max"},
    "lookahead=4, shared heads": {"lookahead": 4, "heads": "shared"},
}


@dataclass
class Snapshot:
    """A request on the full cache when `fed` answer tokens are in it: caches, next token, text so far."""

    caches: list
    next_token: int
    answer: list[int]


def shallow(caches: list) -> list:
    """Copies that share the arrays: an update makes new ones."""
    return [copy.copy(c) if isinstance(c, RecordingKVCache) else copy.deepcopy(c) for c in caches]


def snapshots(model, prompt: list[int]) -> dict[int, Snapshot]:
    """The request on the full cache at -1 (last prompt token not fed) and after 0 to 14 answer tokens."""
    T = len(prompt)
    caches = make_prompt_cache(model)
    layers = attention_layers(model, caches)
    for layer in layers:
        caches[layer.index] = RecordingKVCache(T - 33, T + MAX_TOKENS, T + MAX_TOKENS + 1)
    found = {}
    with recording({type(layer.attention) for layer in layers}):
        for _ in generate_step(mx.array(prompt[:-1]), model, max_tokens=0, prompt_cache=caches):
            pass
        token, answer = prompt[-1], []
        for fed in range(-1, MAX_TOKENS):
            found[fed] = Snapshot(shallow(caches), token, list(answer))
            logits = model(mx.array([[token]]), cache=caches)
            mx.eval([c.state for c in caches])
            token = mx.argmax(logits[0, -1]).item()
            answer.append(token)
    return found


def narrowed(cache: RecordingKVCache, first: int, last: int) -> RecordingKVCache:
    """The same entries, as if only the positions `[first, last)` had been recorded."""
    copied = RecordingKVCache(first, last, capacity=0)
    copied.keys, copied.values, copied.offset = cache.keys, cache.values, last
    copied.record(cache.queries[:, :, first - cache.first : last - cache.first], cache.scale)
    copied.offset = cache.offset
    return copied


def answer_with(model, tokenizer, found: dict[int, Snapshot], n_prompt: int, policy: SnapKV) -> str:
    """The answer when `policy` compresses where `generate_step` would."""
    lookahead = policy.lookahead or 0
    fed = -1 if not policy.last_token else max(1, lookahead)
    snapshot = found[fed]
    last = n_prompt - 1 if not policy.last_token else n_prompt + lookahead
    first = min(last, n_prompt) - policy.obs_window
    caches = [
        narrowed(c, first, last) if isinstance(c, RecordingKVCache) else c
        for c in shallow(snapshot.caches)
    ]
    compress_prompt_cache(model, caches, policy)
    answer = list(snapshot.answer)
    for token, _ in generate_step(
        mx.array([snapshot.next_token]),
        model,
        max_tokens=MAX_TOKENS - len(answer),
        prompt_cache=caches,
    ):
        answer.append(token)
    return decode(tokenizer, answer)


def decode(tokenizer, answer: list[int]) -> str:
    ends = [i for i, token in enumerate(answer) if token in tokenizer.eos_token_ids]
    return tokenizer.decode(answer[: ends[0]] if ends else answer)


def settings(n_tokens: int) -> dict[tuple[str, int], SnapKV]:
    """Every (way, kernel) to measure with 1/16 of the entries."""
    size = {"n_sink": N_SINK, "n_window": N_WINDOW, "min_ctx": 0}
    size["top_k"] = n_tokens // SHARE - N_SINK - N_WINDOW
    chosen = {}
    for kernel in KERNELS:
        for way, options in WAYS.items():
            chosen[way, kernel] = SnapKV(**size, **options, pool_kernel=kernel)
        for name, options in VARIANTS.items():
            chosen[f"last token, {name}", kernel] = SnapKV(**size, **options, pool_kernel=kernel)
    size |= {"top_k": 0, "n_window": n_tokens // SHARE - N_SINK}
    chosen["sink + window", 1] = SnapKV(**size, pool_kernel=1, last_token=False)  # nobody votes
    return chosen


def measure(name: str, n_tokens: int, questions: int) -> dict:
    model, tokenizer = load(str(MODELS[name]))
    model.set_dtype(mx.float32)
    right: dict[tuple[str, int], int] = {}
    full = 0
    for i in range(questions):
        document, facts = make_haystack(
            tokenizer, random.Random(5_000_000 + n_tokens + i), 4, n_tokens - 40
        )
        prompt = question_prompt(tokenizer, document, facts[0].question)
        found = snapshots(model, prompt)
        full += is_right(facts[0], decode(tokenizer, found[MAX_TOKENS - 1].answer))
        for key, policy in settings(len(prompt)).items():
            answer = answer_with(model, tokenizer, found, len(prompt), policy)
            right[key] = right.get(key, 0) + is_right(facts[0], answer)
        mx.clear_cache()
        print(f"{name}, {n_tokens} tokens: question {i + 1}/{questions}", end="\r", flush=True)
    print()
    rows = [{"way": way, "kernel": kernel, "right": n} for (way, kernel), n in right.items()]
    return {"model": name, "tokens": n_tokens, "questions": questions, "full": full, "rows": rows}


def as_markdown(results: list[dict]) -> str:
    """A table for each model and length."""
    parts = []
    for result in results:
        n = result["questions"]
        parts.append(
            f"`{result['model']}`, {result['tokens']:,} tokens, 1/{SHARE} of the entries, {n} questions, "
            f"full cache {result['full'] / n:.2f} ({result['date']}, commit {result['commit']}, "
            f"{result['machine']}):\n"
        )
        parts.append("| votes from | " + " | ".join(f"kernel {k}" for k in KERNELS) + " |")
        parts.append("|---" * (len(KERNELS) + 1) + "|")
        table = {(r["way"], r["kernel"]): r["right"] for r in result["rows"]}
        for way in dict.fromkeys(r["way"] for r in result["rows"]):
            cells = [f"{table[way, k] / n:.2f}" if (way, k) in table else "" for k in KERNELS]
            parts.append(f"| {way} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def page(results: list[dict]) -> str:
    """docs/defaults.md, from its results."""
    written = "Written by `python scripts/measure_defaults.py`, never typed."
    return f"# Measuring SnapKV's defaults\n\n{as_markdown(results)}\n{written}\n"


def main() -> None:
    parser = shared_options(__doc__, "defaults")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--questions", type=int, default=24)
    args = parser.parse_args()
    measured = [
        measure(m, n, args.questions) | about("measure_defaults.py") | {"versions": mlx_versions()}
        for m in args.models
        for n in args.lengths
    ]
    file = args.out.with_suffix(".json")
    # Models and lengths that this run left out keep their results.
    kept = json.loads(file.read_text()) if file.exists() else []
    table = {(r["model"], r["tokens"]): r for r in kept + measured}
    results = [table[key] for key in sorted(table)]
    write(args.out, results, page(results))
    print(as_markdown(measured))


if __name__ == "__main__":
    main()
