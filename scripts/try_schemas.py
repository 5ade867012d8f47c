"""Answers to schemas of the JSON-Schema-Test-Suite: how many are JSON and obey, and what a token costs.

    pip install jsonschema
    python scripts/try_schemas.py real-models/smollm2-135m-instruct JSON-Schema-Test-Suite/tests/draft2020-12

Each answer is followed by one to the same prompt without the schema, of as many tokens, so that both see the same
machine. Schemas that the server would refuse are counted, and others drawn in their place.
"""

import argparse
import collections
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from jsonschema import validators

from mlx_snapkv import stream_generate
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.completions.chat_template import Rendered, initial_state
from mlx_snapkv.completions.constraint import Constraint
from mlx_snapkv.completions.grammar import json_form
from mlx_snapkv.errors import SnapKVError


def schemas(folder: Path, seed: int) -> list[Any]:
    found = [
        case["schema"]
        for path in sorted(folder.glob("*.json"))
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]
    random.Random(seed).shuffle(found)
    return found


@dataclass(frozen=True)
class Answer:
    """An answer's text, why it ended, its tokens, and the seconds for all but the first."""

    text: str
    finish_reason: str
    n_tokens: int
    seconds: float


@dataclass
class Tally:
    """What has come of the schemas so far."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    constrained_seconds: list[float] = field(default_factory=list)  # of answers of equal length
    free_seconds: list[float] = field(default_factory=list)

    def print(self) -> None:
        print(dict(self.counts))
        for why, n in self.refused.most_common():
            print(f"refused {n}: {why}")
        if self.free_seconds:
            pairs = zip(self.constrained_seconds, self.free_seconds)
            ratios = [constrained / free for constrained, free in pairs]
            whole = sum(self.constrained_seconds) / sum(self.free_seconds)
            print(
                f"time a token, constrained over free: {whole:.3f} in all, "
                f"median {statistics.median(ratios):.3f} of {len(ratios)} answers of 9 tokens or more"
            )


def answer(model: Any, tokenizer: Any, tokens: list[int], n: int, **options: Any) -> Answer:
    texts, times, last = [], [], time.perf_counter()
    for response in stream_generate(model, tokenizer, tokens, max_tokens=n, **options):
        texts.append(response.text)
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return Answer("".join(texts), response.finish_reason, len(times), sum(times[1:]))


def answer_freely(model: Any, tokenizer: Any, tokens: list[int], n: int) -> Answer:
    """An answer of exactly `n` tokens: none ends it."""
    ends, tokenizer.eos_token_ids = tokenizer.eos_token_ids, None
    try:
        return answer(model, tokenizer, tokens, n)
    finally:
        tokenizer.eos_token_ids = ends


def prompt_of(tokenizer: Any, schema: Any) -> tuple[list[int], str | None]:
    """The tokens that ask for an object of this schema, and the state in which the answer begins."""
    question = f"Answer with JSON that obeys this JSON schema: {json.dumps(schema)}"
    if not tokenizer.has_chat_template:
        return tokenizer.encode(question + "\n"), None
    messages = [{"role": "user", "content": question}]
    chat = Rendered(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True),
        messages,
        {"add_generation_prompt": True},
    )
    return chat.tokens, initial_state(tokenizer, chat)


def try_schema(
    model: Any, tokenizer: Any, schema: Any, validator: Any, max_tokens: int, tally: Tally
) -> None:
    """Answer to a schema with and without it, and count what came of that."""
    counts = tally.counts
    tokens, state = prompt_of(tokenizer, schema)
    try:
        form = json_form(schema, tokenizer, state, "the schema")
    except SnapKVError as error:
        tally.refused[str(error)[:110]] += 1
        return
    constraint = Constraint(tokenizer, form, max_tokens)
    found = answer(model, tokenizer, tokens, max_tokens, logits_processors=[constraint])
    n = found.n_tokens
    free = answer_freely(model, tokenizer, tokens, n)
    counts["answered"] += 1
    counts["closed"] += constraint.is_cut
    counts[found.finish_reason] += 1
    try:
        value = json.loads(found.text)
    except ValueError:
        why = found.finish_reason
        print(f"not JSON ({why}): {json.dumps(schema)} -> {found.text[:200]!r}")
        return
    counts["JSON"] += 1
    if validator(schema).is_valid(value):
        counts["obey"] += 1
    else:
        print(f"does not obey: {json.dumps(schema)} -> {found.text[:200]}")
    if n > 8 and n == free.n_tokens:
        times = f"{1e3 * found.seconds / n:.1f} / {1e3 * free.seconds / n:.1f} ms a token"
        print(f"{counts['answered']}: {n} tokens, {times}")
        tally.constrained_seconds.append(found.seconds)
        tally.free_seconds.append(free.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("suite", type=Path, help="a draft's folder of the test suite")
    parser.add_argument("--schemas", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draft = options.suite.name.removeprefix("draft").replace("-", "")
    validator = getattr(validators, f"Draft{draft}Validator")
    model, tokenizer = load_model(options.model)
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)  # what a CPU computes quickly
    tally = Tally()
    for schema in schemas(options.suite, options.seed):
        if tally.counts["answered"] == options.schemas:
            break
        try_schema(model, tokenizer, schema, validator, options.max_tokens, tally)
    tally.print()


if __name__ == "__main__":
    main()
