"""What needle and lines ask: where it is hidden, and what is beside it."""

import itertools
import random

import pytest

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.evals.tasks import FACTS, LONGEVAL, Lines, Needle, fill, hide, repeated, synthetic

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
BOOK = "It was a long and quiet winter.\nNobody came to the house.\n\n" * 5
TASKS = {
    "needle": (Needle, {}),
    "needles": (Needle, {"needles": 6}),
    "haystack": (Needle, {"text": BOOK}),
    "lines": (Lines, {"wording": FACTS}),
}


def questions(tokenizer, make, lengths=(2048,), **fields):
    """Depths and questions of a task's documents."""
    return [
        (place["depth"], document.questions[0])
        for place, document in make(tokenizer, lengths, **fields)
    ]


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_is_at_its_depth_and_the_prompt_has_its_length(demo_llama, name):
    tokenizer = demo_llama[1]
    make, fields = TASKS[name]
    found = questions(tokenizer, make, **fields)
    assert [depth for depth, _ in found] == DEPTHS
    for depth, question in found:
        prompt = question.prompt
        assert 2048 - 40 < len(prompt) <= 2048
        value = tokenizer.encode(" " + question.expected, add_special_tokens=False)
        (at,) = [i for i in range(len(prompt)) if prompt[i : i + len(value)] == value]
        assert abs(at / len(prompt) - depth) < 0.03


def test_the_document_ends_before_the_question(demo_llama):
    tokenizer = demo_llama[1]
    for place, document in Needle(tokenizer, [512], n_depths=2):
        (question,) = document.questions
        assert place["task"] == "needle" and document.n_shared > 450
        tail = tokenizer.decode(question.prompt[document.n_shared :])
        assert "What is the" in tail and question.expected not in tail
        assert question.score(f"It is {question.expected}.") == 1
        assert question.score(f"It is {question.expected}0.") == 0


def test_the_other_needles_are_spread_over_the_document(demo_llama):
    tokenizer = demo_llama[1]
    ((_, question), *_) = questions(tokenizer, Needle, needles=5)
    text = tokenizer.decode(question.prompt)
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    assert [half.count(" of the ") for half in halves] == [3, 3]  # the question is one of them


@pytest.mark.parametrize("make", [Needle, Lines])
def test_every_document_and_seed_is_another(demo_llama, make):
    fields = {"lengths": (1024, 1500), "n_depths": 2, "n_documents": 2}
    first, second = (questions(demo_llama[1], make, seed=seed, **fields) for seed in (0, 1))
    assert len({question.expected for _, question in first + second}) == 16
    assert [q.prompt for _, q in questions(demo_llama[1], make, **fields)] == [
        q.prompt for _, q in first
    ]


def test_longevals_lines(demo_llama):
    tokenizer = demo_llama[1]
    ((_, question),) = questions(tokenizer, Lines, n_depths=1, wording=LONGEVAL)
    text = tokenizer.decode(question.prompt)
    lines = [line for line in text.splitlines() if line.startswith("line ")]
    names = [line.split(":")[0] for line in lines]
    assert len(set(names)) == len(names) > 20
    (asked,) = [line for line in lines if question.expected in line]
    assert asked.endswith(f": REGISTER_CONTENT is <{question.expected}>")
    assert f"<REGISTER_CONTENT> in {asked.split(':')[0]}?" in text


def test_what_the_prompts_depend_on_is_in_the_setting():
    one, other = Needle(None, [], text="a b."), Needle(None, [], text="a c.")
    assert one.setting() != other.setting() != Needle(None, []).setting()
    assert Lines(None, [], wording=FACTS).setting() != Lines(None, []).setting()


def words(text):
    return text.split()


def filled(length, hidden, filler):
    prompt_of = lambda text: words(f"{text} so what ?")  # noqa: E731
    return prompt_of(fill(length, hidden, filler, lambda text: len(prompt_of(text))))


def test_the_grid_goes_from_start_to_end(demo_llama):
    task = Needle(demo_llama[1], [512, 256], n_depths=3, n_documents=2)
    places = [place for place, _ in task]
    assert len(places) == len(task) == 2 * 3 * 2
    assert [p["depth"] for p in places[:6:2]] == [0, 0.5, 1]
    assert len({(p["length"], p["document"]) for p in places}) == 12
    assert [p["depth"] for p, _ in Needle(demo_llama[1], [256], n_depths=1)] == [0.5]


def test_hidden_text_goes_to_its_depth():
    hidden = [(1.0, "z "), (0.0, "x "), (0.6, "y "), (0.0, "w ")]
    assert hide(["a ", "b ", "c ", "d "], hidden) == "x w a b y c d z"


@pytest.mark.parametrize("length", [100, 101, 150, 999])
def test_the_prompt_is_as_long_as_sentences_allow(length):
    prompt = filled(length, [(0.5, "needle here . ")], synthetic(random.Random(0)))
    assert length - 20 < len(prompt) <= length
    assert prompt[-3:] == ["so", "what", "?"]


def test_a_text_is_repeated_whole_and_cut_between_sentences():
    text = 'One two three. "Four five!" Six\nseven.\n\nA heading\n\nEight nine ten'
    pieces = list(itertools.islice(repeated(text), 10))
    assert pieces[:5] == pieces[5:]
    assert "".join(pieces[:5]) == text + "\n\n"
    assert pieces[1] == '"Four five!" '
    prompt = filled(30, [(0.0, "needle . ")], repeated(text))
    assert (
        " ".join(prompt)
        .removesuffix(" so what ?")
        .endswith(("three.", '!"', "seven.", "heading", "ten"))
    )


def test_no_room_is_an_error_that_says_how_much_is_needed():
    with pytest.raises(SnapKVError, match="--length must be at least 11 for this question, got 10"):
        filled(10, [(0.5, "needle here . ")], repeated("one two three four five."))
