"""Tasks that are hard for a compressed cache: questions that need more than one look-up in a document.

    document, questions = make_task("three-links", random.Random(1), 2048, count_tokens)

Each task is a function of a random generator and an approximate number of sentences to hide. It returns the sentences
in document order, and questions about them in random order. A task that asked for the most frequent of several votes
was dropped, because `demo-tasks` did not learn it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from mlx_snapkv.demo.documents import (
    ADJECTIVES,
    ATTRIBUTES,
    NOUNS,
    THINGS,
    Fact,
    fact_sentence,
    hide,
    make_facts,
)

Sentences = list[str]


@dataclass(frozen=True)
class Question:
    """A question and its answer."""

    question: str
    value: str


def _look_alikes(rng: random.Random, n: int) -> tuple[Sentences, list[Question]]:
    """Generate facts about one attribute, with subjects that share an adjective or noun with other subjects."""
    side = int(n**0.5) + 1
    adjectives, nouns = rng.sample(ADJECTIVES, side), rng.sample(NOUNS, side)
    subjects = rng.sample([f"{a} {b}" for a in adjectives for b in nouns], n)
    attribute = rng.choice(list(ATTRIBUTES))
    return _about_facts(rng, [Fact(attribute, s, ATTRIBUTES[attribute](rng)) for s in subjects])


def _about_facts(rng: random.Random, facts: list[Fact]) -> tuple[Sentences, list[Question]]:
    """Return a sentence and a question for each fact."""
    hidden = [fact_sentence(fact, rng) for fact in facts]
    return hidden, [Question(f.question, f.value) for f in rng.sample(facts, len(facts))]


def _overwritten(rng: random.Random, n: int) -> tuple[Sentences, list[Question]]:
    """Generate facts, half of which get a new value ("... is now ...") later on. Questions ask for new values."""
    facts = make_facts(rng, max(2, round(n / 1.5)))
    changed_facts = facts[: len(facts) // 2]
    new_facts = {
        fact.subject: replace(fact, value=ATTRIBUTES[fact.attribute](rng)) for fact in changed_facts
    }
    sentence_of: dict[Fact, str] = {}  # sentences in document order
    # A changed fact occurs twice: first with its old value, then with the new one.
    for fact in rng.sample([*facts, *changed_facts], len(facts) + len(changed_facts)):
        if fact in sentence_of:
            fact = new_facts[fact.subject]
            sentence_of[fact] = fact_sentence(fact, rng).replace(" is ", " is now ")
        else:
            sentence_of[fact] = fact_sentence(fact, rng)
    questions = [
        Question(fact.question.replace("?", " now?"), fact.value) for fact in new_facts.values()
    ]
    return list(sentence_of.values()), rng.sample(questions, len(questions))


def _several(rng: random.Random, n: int) -> tuple[Sentences, list[Question]]:
    """Generate questions that each ask for two or three facts. The answer names all of them."""
    attribute = rng.choice([name for name in ATTRIBUTES if name != "pass phrase"])
    facts = make_facts(rng, n, attributes=[attribute])
    hidden = [fact_sentence(fact, rng) for fact in facts]
    rng.shuffle(facts)
    questions = []
    for i in range(0, n - 1, 3):
        asked_facts = facts[i : i + rng.choice((2, 3))]
        *subjects, last_subject = [f"of the {fact.subject}" for fact in asked_facts]
        all_subjects = f"{', '.join(subjects)} and {last_subject}"
        answer = ", ".join(f"the {fact.subject} is {fact.value}" for fact in asked_facts)
        questions.append(Question(f"What is the {attribute} {all_subjects}?", answer))
    return hidden, questions


def _links(rng: random.Random, n: int, links: int) -> tuple[Sentences, list[Question]]:
    """Generate chains of `links` names that end in a word. The answer spells out the chain."""
    n_chains = max(2, n // links)
    names = iter(rng.sample([f"x{i}" for i in range(10, 100)], n_chains * links))
    sentences = []
    questions = []
    for _ in range(n_chains):
        chain = [*(next(names) for _ in range(links)), rng.choice(THINGS)]
        steps = [f"VAR {name} is {next_name}" for name, next_name in pairwise(chain)]
        sentences += [f"{step}." for step in steps]
        questions.append(Question(f"What is VAR {chain[0]}?", ", ".join(steps)))
    rng.shuffle(sentences)
    return sentences, questions


TASKS: dict[str, Callable[[random.Random, int], tuple[Sentences, list[Question]]]] = {
    "single": lambda rng, n: _about_facts(rng, make_facts(rng, n)),
    "look-alikes": _look_alikes,
    "overwritten": _overwritten,
    "several": _several,
    "two-links": partial(_links, links=2),
    "three-links": partial(_links, links=3),
}


def make_task(
    name: str,
    rng: random.Random,
    n_tokens: int,
    count_tokens: Callable[[str], int],
    hidden: int = 16,
) -> tuple[str, list[Question]]:
    """Return a document, and questions that can be asked alone or one after the other.

    Args:
        name: key of `TASKS`.
        rng: random generator for the facts and the document.
        n_tokens: approximate length of the document.
        count_tokens: returns the number of tokens in a text.
        hidden: approximate number of sentences that matter, at most 90.
    """
    sentences, questions = TASKS[name](rng, hidden)
    return hide(rng, sentences, n_tokens, count_tokens, in_order=True), questions
