from functools import partial

import evaluate
import pytest
from command_lines import caller, refuser


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs scripts/evaluate.py in this process, as described in `caller`."""
    return caller(partial(evaluate.main, evaluate.app), monkeypatch, capsys)


@pytest.fixture
def refused(call):
    return refuser(call)
