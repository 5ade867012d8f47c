"""Synthetic documents that hide facts among filler sentences, and questions about these facts.

The built-in models are trained on these documents, and `mlx-snapkv demo`, tests and measurements use them. All random
choices come from a `random.Random`, so the text is determined by the seed.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Keep the words in lists. The order of sets varies, and a seed must give the same text on every machine.
_WORD_LISTS = json.loads((Path(__file__).parent / "vocabulary.json").read_text(encoding="utf-8"))
_SENTENCES, _TIMES = _WORD_LISTS.pop("sentences"), _WORD_LISTS.pop("times")
_WORDS: dict[str, list[str]] = {kind: " ".join(x).split() for kind, x in _WORD_LISTS.items()}
ADJECTIVES, NOUNS, THINGS = (_WORDS[kind] for kind in ("adjectives", "nouns", "things"))
# Words for the placeholders in a sentence. A sentence can have two of each kind, such as {person} and {person2}.
_WORDS_BY_PLACEHOLDER = {
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
    """A fact to remember, such as "the access code of the amber falcon is 482913".

    In this example, the attribute is "access code", the subject is "amber falcon" and the value is "482913".
    """

    attribute: str
    subject: str
    value: str

    @property
    def clause(self) -> str:
        """Return the fact as a clause, with a full stop but no initial capital."""
        return f"the {self.attribute} of the {self.subject} is {self.value}."

    @property
    def question(self) -> str:
        """Return a question whose answer is the value."""
        return f"What is the {self.attribute} of the {self.subject}?"


def _digit_generator(pattern: str) -> Callable[[random.Random], str]:
    """Return a function that returns the pattern with a random digit in place of each "d"."""
    return lambda rng: "".join(
        str(rng.randrange(10)) if character == "d" else character for character in pattern
    )


ATTRIBUTES: dict[str, Callable[[random.Random], str]] = {
    "access code": _digit_generator("dddddd"),
    "phone number": _digit_generator("ddd-dddd"),
    "invoice number": _digit_generator("dd-dddd"),
    "serial number": _digit_generator("ddddddd"),
    "locker number": _digit_generator("dddd"),
    "account number": _digit_generator("dddddddd"),
    "pass phrase": lambda rng: " ".join(rng.sample(NOUNS, 3)),
}


def make_subject(rng: random.Random, invented_share: float = 0.0) -> str:
    """Return an adjective and a noun. With probability `invented_share`, each is replaced with an invented word."""

    def draw_word(known_words: Sequence[str]) -> str:
        if rng.random() >= invented_share:
            return rng.choice(known_words)
        n_syllables = rng.randint(2, 3)
        return "".join(rng.choice(_WORDS["syllables"]) for _ in range(n_syllables))

    return f"{draw_word(ADJECTIVES)} {draw_word(NOUNS)}"


def make_facts(
    rng: random.Random,
    count: int,
    invented_share: float = 0.0,
    attributes: Sequence[str] = tuple(ATTRIBUTES),
) -> list[Fact]:
    """Return `count` facts about different subjects, with random attributes."""
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        subject = make_subject(rng, invented_share)
        attribute = rng.choice(attributes)
        facts[subject] = Fact(attribute, subject, ATTRIBUTES[attribute](rng))
    return list(facts.values())


def fact_sentence(fact: Fact, rng: random.Random) -> str:
    """Return a sentence that states a fact, sometimes with an introduction."""
    introduction = rng.choice(("", "", "", *_INTRODUCTIONS))
    if introduction:
        return introduction + fact.clause
    return fact.clause[0].upper() + fact.clause[1:]


def filler_sentence(rng: random.Random) -> str:
    """Return a random sentence that does not state a fact."""
    template = rng.choice(_SENTENCES)
    words = {}
    # Draw all words, even if the sentence has no placeholder for them. Fewer draws would change the text of every seed.
    for placeholder, choices in _WORDS_BY_PLACEHOLDER.items():
        words[placeholder] = rng.choice(choices)
        words[f"{placeholder}2"] = rng.choice(choices)
    words["time"] = rng.choice(_TIMES)
    words["adjective"] = rng.choice(ADJECTIVES)
    words["noun"] = rng.choice(NOUNS)
    return template.format(**words, number=rng.randint(2, 99), number2=rng.randint(2, 999))


def hide(
    rng: random.Random,
    hidden_sentences: Sequence[str],
    n_tokens: int,
    count_tokens: CountTokens,
    in_order: bool = False,
) -> str:
    """Return a document of about `n_tokens` tokens, with `hidden_sentences` at random places among filler.

    Tokens are counted sentence by sentence. The total is exact if no token crosses the space between two sentences.

    Args:
        rng: source of randomness for the filler and the places.
        hidden_sentences: the sentences to hide.
        n_tokens: document length. The document is longer if the hidden sentences alone exceed it.
        count_tokens: returns the number of tokens in a string.
        in_order: whether the hidden sentences keep their order.
    """
    n_hidden_tokens = sum(count_tokens(" " + sentence) for sentence in hidden_sentences)
    n_filler_tokens_left = max(0, n_tokens - n_hidden_tokens)
    sentences: list[str] = []
    while n_filler_tokens_left >= 0:
        filler = filler_sentence(rng)
        sentences.append(filler)
        n_filler_tokens_left -= count_tokens(" " + filler)
    sentences.pop()  # the last filler makes the document too long
    if in_order:
        places = sorted(rng.randint(0, len(sentences)) for _ in hidden_sentences)
        # Each inserted sentence shifts the following places by one.
        for n_inserted, (place, hidden_sentence) in enumerate(zip(places, hidden_sentences)):
            sentences.insert(place + n_inserted, hidden_sentence)
    else:
        for hidden_sentence in hidden_sentences:
            sentences.insert(rng.randint(0, len(sentences)), hidden_sentence)
    return " ".join(sentences)
