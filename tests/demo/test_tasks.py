"""The answers that the tasks expect, read again from their documents by other means."""

import random
import re

import pytest

from mlx_snapkv.demo.questions import token_counter
from mlx_snapkv.demo.tasks import TASKS, make_task


def count_words(text):
    return len(text.split())


def task(name, seed=0, n_tokens=600, hidden=24):
    return make_task(name, random.Random(seed), n_tokens, count_words, hidden)


def values(document, question):
    """What the document says of the question's subject, in its order."""
    subject = question.question.removeprefix("What is the ").removesuffix("?").removesuffix(" now")
    return re.findall(rf"he {subject} is (?:now )?([^.]+)\.", document)


@pytest.mark.parametrize(
    "name, hidden", [*((name, 12) for name in TASKS), ("several", 2), ("three-links", 60)]
)
def test_documents_have_the_length_asked_for_and_a_question(name, hidden, demo_llama):
    _, tokenizer = demo_llama
    count = token_counter(tokenizer)
    document, questions = make_task(name, random.Random(3), 2000, count, hidden)
    assert 1950 <= count(document) <= 2000
    assert questions and len({q.question for q in questions}) == len(questions)
    assert task(name, 1) == task(name, 1) != task(name, 2)


@pytest.mark.parametrize("name", ["single", "look-alikes"])
def test_a_value_stands_there_once(name):
    document, questions = task(name)
    assert len(questions) == 24
    for question in questions:
        assert values(document, question) == [question.value]


def test_the_newer_value_comes_later():
    document, questions = task("overwritten")
    assert len(questions) > 5
    for question in questions:
        older, newer = values(document, question)
        assert older != newer == question.value


def test_each_of_several_facts_is_in_the_document():
    document, questions = task("several")
    for question in questions:
        clauses = question.value.split(", ")
        assert question.question.count("of the") == len(clauses) in (2, 3)
        assert all(f"of {clause}." in document for clause in clauses)


@pytest.mark.parametrize("name, links", [("two-links", 2), ("three-links", 3)])
def test_the_chain_is_the_documents(name, links):
    document, questions = task(name)
    follows = dict(re.findall(r"VAR (\w+) is (\w+)\.", document))
    for question in questions:
        place, chain = question.question.split()[-1].removesuffix("?"), []
        while place in follows:
            chain.append(f"VAR {place} is {follows[place]}")
            place = follows[place]
        assert len(chain) == links and question.value == ", ".join(chain)
