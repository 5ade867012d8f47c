import contextlib
import os
import re
import shlex
import sys

import fork_helpers
import pytest


def test_the_demo_shows_what_compression_keeps(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call("demo", "--tokens", "1024", "--questions", "2")
    assert code == 0
    figures = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in out.splitlines()
        if re.search(r"│ +[\d,]+ │", line)
    }
    assert list(figures) == ["full cache", "sink + window", "SnapKV"]
    assert figures["full cache"][0] == figures["SnapKV"][0] == "2/2"
    assert figures["sink + window"][0] == "0/2"
    assert re.fullmatch(r"1\d\.\dx smaller", figures["SnapKV"][3])
    assert re.fullmatch(r"1\d\.\dx smaller", figures["sink + window"][3])


def test_the_document_is_kept_and_can_be_asked_about(tmp_path):
    demo = [sys.executable, "-m", "mlx_snapkv", "demo", "--tokens", "1024", "--questions", "1"]
    demo += ["--save-document", "a story.txt"]
    done = fork_helpers.run(demo, cwd=tmp_path, capture_output=True, text=True, check=True)
    hidden = re.search(r"│ (\d+) +│ right \1 ", done.stdout)[1]
    command = done.stdout.splitlines()[-1].partition("Ask again: ")[2]
    words = [sys.executable, "-m", *shlex.split(command[command.index("generate ") :])]
    words[2:2] = ["mlx_snapkv"]
    again = fork_helpers.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert again.stdout.strip() == hidden
    (tmp_path / "a story.txt").write_text("mine")
    refused = fork_helpers.run(demo, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stdout == ""
    assert "--save-document a story.txt: there is such a file already" in refused.stderr
    assert (tmp_path / "a story.txt").read_text() == "mine"


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_its_colours_are_the_terminals_own(term):
    fd, its = os.openpty()
    command = [sys.executable, "-m", "mlx_snapkv", "demo", "--tokens", "1024", "--questions", "1"]
    process = fork_helpers.Popen(
        command, stdout=its, stderr=its, env=os.environ | {"TERM": term, "COLORTERM": "truecolor"}
    )
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(fd, 65536):
            shown += data
    os.close(fd)
    assert process.wait() == 0 and b"SnapKV" in shown
    codes = set(re.findall(rb"\x1b\[([\d;]*)m", shown))
    if term == "dumb":
        assert b"\x1b" not in shown
    else:  # green and red among them, and no colour of a fixed shade
        assert b"32" in codes and codes <= {b"0", b"1", b"2", b"3", b"31", b"32", b"39"}
