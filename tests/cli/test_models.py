import sys

import pytest

from mlx_snapkv import models
from mlx_snapkv.cli import app


def test_both_lists_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx-snapkv", "models"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit:
        app.main()
    out = capsys.readouterr().out
    assert exit.value.code == 0
    lines = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    listed = {cells[0].strip(): cells[2].strip() for cells in lines}
    assert set(models.SUPPORTED) | set(models.REFUSED) <= set(listed)
    assert listed["mamba"] == models.REFUSED["mamba"]
