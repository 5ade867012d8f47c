"""The needle task's documents: where the needle is, and the text around it."""

import itertools

import pytest
from evaluation.tasks import contains, filled, joined, needle

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.sentences import sentences_of

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
BOOK = "It was a long and quiet winter.\nThe house was empty.\n\n" * 5
TASKS = {
    "needle": {},
    "needles": {"needles": 6},
    "haystack": {"text": BOOK},
}


def questions(tokenizer, lengths=(2048,), **more):
    """Return the depth and the question for each of a task's documents."""
    dataset = needle(tokenizer, lengths, **more)
    return [(place["depth"], dataset.make(place).questions[0]) for place in dataset.places]


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_is_at_its_depth_and_the_prompt_has_its_length(demo_llama, name):
    tokenizer = demo_llama[1]
    found = questions(tokenizer, **TASKS[name])
    assert [depth for depth, _ in found] == DEPTHS
    for depth, question in found:
        prompt = question.prompt
        assert 2048 - 40 < len(prompt) <= 2048
        value = tokenizer.encode(" " + question.expected, add_special_tokens=False)
        (at,) = [i for i in range(len(prompt)) if prompt[i : i + len(value)] == value]
        assert abs(at / len(prompt) - depth) < 0.03


def test_the_document_ends_before_the_question(demo_llama):
    tokenizer = demo_llama[1]
    dataset = needle(tokenizer, [512], n_depths=2)
    for document in map(dataset.make, dataset.places):
        (question,) = document.questions
        assert document.n_shared > 450
        tail = tokenizer.decode(question.prompt[document.n_shared :])
        assert "What is the" in tail and question.expected not in tail
        assert question.score(f"It is {question.expected}.") == 1
        assert question.score(f"It is {question.expected}0.") == 0


def test_every_document_and_seed_has_its_own_question(demo_llama):
    first, second = (
        questions(demo_llama[1], [700, 900], n_depths=2, n_documents=2, seed=seed)
        for seed in (0, 1)
    )
    assert len({question.expected for _, question in first + second}) == 16
    # A seed's questions must never change, or files of results would be continued with other questions.
    ((_, question),) = questions(demo_llama[1], [700], n_depths=1)
    assert question.expected == "5851658"


def test_the_setting_distinguishes_texts():
    texts = [needle(None, [], text=text).setting for text in ("a b.", "a c.", None)]
    assert len({str(setting) for setting in texts}) == 3


def n_words(text):
    return len(text.split())


def test_a_text_is_cut_between_sentences_and_needles_are_at_their_depth():
    hidden = [(1.0, "z "), (0.0, "x "), (0.6, "y "), (0.0, "w ")]
    assert joined(["a ", "b ", "c ", "d "], hidden) == "x w a b y c d z"
    text = 'One two three. "Four five!" Six\nseven.\n\nA heading\n\nEight nine ten'
    pieces = list(sentences_of(text + "\n\n"))
    assert len(pieces) == 5 and "".join(pieces) == text + "\n\n" and pieces[1] == '"Four five!" '
    for length in range(20, 31):
        made = filled(length, [(0.0, "needle . ")], itertools.cycle(pieces), n_words)
        assert length - 5 < n_words(made) <= length
        assert made.endswith(("three.", '!"', "seven.", "heading", "ten"))


def test_no_room_is_an_error_that_says_how_much_is_needed():
    with pytest.raises(SnapKVError, match="--length must be at least 11 for this question, got 10"):
        filled(10, [(0.5, "needle is . ")], itertools.cycle(["1 2 3 4 5 6 7 8."]), n_words)


@pytest.mark.parametrize(
    "answer, named",
    [
        (" 1234.", True),
        ("1234\nmore", True),
        ("It is 1234.", True),
        ("12345", False),
        ("", False),
    ],
)
def test_a_value_must_not_be_part_of_a_longer_word(answer, named):
    assert contains(answer, "1234") is named
