import pytest

from mlx_snapkv.evals.grid import Cell
from mlx_snapkv.evals.lines import FACTS, LONGEVAL, Lines
from mlx_snapkv.evals.needle import Needle

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
BOOK = "It was a long and quiet winter.\nNobody came to the house.\n\n" * 5


def place(tokenizer, question):
    """Where the value stands, as a share of the prompt."""
    value = tokenizer.encode(" " + question.expected, add_special_tokens=False)
    found = [i for i in range(len(question.prompt)) if question.prompt[i : i + len(value)] == value]
    assert len(found) == 1
    return found[0] / len(question.prompt)


def tasks(tokenizer):
    return {
        "needle": Needle(tokenizer),
        "needles": Needle(tokenizer, needles=6),
        "haystack": Needle(tokenizer, haystack=BOOK),
        "lines": Lines(tokenizer, wording=FACTS),
    }


@pytest.mark.parametrize("name", ["needle", "needles", "haystack", "lines"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_answer_is_at_its_depth_and_the_prompt_has_its_length(demo_llama, name, depth):
    tokenizer = demo_llama[1]
    question = tasks(tokenizer)[name].ask(Cell(2048, depth, 0))
    assert 2048 - 40 < len(question.prompt) <= 2048
    assert abs(place(tokenizer, question) - depth) < 0.03


def test_the_other_needles_are_spread_over_the_document(demo_llama):
    tokenizer = demo_llama[1]
    text = tokenizer.decode(Needle(tokenizer, needles=5).ask(Cell(2048, 0.0, 0)).prompt)
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    assert [half.count(" of the ") for half in halves] == [3, 3]  # the question is one of them


@pytest.mark.parametrize("make", [Needle, Lines])
def test_every_cell_and_seed_has_documents_of_its_own(demo_llama, make):
    task, other = make(demo_llama[1]), make(demo_llama[1], seed=1)
    cells = [Cell(length, d, q) for length in (1024, 1500) for d in (0.0, 1.0) for q in (0, 1)]
    asked = [t.ask(cell) for t in (task, other) for cell in cells]
    assert len({question.expected for question in asked}) == len(asked)
    assert [task.ask(cell) for cell in cells] == asked[: len(cells)]


def test_own_text_is_the_filler(demo_llama):
    tokenizer = demo_llama[1]
    text = tokenizer.decode(Needle(tokenizer, haystack=BOOK).ask(Cell(1024, 0.5, 0)).prompt)
    assert text.count("quiet winter") == text.count("to the house") > 20


def test_longevals_lines(demo_llama):
    tokenizer = demo_llama[1]
    question = Lines(tokenizer, wording=LONGEVAL).ask(Cell(2048, 0.5, 0))
    text = tokenizer.decode(question.prompt)
    lines = [line for line in text.splitlines() if line.startswith("line ")]
    names = [line.split(":")[0] for line in lines]
    assert len(set(names)) == len(names) > 20
    (asked,) = [line for line in lines if question.expected in line]
    assert asked.endswith(f": REGISTER_CONTENT is <{question.expected}>")
    assert f"<REGISTER_CONTENT> in {asked.split(':')[0]}?" in text


def test_what_the_prompts_depend_on_is_in_the_setting():
    one, other = Needle(None, haystack="a b."), Needle(None, haystack="a c.")
    assert one.setting() != other.setting() != Needle(None).setting()
    assert Lines(None, wording=FACTS).setting() != Lines(None).setting()
