import re
import sys

import pytest

from mlx_snapkv.cli import app


def test_the_demo_shows_what_compression_keeps(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["mlx-snapkv", "demo", "--tokens", "1024", "--questions", "2"])
    with pytest.raises(SystemExit) as exit:
        app.main()
    out = capsys.readouterr().out
    assert exit.value.code == 0
    figures = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in out.splitlines()
        if re.search(r"│ +[\d,]+ │", line)
    }
    assert list(figures) == ["full cache", "sink + window", "SnapKV"]
    assert figures["full cache"][0] == figures["SnapKV"][0] == "2/2"
    assert figures["sink + window"][0] == "0/2"
    assert figures["SnapKV"][2] == figures["sink + window"][2] != figures["full cache"][2]
    assert re.fullmatch(r"1\d\.\dx smaller", figures["SnapKV"][3])


def test_a_document_must_have_some_length(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx-snapkv", "demo", "--tokens", "5"])
    with pytest.raises(SystemExit) as exit:
        app.main()
    assert exit.value.code == 2 and "Invalid value for '--tokens'" in capsys.readouterr().err
