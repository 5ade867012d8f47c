"""The scores of RULER, LongBench and SCBench, worked out by hand."""

from pathlib import Path

import pytest

from mlx_snapkv.evals import longbench, longbench2, ruler, scbench
from mlx_snapkv.evals import longbench_scores as lb
from mlx_snapkv.evals import scbench_scores as sc


@pytest.mark.parametrize(
    "references, answer, every, some",
    [
        (["12", "ab"], " It is AB\x00 and 12.", 1.0, 1.0),
        (["12", "ab"], "AB only", 0.5, 1.0),
        (["12", "ab"], "", 0.0, 0.0),
        (["one two"], "one\ttwo", 0.0, 0.0),  # a tab becomes a line break, not a blank
        (["12", "12", "34"], "\x0012,", 2 / 3, 1.0),  # a reference counts as often as it is one
        (["12"], "3412", 1.0, 1.0),  # anywhere
        (["Straße"], "STRASSE", 0.0, 0.0),  # lower(), not casefold()
        (["1\x01"], "1\x01", 0.0, 0.0),  # answers are cleaned, references are not
    ],
)
def test_ruler(references, answer, every, some):
    assert ruler.match_all(references, answer) == every
    assert ruler.match_part(references, answer) == some


@pytest.mark.parametrize(
    "before, after",
    [
        ("", ""),
        ("<user> ", "<end><next>\n\n"),
        ("<user>\n", "<end>\n<assistant>\n"),  # as RULER's template Phi3
        ("User: Hello\n\nAssistant: Yes?\n\nUser: ", "\n\nAssistant:"),  # RWKV
        ("<a>System\n\n<b>User\n", "\n<b>Assistant\n"),  # nemotron5-instruct
    ],
)
def test_rulers_document_ends_before_the_question(demo_llama, before, after):
    """Whatever the template puts behind it; the tokens that all questions share are those of the document."""
    _, tokenizer = demo_llama
    document, question = "It is long.\nIt is so.", "What is so long?"
    row = {
        "input": f"{before}{document}\n{question}{after}",
        "outputs": ["x"],
        "answer_prefix": " So",
    }
    source = ruler.Source("vt", Path("vt.jsonl"), None)
    paper = ruler.Ruler(tokenizer, [source]).paper(source, row)
    (asked,) = paper.questions
    assert tokenizer.decode(asked.prompt, skip_special_tokens=True).endswith(f"{after} So")
    shared = tokenizer.decode(asked.prompt[: paper.n_shared], skip_special_tokens=True)
    assert shared.rstrip("\n").endswith("It is so.") and "What" not in shared


@pytest.mark.parametrize(
    "score, answer, reference, wanted",
    [
        (lb.qa_f1, "The cat, a dog!", "cat dog", 1.0),
        (lb.qa_f1, "cat", "cat dog", 2 / 3),  # precision 1, recall 1/2
        (lb.qa_f1, "cat cat", "cat dog", 0.5),
        (lb.qa_f1, "bird", "cat", 0.0),
        (lb.qa_f1_zh, "很好。", "很好", 1.0),
        (lb.rouge_l, "one two three", "one three", 0.8),  # precision 2/3, recall 1
        (lb.rouge_l, "", "one", 0.0),
        (lb.rouge_l_zh, "很好 公园", "很好", 0.8),  # 很, 好 and 公园: precision 2/3, recall 1
        (lb.counted, "4 or 5, rather 5", "5", 2 / 3),
        (lb.counted, "none", "5", 0.0),
        (lb.retrieved, "Paragraph 12", "Paragraph 12", 1.0),
        (lb.retrieved, "段落3 或 4", "段落3", 0.5),
        (lb.edit_similarity, "\n# why\nabcd\nef", "abcx", 0.75),  # 2 * 3 of 8 characters
        (lb.edit_similarity, "```", "x", 0.0),
        (lb.edit_similarity, "abc", "xabcyy", 0.67),  # to hundredths
    ],
)
def test_longbench(score, answer, reference, wanted):
    assert score(answer, reference) == pytest.approx(wanted, abs=1e-6)


def test_the_edit_similarity_is_that_of_matching_blocks():
    """fuzzywuzzy's own, by difflib: "a" alone is found. The longest subsequence, "bd", would give 0.5."""
    assert lb.edit_similarity("abcd", "bdca") == 0.25


@pytest.mark.parametrize(
    "answer, right, wanted",
    [
        ("a city", "city", 1.0),
        ("city or state", "city", 0.5),
        ("other city", "other city", 1.0),  # "city" is part of it
        ("state", "city", 0.0),
    ],
)
def test_classes(answer, right, wanted):
    assert lb.classified(answer, right, ["city", "other city", "state"]) == wanted


@pytest.mark.parametrize(
    "answer, letter",
    [
        ("The correct answer is (C) because", "C"),
        ("**The correct answer is B**", "B"),
        ("The correct answer is E", None),
        ("C", None),
    ],
)
def test_choices(answer, letter):
    assert longbench2.chosen(answer) == letter


@pytest.mark.parametrize(
    "score, answer, label, wanted",
    [
        (sc.contains, "it is ab-1", "ab-1", 1),
        (sc.contains, "it is AB-1", "ab-1", 0),
        (sc.contains_all, "x ONE two", ["one", "two", "three"], 0.67),
        (sc.contains_one, "It was ann", ["Ann"], 1),
        (
            sc.contains_one,
            "(",
            "(A)",
            1,
        ),  # a text counts by its characters, as in SCBench's own code
        (sc.first_number, "the 12 and 13", "12", 1),
        (sc.first_number, "none", "12", 0),
        (sc.characters_f1, "很好", ["很好吗"], 0.8),
        (sc.choice, "B. something", ["else", "B"], 1),
        (sc.choice, "the answer is: B", ["else", "B"], 1),
        (sc.choice, "the answer is else", ["else", "B"], 1),
        (sc.choice, "else", ["else", "B"], 1),
        (sc.choice, "I say C, or B", ["else", "B"], 0),
        (sc.choice, " ", ["else", "B"], 0),
    ],
)
def test_scbench(score, answer, label, wanted):
    assert score(answer, label) == pytest.approx(wanted)


def records(**scores):
    return [{"task": task, "score": x, "size": "0-4k"} for task, xs in scores.items() for x in xs]


def test_longbenchs_averages():
    """By category over tasks, then over categories; code is in both languages."""
    found = longbench.averages(
        records(qasper=[0.0, 1.0], multifieldqa_zh=[1.0], lcc=[0.5], trec=[0.25])
    )
    assert found == {
        "single-document QA": 0.75,
        "few-shot": 0.25,
        "code": 0.5,
        "all": 0.5,
        "English": pytest.approx((0.5 + 0.25 + 0.5) / 3),
        "Chinese": 0.75,
    }


def test_longbench_es_averages():
    made = records(qasper_e=[0.0, 1.0], trec_e=[1.0])
    made[1]["size"] = "8k+"
    assert longbench.averages(made) == {"0-4k": 0.5, "8k+": 1.0}


def test_the_averages_of_choices():
    made = [
        {"score": 1.0, "difficulty": "easy", "size": "short"},
        {"score": 0.0, "difficulty": "easy", "size": "long"},
        {"score": 1.0, "difficulty": "hard", "size": "short"},
    ]
    found = longbench2.averages(made)
    assert found == {
        "overall": pytest.approx(2 / 3),
        "easy": 0.5,
        "hard": 1.0,
        "short": 1.0,
        "long": 0.0,
    }


def test_every_task_has_a_score():
    assert len(longbench.TASKS) == 21 and len(ruler.TASKS) == 13
    assert not set(scbench.METRICS) & set(scbench.REFUSED)


@pytest.mark.parametrize(
    "task, answer, references, wanted",
    [
        (
            "triviaqa",
            "\n\nPaul\nand more",
            ["Peter", "paul"],
            1.0,
        ),  # the first line, the best of two
        ("hotpotqa", "Paul\nand more", ["Paul"], 0.5),  # every line: precision 1/3, recall 1
        ("trec", "\nLocation\nPerson", ["Location"], 1.0),
        ("trec", " \nLocation", ["Location"], 0.0),  # a blank is a line
        ("samsum", "one two\nthree", ["one two"], 1.0),
        ("lsht", "体育\n经济", ["经济"], 0.0),
        ("passage_retrieval_zh", "段落1\n段落2", ["段落2"], 0.5),
        ("lcc", "# x\n\nabc\nx", ["abc"], 0.0),  # an empty line is no comment
        ("gov_report", ".", ["one"], 0.0),  # of which ROUGE can't be told
    ],
)
def test_longbenchs_answers_are_cut_as_there(task, answer, references, wanted):
    row = {"answers": references, "all_classes": ["Location", "Person", "体育", "经济"]}
    found = longbench.LongBench._score(task, row, answer)
    assert found == pytest.approx(wanted, abs=1e-6)
