"""The documents and questions of the evaluation suite."""

import random
import re

import pytest
from evaluation.suite_tasks import TASKS, make_task

from mlx_snapkv.demo.questions import token_counter


def task(name, seed=0):
    return make_task(name, random.Random(seed), 600, lambda text: len(text.split()), 24)


def values(document, question):
    """Return the values that the document gives for the question's subject, in order."""
    subject = question.question.removeprefix("What is the ").removesuffix("?").removesuffix(" now")
    return re.findall(rf"he {subject} is (?:now )?([^.]+)\.", document)


@pytest.mark.parametrize(
    "name, hidden", [*((name, 12) for name in TASKS), ("several", 2), ("three-links", 60)]
)
def test_documents_have_the_requested_length_and_questions(name, hidden, demo_llama):
    count = token_counter(demo_llama[1])
    document, questions = make_task(name, random.Random(3), 2000, count, hidden)
    assert 1950 <= count(document) <= 2000
    assert questions and len({q.question for q in questions}) == len(questions)
    assert task(name, 1) == task(name, 1) != task(name, 2)


@pytest.mark.parametrize("name", ["single", "look-alikes", "overwritten"])
def test_the_document_contains_the_answer_to_its_questions(name):
    """In "overwritten", an older value precedes the answer."""
    document, questions = task(name)
    assert len(questions) > 5
    for question in questions:
        *older, value = values(document, question)
        assert value == question.value and len(older) == (name == "overwritten")


@pytest.mark.parametrize("name", ["several", "two-links", "three-links"])
def test_the_document_contains_every_part_of_an_answer(name):
    document, questions = task(name)
    for part in ", ".join(question.value for question in questions).split(", "):
        assert f"{part}." in document
