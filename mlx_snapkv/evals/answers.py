"""The answers to prompts, one at a time or many at once: the same, but for what they tell of time."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mlx_lm.models.cache import make_prompt_cache

from ..batch.batchable import is_batchable
from ..engine.generate import stream_generate
from ..engine.report import CompressionReport
from ..engine.rewind import Rewind
from ..policies import Policy, Stages
from ..several.part import part_of
from . import by_mask
from .batches import in_batches
from .headwise import HeadWise
from .prompt import Answer, Prompt

Key = TypeVar("Key")


def answers(
    model,
    tokenizer,
    prompts: Iterable[tuple[Key, Prompt]],
    policy: Policy | Stages | HeadWise | None,
    options: Mapping[str, Any],
    batch_size: int,
) -> Iterator[tuple[Key, Answer]]:
    """Each prompt's answer, as it ends, with the key that came with the prompt.

    They are decoded together if `batch_size` is above 1, there are no `options` (others of `stream_generate`, which
    batches don't have) and mlx-lm can batch the model. A cache that a prompt goes on from is then left as it is, and
    where there are `options`; else it is brought back to where it was when the next answer is asked for. Head-wise
    methods answer by mask, and alone.
    """
    generate: Any = stream_generate
    if isinstance(policy, HeadWise):
        generate = by_mask.stream_generate
    elif batch_size > 1 and not options and is_batchable(model):
        yield from in_batches(model, tokenizer, prompts, policy, batch_size)
        return
    given = {"policy": policy, **options}
    for key, prompt in prompts:
        if prompt.cache is None or options:  # what recalls takes marks of its own
            asked = replace(prompt, cache=copy.deepcopy(prompt.cache))
            yield key, _alone(generate, model, tokenizer, asked, given)
        else:
            before = Rewind(prompt.cache)
            yield key, _alone(generate, model, tokenizer, prompt, given)
            before.restore()


def _alone(generate, model, tokenizer, prompt: Prompt, options: Mapping[str, Any]) -> Answer:
    reports: list[CompressionReport] = []
    cache = make_prompt_cache(model) if prompt.cache is None else prompt.cache
    given = {"prompt_cache": cache, "on_report": reports.append, **options}
    text, first = "", 0.0
    started = time.perf_counter()
    responses = generate(model, tokenizer, prompt.tokens, prompt.max_tokens, **given)
    with contextlib.closing(responses):  # type: ignore[type-var]
        for response in responses:
            first = first or time.perf_counter() - started
            text += response.text
            if prompt.is_answered(text):
                break
    return Answer(text, cache, reports[0], first, part_of(model).ranks)
