"""Looking things up late in a long answer: on_full=every way to go on when the window is full.

    python scripts/measure_long_answers.py               # writes docs/long-answers.json and docs/long-answers.md

What these files say of other models, sizes and distances stays.

The embedded models don't write long answers of their own accord. Here they are made to: every token of a text with
a fact in it, and of a question after it, is fed as if the model had chosen it; the next tokens are the model's own.
What is right is the value of the fact, which it said itself or read in the prompt. After the first few, tokens are fed
in blocks between two choices, which is exactly as one by one (tests/engine/test_split_calls.py).
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from results_page import about, shared_options, write, written_by

from mlx_snapkv import SnapKV, generate_step
from mlx_snapkv.caches.layers import layer_caches
from mlx_snapkv.caches.window import SnapKVCache
from mlx_snapkv.chat.common_prefix import common_prefix
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.cli.options import with_suffix
from mlx_snapkv.demo.documents import Fact, fact_sentence, filler_sentence, make_facts
from mlx_snapkv.demo.questions import is_right, make_haystack, token_counter
from mlx_snapkv.policies.snapkv import ON_FULL

SEED = 9_000_000
PROMPT = 1024  # tokens
PLACES = ("answer", "prompt")
DISTANCES = [64, 256, 1024, 2048, 3500, 4096]
FULL = "full cache"
WAYS = [FULL, *ON_FULL]
RESERVES: list[int | str] = [0, "10%", "25%", "50%", "75%"]
FIRST = 8  # tokens of the answer that are told one by one: some vote, then the prompt is compressed
SIZE: dict[str, Any] = {"budget": 256, "n_sink": 4, "n_window": 128, "min_ctx": 0}

Asked = tuple[mx.array, list[int], Fact]  # a prompt, what is said after it, and what is to follow


def question(
    tokenizer, rng: random.Random, place: str, distance: int, n_prompt: int = PROMPT
) -> Asked:
    """A prompt, the tokens to be said after it, and the fact that they end by asking for.

    Args:
        place: where the fact is: in the "answer", or in the "prompt", which asks for it too.
        distance: tokens that the answer goes on for after that.
    """
    document, (known, *_) = make_haystack(tokenizer, rng, 4, n_prompt)
    (said,) = make_facts(rng, 1)
    count = token_counter(tokenizer)
    answer = fact_sentence(said, rng)
    while count(answer) < distance:
        answer += " " + filler_sentence(rng)
    fact = known if place == "prompt" else said
    turns = [f"{document}\n\n{known.question}", answer, fact.question]
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns)]
    prompt, whole = (
        tokenizer.apply_chat_template(m, add_generation_prompt=True, enable_thinking=False)
        for m in (messages[:1], messages)
    )
    return mx.array(prompt), whole[common_prefix([prompt, whole]) :], fact


def recalls(
    model, tokenizer, asked: list[Asked], policy: SnapKV | None
) -> list[tuple[bool, float | None]]:
    """Of every question, whether the fact's value follows, and the share of the voted entries that are still held.

    Args:
        asked: questions about one prompt and one answer, the sooner asked first. The answer is told once, and every
            question is put to a copy of the cache.
        policy: what the answer is decoded with; None is the full cache.
    """
    prompt, longest, _ = asked[-1]
    cache = make_prompt_cache(model)
    told = FIRST
    left = list(longest[:told])

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.array([left.pop(0)]) if left else mx.argmax(logprobs, axis=-1)

    options: dict[str, Any] = {"prompt_cache": cache, "sampler": sampler, "policy": policy}
    for _ in generate_step(prompt, model, max_tokens=told, **options):
        pass
    voted = [c.positions[..., c.n_sink : c.n_pin] for c in of_fixed_shape(cache)]
    found: list[tuple[bool, float | None]] = []
    for i, (_, said, fact) in enumerate(asked):
        shared = min(common_prefix([said for _, said, _ in asked[i:]]), len(said) - 1)
        if shared > told:
            part = mx.array(said[told:shared])
            for _ in generate_step(part, model, max_tokens=0, prompt_cache=cache):
                pass
            told = shared
        now = [c.positions for c in of_fixed_shape(cache)]
        copied = copy.deepcopy(cache)
        rest = mx.array(said[told:])
        tokens = generate_step(rest, model, max_tokens=12, prompt_cache=copied)
        right = is_right(fact, tokenizer.decode([token for token, _ in tokens]))
        found.append((right, share_of(voted, now)))
    return found


def of_fixed_shape(prompt_cache: list) -> list[SnapKVCache]:
    return [c for c in layer_caches(prompt_cache) if isinstance(c, SnapKVCache)]


def share_of(voted: list[mx.array], held: list[mx.array]) -> float | None:
    """The share of positions `(B, n_kv_heads, n)` that are among others, over all layers; None without layers."""
    shares = [(a[..., :, None] == b[..., None, :]).any(axis=-1).mean() for a, b in zip(voted, held)]
    return float(mx.stack(shares).mean().item()) if shares else None  # type: ignore[arg-type]


def policies(
    size: dict[str, Any], ways: list[str], reserves: list[int | str]
) -> dict[str, SnapKV | None]:
    """By name, every way asked for, "keydiff" with every `reserve`; None is the full cache."""
    made: dict[str, SnapKV | None] = {}
    for way in ways:
        if way == FULL:
            made[way] = None
        elif way == "keydiff":
            made |= {f"{way}, reserve={n}": SnapKV(**size, reserve=n) for n in reserves}
        else:
            made[way] = SnapKV(**size, on_full=way)
    return made


def measure(
    name: str,
    n_prompt: int,
    distances: list[int],
    ways: dict[str, SnapKV | None],
    questions: int,
) -> list[dict[str, Any]]:
    """One row a way, place and distance."""
    model, tokenizer = load_model(name)
    cells = [(place, distance) for distance in sorted(distances) for place in PLACES]
    found: dict[str, list[list[tuple[bool, float | None]]]] = {way: [] for way in ways}
    for n in range(questions):
        asked = [
            question(tokenizer, random.Random(f"{SEED} {n}"), *cell, n_prompt) for cell in cells
        ]
        for way, policy in ways.items():
            found[way].append(recalls(model, tokenizer, asked, policy))
            right = "".join("-+"[right] for right, _ in found[way][-1])
            print(f"{name}, question {n}, {way}: {right}", flush=True)
    rows = []
    for way, (i, (place, distance)) in itertools.product(ways, enumerate(cells)):
        here = [each[i] for each in found[way]]
        row = {"way": way, "place": place, "distance": distance}
        row |= {"right": sum(right for right, _ in here), "asked": questions}
        shares = [share for _, share in here if share is not None]
        rows.append(row | ({"left": sum(shares) / len(shares)} if shares else {}))
    return rows


def page(result: list[dict[str, Any]]) -> str:
    """docs/long-answers.md, from its result."""
    lines = [
        "# Long answers",
        "",
        "A prompt, and an answer that comes back to a fact so many tokens later: the one that the prompt asks for, or "
        "one that the answer began with. The model is made to say all but the value. Right answers of those asked "
        "for, and the share of the prompt's voted entries that are still held. `reserve` is how many of these never "
        "give way; where none is told, there were none.",
    ]
    for part in result:
        size = ", ".join(f"{k}={v}" for k, v in part["size"].items())
        lines += ["", f"## `{part['model']}`, {part['prompt']:,} tokens, {size}", ""]
        lines.append(written_by(part))
        rows = part["rows"]
        for place in ("prompt", "answer"):
            mine = [r for r in rows if r["place"] == place]
            right = _by_way(mine, lambda r: f"{r['right']}/{r['asked']}")
            lines += _table(f"A fact of the {place}, asked for after", mine, right)
        held = [r for r in rows if r["place"] == "prompt" and "left" in r]
        if held:
            lines += _table("Voted entries held after", held, _by_way(held, _share))
    return "\n".join(lines) + "\n"


def _share(row: dict[str, Any]) -> str:
    return f"{row['left']:.0%}"


def _by_way(
    rows: list[dict[str, Any]], text: Callable[[dict[str, Any]], str]
) -> dict[str, list[str]]:
    by_way: dict[str, list[str]] = {}
    for row in rows:
        by_way.setdefault(row["way"], []).append(text(row))
    return by_way


def _table(title: str, rows: list[dict[str, Any]], by_way: dict[str, list[str]]) -> list[str]:
    heads = [f"{d:,} tokens" for d in dict.fromkeys(r["distance"] for r in rows)]
    lines = ["", f"| {title} | " + " | ".join(heads) + " |"]
    lines.append("| --- |" + " ---: |" * len(heads))
    return [*lines, *(f"| {way} | " + " | ".join(cells) + " |" for way, cells in by_way.items())]


def _is_same(part: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results are of one model, size and distances, so that the later replaces the other."""
    distances = [{row["distance"] for row in p["rows"]} for p in (part, other)]
    same = all(part[name] == other[name] for name in ("model", "prompt", "size"))
    return same and distances[0] == distances[1]


def _amount(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def main() -> None:
    parser = shared_options(__doc__, "long-answers")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    parser.add_argument("--budget", type=int, default=SIZE["budget"])
    parser.add_argument("--n-window", type=int, default=SIZE["n_window"])
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--reserves", nargs="+", type=_amount, default=RESERVES)
    parser.add_argument("--questions", type=int, default=10)
    args = parser.parse_args()
    size = SIZE | {"budget": args.budget, "n_window": args.n_window}
    ways = policies(size, args.ways, args.reserves)
    command = about("measure_long_answers.py", *sys.argv[1:])
    file = with_suffix(args.out, ".json")
    result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for name in args.models:
        part = {**command, "model": name, "prompt": args.prompt, "size": size}
        part["rows"] = measure(name, args.prompt, args.distances, ways, args.questions)
        result = [other for other in result if not _is_same(other, part)] + [part]
        write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
