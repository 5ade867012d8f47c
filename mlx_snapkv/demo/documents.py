"""Synthetic documents: facts hidden among ordinary sentences, and questions about them.

The embedded models are trained on such documents, `mlx-snapkv demo` asks about them, and tests and measurements
score answers on them. Everything is drawn from a `random.Random`, so a seed fixes the text.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The vocabulary: plain lists, so that a seed gives the same text anywhere.

ADJECTIVES = """amber azure brisk bronze calm cedar clever copper coral crimson crystal dusty early
eager ember faded fierce floral frosty gentle gilded golden grand hazel hidden hollow humble icy indigo
ivory jade jolly keen late lemon lilac little lively lone lucky lunar maple marble mellow merry misty
modest mossy narrow noble olive opal pale patient pearl plain polar proud quiet rapid raven rosy royal
ruby rustic sandy scarlet secret shady silent silver sleepy slender smoky solar steady stormy sunny swift
tall teal tender tidy tiny velvet violet vivid wandering warm weary wild winter wise witty wooden young""".split()

NOUNS = """anchor arrow badger bakery barrel basket beacon bison bridge brook cabin candle canyon
castle cellar cherry cliff clock comet condor coyote crane creek dolphin dragon eagle engine falcon
ferry finch forest fountain fox galaxy garden glacier goose harbor harvest hawk heron hill horse island
jaguar journal kettle kite ladder lagoon lantern leopard library lion lobster lynx magnet mammoth
market meadow mill mirror moose museum needle oak ocean orchard otter owl panda panther parrot pebble
pelican phoenix piano pigeon pilot planet pond puma quarry rabbit raven river robin rocket saddle salmon
seal shadow shelter spider stable station stone stork summit swan temple thistle tiger tower trout tunnel
turtle valley vessel village violin walnut walrus whale willow window wolf wren zebra""".split()

PEOPLE = """Alice Ben Carla David Elena Frank Grace Henry Irene Jack Karen Leo Maria Nathan Olga Peter
Quinn Rosa Simon Tara Ursula Victor Wendy Xavier Yara Zoe""".split()

PLACES = """market harbor office station garden school theater bakery workshop warehouse library
kitchen courtyard museum hospital airport farm village valley mountain river bridge square park""".split()

THINGS = """report letter package ticket basket bicycle camera chair contract coat door engine
envelope folder hammer invoice jacket key ladder lamp map notebook painting pencil phone printer radio
schedule table umbrella wagon window""".split()

VERBS = """carried checked cleaned collected delivered described examined fixed found kept left lost
moved opened ordered painted repaired returned sold sorted stored turned visited weighed wrapped""".split()

QUALITIES = """bright broken busy careful cheap clean cold curious empty famous fresh full heavy
large light loud modern new old open quick ready simple small soft strange strong useful warm wet""".split()

TIMES = (
    "in the morning|in the evening|at noon|after lunch|before sunrise|late at night|on Monday|on Tuesday|"
    "on Friday|last week|last year|in spring|in the winter|during the storm|every summer|two days later"
).split("|")

FILLER_TEMPLATES = (
    "{person} {verb} the {quality} {thing} {time}.",
    "The {quality} {thing} was left near the {place} {time}.",
    "Nobody at the {place} had seen such a {quality} {thing} before.",
    "{person} and {person2} walked to the {place} and talked about the {thing}.",
    "It was {quality} and {quality2} at the {place} {time}.",
    "When {person} came to the {place}, the {thing} was already {quality}.",
    "{person} said that the {place} would be {quality} {time}.",
    "They {verb} the {thing}, then {verb2} the {thing2} behind the {place}.",
    "The road from the {place} to the {place2} is {quality} {time}.",
    "Most people think that a {quality} {thing} is better than a {quality2} one.",
    "There were {number} chairs and {number2} lamps in the {place}.",
    "{person} bought a {thing} for {number} coins and {verb} it {time}.",
    "The {adjective} {noun} slept beside the {place} {time}.",
    "Some say that the {adjective} {noun} once {verb} a {thing}.",
    "A {adjective} {noun} is not as {quality} as it looks.",
    "In the end, {person} {verb} everything and the {place} was {quality} again.",
    "Why the {thing} had been {verb} {time}, {person} never learned.",
    "The weather stayed {quality}, so {person} {verb} the {thing} alone.",
)

SYLLABLES = """ba be bo da del do fa fen ga gor ha hel i ja ka kel la lim lo ma mer mo na nor o pa per
ra ren ro sa sel so ta tel tor u va vel vo wa xan ya zan zo""".split()


CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Fact:
    """One thing to remember: `attribute` ("access code") of `subject` ("amber falcon") is `value`."""

    attribute: str
    subject: str
    value: str

    @property
    def clause(self) -> str:
        return f"the {self.attribute} of the {self.subject} is {self.value}."

    @property
    def question(self) -> str:
        return f"What is the {self.attribute} of the {self.subject}?"


def _digits(pattern: str) -> Callable[[random.Random], str]:
    return lambda rng: "".join(str(rng.randrange(10)) if c == "d" else c for c in pattern)


def _phrase(rng: random.Random) -> str:
    return " ".join(rng.sample(NOUNS, 3))


ATTRIBUTES: dict[str, Callable[[random.Random], str]] = {
    "access code": _digits("dddddd"),
    "phone number": _digits("ddd-dddd"),
    "invoice number": _digits("dd-dddd"),
    "serial number": _digits("ddddddd"),
    "locker number": _digits("dddd"),
    "account number": _digits("dddddddd"),
    "pass phrase": _phrase,
}

# What a filler sentence may name two of.
_TWICE = {
    "person": PEOPLE,
    "place": PLACES,
    "thing": THINGS,
    "verb": VERBS,
    "quality": QUALITIES,
}

_INTRODUCTIONS = ("Remember that ", "Please note that ", "As agreed, ", "For the record, ")


def made_up_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def make_subject(rng: random.Random, made_up: float = 0.0) -> str:
    """Two words; each is an invented one with probability `made_up`."""
    return " ".join(
        made_up_word(rng) if rng.random() < made_up else rng.choice(known)
        for known in (ADJECTIVES, NOUNS)
    )


def make_facts(
    rng: random.Random,
    count: int,
    made_up: float = 0.0,
    attributes: Sequence[str] = tuple(ATTRIBUTES),
) -> list[Fact]:
    """`count` facts about different subjects, their attributes drawn from `attributes`."""
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        subject = make_subject(rng, made_up)
        attribute = rng.choice(attributes)
        facts[subject] = Fact(attribute, subject, ATTRIBUTES[attribute](rng))
    return list(facts.values())


def fact_sentence(fact: Fact, rng: random.Random) -> str:
    intro = rng.choice(("", "", "", *_INTRODUCTIONS))
    return intro + fact.clause if intro else fact.clause[0].upper() + fact.clause[1:]


def filler_sentence(rng: random.Random) -> str:
    pick = rng.choice
    template = pick(FILLER_TEMPLATES)
    twice = {f"{name}{n}": pick(known) for name, known in _TWICE.items() for n in ("", "2")}
    once = {
        "time": pick(TIMES),
        "adjective": pick(ADJECTIVES),
        "noun": pick(NOUNS),
    }
    return template.format(**twice, **once, number=rng.randint(2, 99), number2=rng.randint(2, 999))


def make_document(
    rng: random.Random, facts: Sequence[Fact], n_tokens: int, count_tokens: CountTokens
) -> str:
    """Filler of about `n_tokens` tokens with one sentence per fact at random places.

    Sentences are counted one by one, which is exact for tokenizers that join no tokens across their leading space.
    """
    hidden = [fact_sentence(fact, rng) for fact in facts]
    document = _filler(rng, hidden, n_tokens, count_tokens)
    for sentence in hidden:
        document.insert(rng.randint(0, len(document)), sentence)
    return " ".join(document)


def hide_in_order(
    rng: random.Random, hidden: Sequence[str], n_tokens: int, count_tokens: CountTokens
) -> str:
    """As `make_document`, with sentences that keep their order."""
    document = _filler(rng, hidden, n_tokens, count_tokens)
    places = sorted(rng.randint(0, len(document)) for _ in hidden)
    for n_before, (place, sentence) in enumerate(zip(places, hidden)):
        document.insert(place + n_before, sentence)
    return " ".join(document)


def _filler(
    rng: random.Random, hidden: Sequence[str], n_tokens: int, count_tokens: CountTokens
) -> list[str]:
    """Sentences that fill `n_tokens` together with the hidden ones."""
    left = n_tokens - sum(count_tokens(" " + sentence) for sentence in hidden)
    filler: list[str] = []
    while True:
        sentence = filler_sentence(rng)
        left -= count_tokens(" " + sentence)
        if left < 0:
            return filler
        filler.append(sentence)
