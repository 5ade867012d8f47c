"""The suite's documents and questions."""

import random
import re

import pytest
from evaluation.suite_tasks import TASKS, make_task

from mlx_snapkv.demo.questions import token_counter


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
