import random

import pytest

from mlx_snapkv.chat.prompts import common_prefix
from mlx_snapkv.demo.documents import Fact, make_document, make_facts
from mlx_snapkv.demo.questions import (
    contains,
    is_right,
    make_haystack,
    question_prompt,
    token_counter,
)


def test_every_fact_is_there_once():
    rng = random.Random(3)
    facts = make_facts(rng, 12)
    document = make_document(rng, facts, 2000, lambda s: len(s.split()))
    assert len({fact.subject for fact in facts}) == 12
    for fact in facts:
        assert document.count(fact.clause[1:]) == 1


def test_documents_have_the_length_asked_for(demo_llama):
    _, tokenizer = demo_llama
    for n in (500, 2000):
        document, _ = make_haystack(tokenizer, random.Random(n), 4, n)
        assert n - 40 <= token_counter(tokenizer)(document) <= n


def test_prompts_of_one_document_share_all_but_the_question(demo_llama):
    _, tokenizer = demo_llama
    document, facts = make_haystack(tokenizer, random.Random(0), 3, 400)
    prompts = [question_prompt(tokenizer, document, fact.question) for fact in facts]
    shared = common_prefix(prompts)
    assert 390 < shared < min(map(len, prompts))
    assert tokenizer.decode(prompts[0][shared:]).endswith("?<|assistant|>")


@pytest.mark.parametrize(
    "answer, begins, named",
    [
        ("1234", True, True),
        (" 1234.", True, True),
        ("1234\nmore", True, True),
        ("It is 1234.", False, True),
        ("12345", False, False),
        ("123", False, False),
        ("", False, False),
    ],
)
def test_answers_are_judged_exactly(answer, begins, named):
    assert is_right(Fact("access code", "amber falcon", "1234"), answer) == begins
    assert contains(answer, "1234") is named
