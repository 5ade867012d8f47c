import itertools
import random

import pytest

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.evals.tasks import Needle, fill, hide, repeated, synthetic


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


def test_long_pieces_are_cut_between_lines():
    rows = [f"row {i} of a table\n" for i in range(40)]
    pieces = list(itertools.islice(repeated("Before. " + "".join(rows) + "\nAfter."), 43))
    assert pieces[:3] == ["Before. ", *rows[:2]] and pieces[-1] == "After.\n\n"


def test_no_room_is_an_error_that_says_how_much_is_needed():
    with pytest.raises(SnapKVError, match="--length must be at least 11 for this question, got 10"):
        filled(10, [(0.5, "needle here . ")], repeated("one two three four five."))
