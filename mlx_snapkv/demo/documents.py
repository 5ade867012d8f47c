"""Synthetic documents: facts that are hidden among ordinary sentences, and questions about the facts.

The embedded models are trained on such documents. `mlx-snapkv demo`, tests and measurements ask about them. All random
choices are drawn from a `random.Random`, so a seed determines the text.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Lists, not sets: their order is fixed, so a seed gives the same text on every machine.
_WORD_LISTS = json.loads((Path(__file__).parent / "vocabulary.json").read_text(encoding="utf-8"))
_SENTENCES, _TIMES = _WORD_LISTS.pop("sentences"), _WORD_LISTS.pop("times")
_WORDS: dict[str, list[str]] = {kind: " ".join(x).split() for kind, x in _WORD_LISTS.items()}
ADJECTIVES, NOUNS, THINGS = (_WORDS[kind] for kind in ("adjectives", "nouns", "things"))
# Words for the placeholders of a sentence. A sentence may have two of each kind, such as {person} and {person2}.
_TWICE = {
    "person": _WORDS["people"],
    "place": _WORDS["places"],
    "thing": THINGS,
    "verb": _WORDS["verbs"],
    "quality": _WORDS["qualities"],
}
_INTRODUCTIONS = ("Remember that ", "Please note that ", "As agreed, ", "For the record, ")

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Fact:
    """A fact to remember: the `attribute` ("access code") of the `subject` ("amber falcon") is `value` ("482913")."""

    attribute: str
    subject: str
    value: str

    @property
    def clause(self) -> str:
        """Return the fact as a clause that ends a sentence."""
        return f"the {self.attribute} of the {self.subject} is {self.value}."

    @property
    def question(self) -> str:
        """Return the question whose answer is the value."""
        return f"What is the {self.attribute} of the {self.subject}?"


def _digits(pattern: str) -> Callable[[random.Random], str]:
    """Return a function that draws a value: the pattern with a random digit for each "d"."""
    return lambda rng: "".join(str(rng.randrange(10)) if c == "d" else c for c in pattern)


ATTRIBUTES: dict[str, Callable[[random.Random], str]] = {
    "access code": _digits("dddddd"),
    "phone number": _digits("ddd-dddd"),
    "invoice number": _digits("dd-dddd"),
    "serial number": _digits("ddddddd"),
    "locker number": _digits("dddd"),
    "account number": _digits("dddddddd"),
    "pass phrase": lambda rng: " ".join(rng.sample(NOUNS, 3)),
}


def make_subject(rng: random.Random, made_up: float = 0.0) -> str:
    """Return an adjective and a noun. Each is replaced by invented syllables with probability `made_up`."""

    def word(choices: Sequence[str]) -> str:
        if rng.random() >= made_up:
            return rng.choice(choices)
        return "".join(rng.choice(_WORDS["syllables"]) for _ in range(rng.randint(2, 3)))

    return " ".join([word(ADJECTIVES), word(NOUNS)])


def make_facts(
    rng: random.Random,
    count: int,
    made_up: float = 0.0,
    attributes: Sequence[str] = tuple(ATTRIBUTES),
) -> list[Fact]:
    """Return `count` facts about different subjects. Their attributes are drawn from `attributes`."""
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        subject = make_subject(rng, made_up)
        attribute = rng.choice(attributes)
        facts[subject] = Fact(attribute, subject, ATTRIBUTES[attribute](rng))
    return list(facts.values())


def fact_sentence(fact: Fact, rng: random.Random) -> str:
    """Return a sentence that states a fact, half of the time after an introduction."""
    introduction = rng.choice(("", "", "", *_INTRODUCTIONS))
    if introduction:
        return introduction + fact.clause
    return fact.clause[0].upper() + fact.clause[1:]


def filler_sentence(rng: random.Random) -> str:
    """Return a sentence that states no fact."""
    template = rng.choice(_SENTENCES)
    words = {}
    # All words are drawn, whether the sentence has places for them or not, so that a seed keeps its texts.
    for kind, choices in _TWICE.items():
        words[kind] = rng.choice(choices)
        words[f"{kind}2"] = rng.choice(choices)
    words["time"] = rng.choice(_TIMES)
    words["adjective"] = rng.choice(ADJECTIVES)
    words["noun"] = rng.choice(NOUNS)
    return template.format(**words, number=rng.randint(2, 99), number2=rng.randint(2, 999))


def hide(
    rng: random.Random,
    hidden: Sequence[str],
    n_tokens: int,
    count_tokens: CountTokens,
    in_order: bool = False,
) -> str:
    """Return a document of about `n_tokens` tokens: filler with the `hidden` sentences at random places.

    The tokens of each sentence are counted alone. The sum is exact if no token crosses the space between sentences.

    Args:
        rng: draws the filler and the places.
        hidden: the sentences to hide.
        n_tokens: length of the document; more if the hidden sentences alone are longer.
        count_tokens: returns the number of tokens of a text.
        in_order: whether the hidden sentences keep their order.
    """
    n_hidden_tokens = sum(count_tokens(" " + sentence) for sentence in hidden)
    n_left = max(0, n_tokens - n_hidden_tokens)
    document: list[str] = []
    while n_left >= 0:
        document.append(filler_sentence(rng))
        n_left -= count_tokens(" " + document[-1])
    document.pop()  # It is too much, and only drawn to keep the texts of a seed.
    if in_order:
        places = sorted(rng.randint(0, len(document)) for _ in hidden)
        # Each hidden sentence moves the places of the following ones by one.
        for n_inserted, (place, sentence) in enumerate(zip(places, hidden)):
            document.insert(place + n_inserted, sentence)
    else:
        for sentence in hidden:
            document.insert(rng.randint(0, len(document)), sentence)
    return " ".join(document)
