"""Facts whose questions share no words with them, and the mixed texts that hide them."""

import itertools
import json
import random
import re

import pytest
from evaluation import associations as module
from evaluation.associations import (
    VARIANTS,
    associations,
    begun,
    depths_and_sentences,
    facts,
    facts_of_text,
    score,
)
from evaluation.haystack import Haystack, paragraphs_of

from mlx_snapkv.cli.progress import StepBars
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.methods import ANSWER_SETTINGS, FULL_CACHE, LATER, Method
from mlx_snapkv.measure.records import Results
from mlx_snapkv.planning.settings import setting_named
from scripts import associations_page, measure_associations

# Words without content: a question and a fact may share these.
STOP_WORDS = set(
    "a all also an and are at be been by did do does for from get gets go goes had has have he her his how i in is it "
    "its me much must no not of off on or our out put she should so some than that the their them then there they this "
    "to was we were what when where which while who whom will with you your".split()
)
ESSAY = "It was a long and quiet winter. The house was empty, and the snow lay deep. " * 2
CODE = '''def total(prices, discount=0):
    """Return the sum of all prices, less a discount."""
    result = 0
    for price in prices:
        result += price
    return result - discount
'''
LENGTH = 1600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with three essays and three code files."""
    made = tmp_path_factory.mktemp("texts")
    for kind, text in (("essays/{}.txt", ESSAY), ("code/{}.py", CODE)):
        for i in range(3):
            path = made / kind.format(i)
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{text}\n\n{text.replace('house', f'house {i}')}", "utf-8")
    return made


@pytest.fixture(scope="module")
def haystack(folder):
    return Haystack(folder, [value for fact in facts() for value in fact.values])


def words(text):
    """Return a text's content words."""
    found = re.findall(r"[a-z0-9]+", text.lower().replace("'s", ""))
    return {word for word in found if word not in STOP_WORDS}


def shared(question, text):
    """Return pairs of content words that may share a stem: one starts with the shorter one's first four letters."""
    pairs = (sorted(pair, key=len) for pair in itertools.product(words(question), words(text)))
    return [pair for pair in pairs if pair[1].startswith(pair[0][:4])]


def test_no_question_shares_a_content_word_with_any_fact_or_value():
    assert shared("Who treats a tooth?", "They were treating him.") == [["treats", "treating"]]
    for asked, fact in itertools.product(facts(), facts()):
        told = f"{fact.text.format('')} {' '.join(fact.values)}"
        assert shared(asked.question, told) == [], (asked.question, fact.text)
    for fact in facts():
        assert shared(begun(), " ".join(fact.values)) == [], fact.text


def test_there_are_enough_facts_and_each_value_answers_one_question():
    assert len(facts()) >= 48 and len({fact.topic for fact in facts()}) >= 8
    assert len({fact.question for fact in facts()}) == len(facts())
    values = [value.lower() for fact in facts() for value in fact.values]
    assert len(set(values)) == len(values)
    for fact in facts():
        assert fact.text.count("{}") == 1 and fact.question.endswith("?")


def test_an_answer_is_right_if_it_names_the_facts_value_and_no_other():
    fact, other = facts()[:2]
    value = fact.answer[0]
    assert [score(fact, text) for text in (value, f"It is the {value.upper()}.")] == [1, 1]
    for wrong in ("", "I do not know.", f"{value}s", other.answer[0], fact.before[0]):
        assert score(fact, wrong) == 0
    assert score(fact, f"{value} or {other.answer[0]}") == 0
    assert score(fact, f"{value}, formerly {fact.before[0]}") == 0
    spelled = next(each for each in facts() if len(each.answer) > 1)
    assert all(score(spelled, f"the {value}") for value in spelled.answer)


def test_the_texts_of_a_variant_take_all_facts_in_turn():
    n = VARIANTS["several"]
    found = [f for i in range(-(-len(facts()) // n)) for f in facts_of_text("several", i, 0)]
    assert {f.question for f in found} == {f.question for f in facts()}
    assert len(found) < len(facts()) + n
    assert (
        facts_of_text("several", 0, 0)
        == facts_of_text("several", 0, 0)
        != facts_of_text("several", 0, 1)
    )


def test_a_correction_comes_after_the_earlier_fact():
    own = facts_of_text("contradicting", 0, 0)
    hidden = [
        text for _, text in sorted(depths_and_sentences("contradicting", own, random.Random(0)))
    ]
    for fact in own:
        earlier = hidden.index(fact.text.format(fact.before[0]))
        assert hidden.index(module.CORRECTION.format(fact.sentence)) > earlier


def test_a_text_has_its_length_its_facts_and_every_kind_of_paragraph(demo_llama, haystack):
    tokenizer = demo_llama[1]
    dataset = associations(tokenizer, haystack, [*VARIANTS], [LENGTH * 3], [1])
    assert [place["task"] for place in dataset.places] == [*VARIANTS]
    for place in dataset.places:
        document = dataset.make(place)
        assert len(document.questions) == VARIANTS[place["task"]]
        longest = max(len(q.prompt) + q.max_tokens for q in document.questions)
        assert LENGTH * 3 - 600 < longest <= LENGTH * 3
        for question in document.questions:
            head = question.prompt[: document.n_shared]
            assert head == document.questions[0].prompt[: document.n_shared]
            text = tokenizer.decode(head)
            assert question.expected["fact"] in text
            asked = tokenizer.decode(question.prompt[document.n_shared :])
            assert question.expected["question"] in asked
            first = tokenizer.decode([*question.begun])
            assert first == (begun() if place["task"] == "late" else "")
        assert all(mark in text for mark in ("winter", "discount", "2031-", "| item |", ": "))


def test_a_seed_determines_the_text(demo_llama, haystack, folder):
    again = Haystack(folder, [value for fact in facts() for value in fact.values])
    made = [
        associations(demo_llama[1], each, ["one"], [LENGTH], [1], seed)
        for each, seed in ((haystack, 0), (again, 0), (haystack, 1))
    ]
    first, same, other = (d.make(d.places[0]).questions[0].prompt for d in made)
    assert first == same != other
    assert made[0].setting == made[1].setting != made[2].setting


def test_paragraphs_with_an_answer_are_left_out(folder):
    assert not any("house 1" in text for text in Haystack(folder, ["House 1"]).texts["essay"])
    with pytest.raises(SnapKVError, match="run make real-models"):
        Haystack(folder / "essays", [])
    long = "\n".join(f"line {i} of a long paragraph without any blank line" for i in range(40))
    pieces = list(paragraphs_of(f"Title\n\n{long}"))
    assert len(pieces) > 2 and "\n".join(pieces) == long[: len("\n".join(pieces))]


SPARSE = "sparse:budget=128"


@pytest.fixture(scope="module")
def records(demo_llama, haystack):
    """Return a data set with one text of four facts, and the records of a run on it."""
    model, tokenizer = demo_llama
    dataset = associations(tokenizer, haystack, ["contradicting"], [LENGTH], [1])
    methods = [Method(setting_named(text)) for text in ("snapkv:budget=12.5%", SPARSE)]
    with StepBars(quiet=True) as bars:
        return measure_associations.measure(model, dataset, methods, Results({}), bars)


def test_measure_associations_asks_policies_in_both_settings_and_sparse_attention_once(records):
    rows = measure_associations.summarised(records)
    asked = {(row["method"].partition(":")[0], row["setting"]): row["asked"] for row in rows}
    policy = {("snapkv", setting): 4 for setting in ANSWER_SETTINGS}
    assert asked == {(FULL_CACHE, LATER): 4, ("sparse", LATER): 4} | policy
    for row in rows:
        assert row["kept"] <= min(row["found"], row["full"]) and row["variant"] == "contradicting"


MADE = {"command": "python x.py", "date": "today", "commit": "0", "machine": "one"}


def test_a_missed_fact_is_one_that_the_full_cache_finds(monkeypatch):
    def record(method, score, question=0):
        task = "late" if question else "several"
        place = {"length": 9, "task": task, "document": 0, "question": question}
        expected = {"question": "Q?", "fact": "F."}
        found = {"method": method, "setting": LATER, "score": score, "answer": f"{score} "}
        return place | found | {"expected": expected}

    given = [record(FULL_CACHE, 1), record(FULL_CACHE, 0, 1), record("p", 0), record("p", 1, 1)]
    (miss,) = measure_associations.missed(given)
    assert (miss["question"], miss["answer"], miss["full"]) == ("Q?", "0", "1")
    rows = measure_associations.summarised(given)
    assert [(r["variant"], r["found"], r["kept"], r["full"]) for r in rows] == [
        ("several", 1, 1, 1), ("late", 0, 0, 0), ("several", 0, 0, 1), ("late", 1, 0, 0),
    ]  # fmt: skip
    part = {"model": "m", "rows": rows, "missed": measure_associations.missed(given)} | MADE
    monkeypatch.setattr(associations_page, "load", lambda name: {"parts": [part]})
    *_, header, _, several, late = associations_page.associations()
    assert header == "| model | tokens | facts (asked) | full cache | `p`, later |"
    assert several == "| `m` | 9 | several (1) | 1 | 0 (0%) |"
    assert late == "| `m` | 9 | late (1) | 0 | 1 |"
    assert associations_page.missed()[-1] == "| `p`, later | 9 | Q? | F. | 0 |"


def test_a_part_replaces_an_earlier_part_of_which_it_asked_all_questions(tmp_path):
    out = tmp_path / "found"
    policies, sparse = ["p", "q", "s"], ["s"]
    given = [(8192, policies, 1), (8192, sparse, 4), (2048, sparse, 1), (2048, policies, 2)]
    for n, (length, methods, asked) in enumerate([*given, given[0]]):
        place = {"length": length, "variant": "several", "setting": LATER, "asked": asked}
        rows = [place | {"method": method} for method in (FULL_CACHE, *methods)]
        measure_associations.put_part(out, {"model": "a", "rows": rows, "n": n})
    measure_associations.put_part(out, {"model": "b", "rows": rows, "n": 5})
    parts = json.loads(out.with_suffix(".json").read_text())["parts"]
    assert [part["n"] for part in parts] == [1, 3, 4, 5]
