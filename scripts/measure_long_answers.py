"""Looking things up late in a long answer: on_full=every way to go on when the window is full.

    python scripts/measure_long_answers.py               # writes docs/long-answers.json and docs/long-answers.md

The embedded models don't write long answers of their own accord. Here they are made to: every token of a text with
a fact in it, and of a question after it, is fed as if the model had chosen it, one step at a time; the next tokens
are the model's own. What is right is the value of the fact, which it said itself or read in the prompt.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import mlx.core as mx
from results_page import about, shared_options, write, written_by

from mlx_snapkv import SnapKV, generate_step
from mlx_snapkv.chat.common_prefix import common_prefix
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.documents import Fact, fact_sentence, filler_sentence, make_facts
from mlx_snapkv.demo.questions import is_right, make_haystack, token_counter
from mlx_snapkv.policies.snapkv import ON_FULL

SEED = 9_000_000
PROMPT = 1024  # tokens
PLACES = ("answer", "prompt")
SIZE = {"budget": 256, "n_sink": 4, "n_window": 128, "min_ctx": 0}


def question(
    tokenizer, rng: random.Random, place: str, distance: int
) -> tuple[mx.array, list[int], Fact]:
    """A prompt, the tokens to be said after it, and the fact that they end by asking for.

    Args:
        place: where the fact is: in the "answer", or in the "prompt", which asks for it too.
        distance: tokens that the answer goes on for after that.
    """
    document, (known, *_) = make_haystack(tokenizer, rng, 4, PROMPT)
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
    model, tokenizer, prompt: mx.array, said: list[int], fact: Fact, on_full: str | None
) -> bool:
    """Whether the fact's value follows, decoded with a policy, or with the full cache."""
    left = list(said)

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.array([left.pop(0)]) if left else mx.argmax(logprobs, axis=-1)

    policy = None if on_full is None else SnapKV(**SIZE, on_full=on_full)
    n = len(said) + 12
    tokens = generate_step(prompt, model, max_tokens=n, sampler=sampler, policy=policy)
    answer = [token for token, _ in tokens][len(said) :]
    return is_right(fact, tokenizer.decode(answer))


def measure(name: str, distances: list[int], questions: int) -> list[dict[str, Any]]:
    model, tokenizer = load_model(name)
    rows = []
    for on_full, place, distance in itertools.product((None, *ON_FULL), PLACES, distances):
        right = 0
        for n in range(questions):
            asked = question(tokenizer, random.Random(f"{SEED} {n}"), place, distance)
            right += recalls(model, tokenizer, *asked, on_full)
        found = {"way": on_full or "full cache", "place": place, "distance": distance}
        rows.append({"model": name, **found, "right": right, "asked": questions})
        print(rows[-1], flush=True)
    return rows


def page(result: dict[str, Any]) -> str:
    """docs/long-answers.md, from its result."""
    size = ", ".join(f"{k}={v}" for k, v in result["size"].items())
    lines = [
        "# Long answers",
        "",
        written_by(result),
        "",
        f"A prompt of about {result['prompt']:,} tokens, read with SnapKV ({size}), and an answer that comes back to "
        "a fact so many tokens later: one that it said itself, or the one that the prompt asks for. The model is made "
        "to say all but the value. Right answers of those asked for.",
    ]
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        mine = [r for r in result["rows"] if r["model"] == name]
        heads = dict.fromkeys(f"{r['place']}, {r['distance']:,} tokens ago" for r in mine)
        lines += ["", f"## `{name}`", ""]
        lines += ["| on_full | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
        for way in dict.fromkeys(r["way"] for r in mine):
            cells = [r for r in mine if r["way"] == way]
            figures = [f"{r['right']}/{r['asked']}" for r in cells]
            lines.append(f"| {way} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = shared_options(__doc__, "long-answers")
    parser.add_argument("--distances", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--questions", type=int, default=10)
    args = parser.parse_args()
    here = about("measure_long_answers.py", *sys.argv[1:])
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += measure(name, args.distances, args.questions)
    result = {
        **here,
        "prompt": PROMPT,
        "size": SIZE,
        "rows": rows,
    }
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
