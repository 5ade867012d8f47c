"""A mistake causes one line on stderr and exit code 2, before anything is read or written."""

import re
import shlex

import pytest

# A command line | words of its one line. {} is a folder with the file `text`.
MISTAKES = r"""
needle --policy snapkv:top_k=8000                   | would compress none of the prompts: the prompt's 4096 entries
needle --length 4k                                  | --length must be whole numbers from 256 to 10000000, sep
needle --haystack /dev/null                         | --haystack /dev/null: there is no text
needle --output {}/                                 | is a folder
data --data {}/text --model none                    | text: line 1 is not a JSON object
"""
ROWS = [re.split(r" +\| ", line) for line in MISTAKES.splitlines() if line]


@pytest.mark.parametrize("line, words", ROWS)
def test_a_mistake_is_one_line(refused, tmp_path, line, words):
    (tmp_path / "text").write_text("my notes")
    assert words in refused(*shlex.split(line.replace("{}", str(tmp_path))))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_a_result_replaces_only_results(refused, tmp_path, ending):
    file = tmp_path / f"r{ending}"
    file.write_text("my notes")
    base = str(tmp_path / "r")
    assert str(file) in refused("needle", "--length", "256", "--depths", "1", "--output", base)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == "my notes"


def test_the_users_own_settings_do_not_change_a_measurement(refused, monkeypatch):
    monkeypatch.setenv("MLX_SNAPKV_LENGTH", "256")
    said = refused("needle", "--policy", "snapkv:top_k=8000")
    assert "would compress none of the prompts: the prompt's 4096 entries" in said
