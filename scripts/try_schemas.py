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
from pathlib import Path
from typing import Any

import mlx.core as mx
from jsonschema import validators

from mlx_snapkv import stream_generate
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.completions.constraint import Constraint
from mlx_snapkv.completions.grammar import json_form
from mlx_snapkv.completions.request import initial_state
from mlx_snapkv.errors import SnapKVError


def schemas(folder: Path, seed: int) -> list[Any]:
    found = [
        case["schema"]
        for path in sorted(folder.glob("*.json"))
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]
    random.Random(seed).shuffle(found)
    return found


def answer(model: Any, tokenizer: Any, tokens: list[int], n: int, **options: Any) -> tuple:
    """The text, why it ended, its tokens, and the seconds for all but the first."""
    texts, times, last = [], [], time.perf_counter()
    for response in stream_generate(model, tokenizer, tokens, max_tokens=n, **options):
        texts.append(response.text)
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return "".join(texts), response.finish_reason, len(times), sum(times[1:])


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
    counts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    ratios, seconds = [], [0.0, 0.0]
    for schema in schemas(options.suite, options.seed):
        if counts["answered"] == options.schemas:
            break
        question = f"Answer with JSON that obeys this JSON schema: {json.dumps(schema)}"
        if tokenizer.has_chat_template:
            messages = [{"role": "user", "content": question}]
            tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            state = initial_state(tokenizer, tokens)
        else:
            tokens, state = tokenizer.encode(question + "\n"), None
        try:
            form = json_form(schema, tokenizer, state, "the schema")
        except SnapKVError as error:
            refused[str(error)[:110]] += 1
            continue
        own = [Constraint(tokenizer, form, options.max_tokens)]
        text, why, n, first = answer(
            model, tokenizer, tokens, options.max_tokens, logits_processors=own
        )
        ends, tokenizer.eos_token_ids = tokenizer.eos_token_ids, None
        _, _, n_free, second = answer(model, tokenizer, tokens, n)
        tokenizer.eos_token_ids = ends
        counts["answered"] += 1
        counts["closed"] += own[0].is_cut
        counts[why] += 1
        try:
            value = json.loads(text)
        except ValueError:
            print(f"not JSON ({why}): {json.dumps(schema)} -> {text[:200]!r}")
            continue
        counts["JSON"] += 1
        if validator(schema).is_valid(value):
            counts["obey"] += 1
        else:
            print(f"does not obey: {json.dumps(schema)} -> {text[:200]}")
        if n > 8 and n == n_free:
            print(
                f"{counts['answered']}: {n} tokens, {1e3 * first / n:.1f} / {1e3 * second / n:.1f} ms a token"
            )
            ratios.append(first / second)
            seconds = [seconds[0] + first, seconds[1] + second]
    print(dict(counts))
    for why, n in refused.most_common():
        print(f"refused {n}: {why}")
    if ratios:
        print(
            f"time a token, constrained over free: {seconds[0] / seconds[1]:.3f} in all, "
            f"median {statistics.median(ratios):.3f} of {len(ratios)} answers of 9 tokens or more"
        )


if __name__ == "__main__":
    main()
