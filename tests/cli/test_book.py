"""A text read within a fixed budget, with every entry at hand, from the command line."""

import json
import re

import pytest

BOOK = [
    "--policy",
    "keydiff:budget=96,block=128 then snapkv:top_k=60,n_sink=4,n_window=32,obs_window=32,pool=avg,pool_kernel=21",
]


def asked(story, *options):
    path, facts = story
    text = ["--prompt-file", str(path), "--prompt", facts[0].question]
    return ["generate", "--model", "demo", *text, "-m", "12", *BOOK, *options]


@pytest.mark.parametrize("memory", ["recall", "recall:4bit", "recall:file", "recall:file:8bit"])
def test_the_closing_line_tells_where_the_entries_are(call, story, memory):
    code, out, err = call(*asked(story, "--memory", memory))
    assert (code, out) == (0, story[1][0].value + "\n")
    where = "on disk" if "file" in memory else "in memory"
    found = re.search(
        rf"(\d+) prompt tokens, 96 entries read by every token, KV memory [^,]*\), (\d+) resident \([^)]*\), "
        rf"all \1 {where} \([^)]*\), votes [\d.]+ s, gathering [\d.]+ s, \d+ tokens read again [\d.]+ s \| prompt",
        err.splitlines()[-1],
    )
    assert found and int(found[2]) <= 96 + 128


def test_files_are_where_the_user_wants_them(call, story, tmp_path, monkeypatch):
    opened = []
    import tempfile

    real = tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda **how: opened.append(tempfile.gettempdir()) or real(**how)
    )
    options = ["--memory", "recall:file", "--store-dir", str(tmp_path), "--json", "--quiet"]
    code, out, err = call(*asked(story, *options))
    assert (code, err) == (0, "") and set(opened) == {str(tmp_path)}
    assert not list(tmp_path.iterdir())  # they have no names, and are gone with the command
    book = json.loads(out)["compression"]["book"]
    assert book["file_bytes"] > 0 and book["stored"] > 1500


def told(err):
    return [line for line in err.splitlines() if " tokens to read: at most " in line]


def test_what_it_will_take_is_said_first(call, story, tmp_path):
    """And at the end what it took: the same bytes on disk."""
    code, _, err = call(*asked(story, "--memory", "recall:file", "--store-dir", str(tmp_path)))
    (first,) = told(err)
    assert code == 0 and first in err.splitlines()[:2]
    need = re.search(rf"resident \([^)]*\), (.*) on disk in {tmp_path} \(.* free\)$", first)[1]
    assert f"on disk ({need})" in err.splitlines()[-1]


@pytest.mark.parametrize("options", [["--quiet"], ["--json"], ["--memory", "drop"]])
def test_it_is_not_said_where_nobody_asked(call, story, options):
    code, _, err = call(*asked(story, "--memory", "recall", *options))
    assert code == 0 and not told(err) and "warning" not in err


def test_a_chat_says_it_of_long_turns(call, story):
    """Not of a question that comes after."""
    path, facts = story
    lines = [f"/file {path}", facts[0].question, facts[1].question]
    args = ["chat", "--model", "demo", *BOOK, "--memory", "recall:file", "-m", "8"]
    code, _, err = call(*args, stdin="\n".join(lines).encode())
    assert code == 0 and len(told(err)) == 1
