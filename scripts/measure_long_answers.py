"""Looking up what the answer itself said earlier: on_full=every way to go on when the window is full.

    python scripts/measure_long_answers.py               # writes docs/long-answers.json and docs/long-answers.md

The embedded models don't write long answers of their own accord. Here they are made to: every token of a text with
facts in it is fed as if the model had chosen it, one step at a time, and then the beginning of a fact's
sentence; the next tokens are the model's own. What is right is the value it said earlier in the same answer.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from results_page import about, write, written_by

from mlx_snapkv import SnapKV, generate_step
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.documents import fact_sentence, filler_sentence, make_facts
from mlx_snapkv.policies.snapkv import ON_FULL

ROOT = Path(__file__).resolve().parent.parent
SEED = 9_000_000
PROMPT = 1024  # tokens
SIZE = {"budget": 256, "n_sink": 4, "n_window": 128, "min_ctx": 0}


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def forced_answer(tokenizer, rng: random.Random, distance: int) -> tuple[list[int], list[int]]:
    """Tokens to be said, and the value that comes next: said once before, `distance` tokens ago."""
    (fact,) = make_facts(rng, 1)
    said = ids(tokenizer, fact_sentence(fact, rng))
    while len(said) < distance:
        said += ids(tokenizer, " " + filler_sentence(rng))
    value = ids(tokenizer, f"{fact.lead} {fact.value}")
    lead = ids(tokenizer, fact.lead)
    return said + ids(tokenizer, f" {fact.lead}"), value[len(lead) :]


def recalls(
    model, prompt: mx.array, said: list[int], value: list[int], on_full: str | None
) -> bool:
    """Whether the value follows, decoded with a policy, or with the full cache."""
    left = list(said)

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.array([left.pop(0)]) if left else mx.argmax(logprobs, axis=-1)

    policy = None if on_full is None else SnapKV(**SIZE, on_full=on_full)
    n = len(said) + len(value)
    answer = generate_step(prompt, model, max_tokens=n, sampler=sampler, policy=policy)
    return [token for token, _ in answer][-len(value) :] == value


def measure(name: str, distances: list[int], questions: int) -> list[dict[str, Any]]:
    model, tokenizer = load_model(name)
    rows = []
    for on_full in (None, *ON_FULL):
        for distance in distances:
            right = 0
            for n in range(questions):
                rng = random.Random(f"{SEED} {n}")
                filler = ids(tokenizer, " ".join(filler_sentence(rng) for _ in range(200)))
                said, value = forced_answer(tokenizer, rng, distance)
                right += recalls(model, mx.array(filler[:PROMPT]), said, value, on_full)
            found = {"way": on_full or "full cache", "distance": distance}
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
        f"A prompt of {result['prompt']:,} tokens, read with SnapKV ({size}), and an answer that says a fact, then "
        "other things, and then comes back to the fact, so many tokens later. The model is made to say all but the "
        "value. Right answers of those asked for.",
    ]
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        mine = [r for r in result["rows"] if r["model"] == name]
        distances = sorted({r["distance"] for r in mine})
        lines += ["", f"## `{name}`", ""]
        lines += ["| on_full | " + " | ".join(f"{d:,} tokens later" for d in distances) + " |"]
        lines += ["| --- |" + " ---: |" * len(distances)]
        for way in dict.fromkeys(r["way"] for r in mine):
            cells = [r for r in mine if r["way"] == way]
            figures = [f"{r['right']}/{r['asked']}" for r in cells]
            lines.append(f"| {way} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--distances", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "long-answers")
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
