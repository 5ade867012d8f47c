import functools
import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_snapkv.errors import SnapKVError
from scripts import make_ruler

pytest.importorskip("lm_eval", reason="needs pip install 'lm_eval[ruler]'")
wonderwords = pytest.importorskip("wonderwords", reason="needs pip install 'lm_eval[ruler]'")

LENGTH = 1024


@pytest.fixture(scope="module", autouse=True)
def few_pairs():
    """Give RULER's generators 50 words of each kind for pairs. On import, they sort all pairs of adjectives and nouns.

    There are six million pairs of wonderwords' own words. cwe reads the singular names, and has all words.
    """
    own = wonderwords.RandomWord()._categories
    lists = own | {name: own[name][:50] for name in ("nouns", "verbs", "adjectives")}
    with pytest.MonkeyPatch.context() as patch:
        make = functools.partial(wonderwords.RandomWord, **lists)
        patch.setattr(wonderwords, "RandomWord", make)
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Return the folder of a tokenizer with one token per word or punctuation mark, all of them unknown."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def essays(tmp_path):
    text = "The grey sea is wide. Is it deep?\nIt is!\n\n" * 400
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    return tmp_path


N_ANSWERS = {"niah_single_2": 1, "vt": 5, "cwe": 10, "fwe": 3}


def test_a_row_is_rulers_prompt_in_three_parts(tokenizer, essays):
    """One test covers all tasks, because importing RULER's generators takes some seconds per process."""
    for task, n_answers in N_ANSWERS.items():
        rows = make_ruler.make_rows(task, tokenizer, LENGTH, 2, essays=essays)
        assert len({row["context"] for row in rows}) == 2
        for row in rows:
            assert_row(row, task, n_answers)


def assert_row(row, task, n_answers):
    columns = "context question answer_prefix answer max_new_tokens task length"
    assert set(row) == set(columns.split())
    assert row["context"].endswith("\n") and "\n" not in row["question"] + row["answer_prefix"]
    assert row["question"].rstrip()[-1] in "?." and row["question"].endswith(" ")
    assert len(row["answer"]) == n_answers
    assert all(answer in row["context"] for answer in row["answer"])
    assert (row["task"], row["length"]) == (task, LENGTH)
    beginning = "The special magic" if task.startswith("niah") else "Answer:"
    assert row["answer_prefix"].startswith(beginning)
    if task == "niah_single_2":  # the needle is between two sentences of the essays
        before, _, after = row["context"].partition(f"is: {row['answer'][0]}.")
        assert "The grey sea is wide." in before + after
        haystack = before.split("afterwards.\n")[1].partition("One of the special")[0].strip()
        assert not haystack or haystack[-1] in ".?!"
    if task == "cwe":  # the prompt begins with a solved example
        example, lists = row["context"].split("are:1. ", 1)
        assert "Question: What are the 10 most common words" in example
        assert all(lists.count(f" {answer}") >= 6 for answer in row["answer"])


def test_a_seed_gives_the_same_rows_and_more_samples_only_append_rows(tokenizer):
    for task in ("niah_multikey_3", "vt"):
        make = functools.partial(make_ruler.make_rows, task, tokenizer, LENGTH)
        assert make(4, 1)[:2] == make(2, 1) != make(2, 2)


def test_a_file_is_written_for_each_task_and_length(tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    options = ["--task", "vt", "--length", "1024", "--length", "1500", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", ["make_ruler.py", str(tokenizer), str(out), *options])
    make_ruler.main()
    for length in (1024, 1500):
        lines = (out / str(length) / "vt.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["length"] for line in lines] == [length] * 2


def test_missing_essays_and_unknown_lengths_are_named(tokenizer, tmp_path):
    with pytest.raises(SnapKVError, match=r"has no \.txt files: run `make real-models`"):
        make_ruler.make_rows("niah_single_2", tokenizer, LENGTH, 1, essays=tmp_path)
    with pytest.raises(SnapKVError, match="at least 1024 tokens, not 512"):
        make_ruler.make_rows("vt", tokenizer, 512, 1)
