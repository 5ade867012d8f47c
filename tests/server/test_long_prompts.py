"""The server's log says which prompts are too long for this machine, or for the model."""

import logging

import pytest
from server_helpers import load_named, serving

from mlx_snapkv.engine.machine import Machine
from mlx_snapkv.planning import long_prompts


def shorter(model, tokenizer):
    model.args.max_position_embeddings = 600


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "700 tokens are more than the 600 that this model was trained to"),
        ({"policy": "keydiff:budget=256,block=64"}, None),  # which brings them nearer
        ({"generation": {"far": "keep"}}, "700 tokens will take about"),  # as was asked for
    ],
)
def test_what_is_too_long_is_told_and_answered(monkeypatch, caplog, options, words):
    if words and "take" in words:
        monkeypatch.setattr(long_prompts, "this_machine", lambda: Machine(10**7, 10**7))
    with (
        caplog.at_level(logging.WARNING, "mlx_snapkv.server"),
        serving(load_named("demo", shorter), **options) as server,
    ):
        for n in (5, 700):
            body = {"prompt": [5 + i % 60 for i in range(n)], "max_tokens": 1}
            assert server.post("/v1/completions", body).status_code == 200
    assert [r.getMessage().startswith(words) for r in caplog.records] == ([True] if words else [])
