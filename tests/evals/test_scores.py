"""Scores worked out by hand."""

import pytest

from mlx_snapkv.evals.columns import (
    choice,
    f1,
    first_line_f1,
    metric_of,
    string_match_all,
    string_match_part,
)


@pytest.mark.parametrize(
    "references, output, every, some",
    [
        (["12", "ab"], " It is AB\x00 and 12.", 1.0, 1.0),
        (["12", "ab"], "AB only", 0.5, 1.0),
        (["onetwo"], "one\ntwo", 1.0, 1.0),  # kvpress takes control characters out before it looks
        (["12", "12", "34"], "\x0012,", 2 / 3, 1.0),  # a reference counts as often as it is one
    ],
)
def test_rulers_string_matches(references, output, every, some):
    assert string_match_all(references, output) == every
    assert string_match_part(references, output) == some


@pytest.mark.parametrize(
    "output, references, wanted",
    [
        ("The cat, a dog!", ["cat dog"], 1.0),
        ("cat", ["cat dog"], 2 / 3),  # precision 1, recall 1/2
        ("cat cat", ["cat dog"], 0.5),  # a word counts as often as it stands in both
        ("bird", ["cat"], 0.0),
        ("cat", ["bird", "a cat"], 1.0),  # the best of several
        ("the", ["cat"], 0.0),
    ],
)
def test_f1_of_words(output, references, wanted):
    assert f1(references, output) == pytest.approx(wanted)


def test_f1_of_the_first_line():
    assert first_line_f1(["Paul"], "\n Paul\nand more") == 1.0
    assert f1(["Paul"], "Paul\nand more") == 0.5


@pytest.mark.parametrize(
    "output, wanted",
    [
        ("B. something", 1.0),
        ("not A but B", 1.0),  # the last of its line
        ("The answer is B\nand not C", 1.0),  # the first line that has one
        ("I say C, or D", 0.0),
        ("Bob", 0.0),
    ],
)
def test_letters(output, wanted):
    assert choice(["B"], output) == wanted


@pytest.mark.parametrize(
    "task, metric",
    [
        ("niah_multivalue", string_match_all),
        ("qa_2", string_match_part),
        ("qasper_e", f1),
        ("hotpotqa-e", f1),
        ("a task of one's own", string_match_all),
    ],
)
def test_every_task_has_a_score(task, metric):
    assert metric_of(task) is metric
