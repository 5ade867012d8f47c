"""The retrieval column: facts hidden in a document, asked for with every contender."""

import random
from collections.abc import Callable
from typing import Any

from ..demo.questions import contains, make_haystack, question_prompt
from ..engine.generate import generate
from ..errors import SnapKVError
from ..policies import Policy
from .contenders import Contender, request_cache
from .decode import requesters

ANSWER = 32  # tokens at most


def measure_needles(
    model,
    tokenizer,
    context: int,
    policy_for: Callable[[int], Policy],
    questions: int,
    on_answer: Callable[[], None],
) -> list[dict[str, Any]]:
    """One record a contender: how many of `questions` facts in one document of about `context` tokens it finds."""
    document, facts = make_haystack(tokenizer, random.Random(context), questions, context)
    try:
        prompts = [question_prompt(tokenizer, document, fact.question) for fact in facts]
    except ValueError as error:
        raise SnapKVError(f"--needle asks questions, and the model can't chat: {error}") from error
    length = len(prompts[0])
    records = []
    for contender in requesters(model, length, policy_for(length)):
        right = 0
        for fact, prompt in zip(facts, prompts):
            right += contains(_answer(model, tokenizer, prompt, contender), fact.value)
            on_answer()
        records.append(contender.record(length, questions=questions, right=right))
    return records


def _answer(model, tokenizer, prompt: list[int], contender: Contender) -> str:
    cache = request_cache(model, contender)
    options = contender.options
    return generate(model, tokenizer, prompt, max_tokens=ANSWER, prompt_cache=cache, **options)
