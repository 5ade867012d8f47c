import random
import re

import pytest

from mlx_snapkv.chat.prompts import common_prefix
from mlx_snapkv.demo.documents import Fact
from mlx_snapkv.demo.questions import (
    contains,
    is_right,
    make_haystack,
    question_prompt,
    token_counter,
)
from mlx_snapkv.demo.tasks import TASKS, make_task


def task(name, seed=0):
    return make_task(name, random.Random(seed), 600, lambda text: len(text.split()), 24)


def values(document, question):
    """What the document says of the question's subject, in its order."""
    subject = question.question.removeprefix("What is the ").removesuffix("?").removesuffix(" now")
    return re.findall(rf"he {subject} is (?:now )?([^.]+)\.", document)


@pytest.mark.parametrize(
    "name, hidden", [*((name, 12) for name in TASKS), ("several", 2), ("three-links", 60)]
)
def test_documents_have_the_length_asked_for_and_a_question(name, hidden, demo_llama):
    count = token_counter(demo_llama[1])
    document, questions = make_task(name, random.Random(3), 2000, count, hidden)
    assert 1950 <= count(document) <= 2000
    assert questions and len({q.question for q in questions}) == len(questions)
    assert task(name, 1) == task(name, 1) != task(name, 2)


def test_prompts_of_a_haystack_share_all_but_the_question(demo_llama):
    _, tokenizer = demo_llama
    document, facts = make_haystack(tokenizer, random.Random(0), 12, 800)
    assert 760 <= token_counter(tokenizer)(document) <= 800
    assert all(values(document, fact) == [fact.value] for fact in facts)
    prompts = [question_prompt(tokenizer, document, fact.question) for fact in facts]
    shared = common_prefix(prompts)
    assert 760 < shared < min(map(len, prompts))
    assert tokenizer.decode(prompts[0][shared:]).endswith("?<|assistant|>")


@pytest.mark.parametrize(
    "answer, begins, named",
    [
        (" 1234.", True, True),
        ("1234\nmore", True, True),
        ("It is 1234.", False, True),
        ("12345", False, False),
        ("", False, False),
    ],
)
def test_answers_are_judged_exactly(answer, begins, named):
    assert is_right(Fact("access code", "amber falcon", "1234"), answer) == begins
    assert contains(answer, "1234") is named


@pytest.mark.parametrize("name", ["single", "look-alikes", "overwritten"])
def test_the_document_says_what_is_asked_for(name):
    """Once, or an older value before."""
    document, questions = task(name)
    assert len(questions) > 5
    for question in questions:
        *older, value = values(document, question)
        assert value == question.value and len(older) == (name == "overwritten")


@pytest.mark.parametrize("name", ["several", "two-links", "three-links"])
def test_every_part_of_an_answer_stands_in_the_document(name):
    document, questions = task(name)
    for part in ", ".join(question.value for question in questions).split(", "):
        assert f"{part}." in document
