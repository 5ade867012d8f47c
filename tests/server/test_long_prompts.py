"""The server's log says which prompts are too long for this machine, or for the model."""

import logging

from server_helpers import load_named, serving

from mlx_snapkv.engine.machine import Machine
from mlx_snapkv.planning import long_prompts


def test_a_long_prompt_is_told_and_answered(monkeypatch, caplog):
    monkeypatch.setattr(long_prompts, "this_machine", lambda: Machine(10**7, 10**7))
    with caplog.at_level(logging.WARNING, "mlx_snapkv.server"), serving() as server:
        for n, told in ((5, 0), (900, 1)):
            body = {"prompt": [5 + i % 60 for i in range(n)], "max_tokens": 1}
            assert server.post("/v1/completions", body).status_code == 200
            warnings = [r.getMessage() for r in caplog.records if "this machine" in r.getMessage()]
            assert len(warnings) == told
    assert warnings[0].startswith("900 tokens will take about")


def test_a_prompt_beyond_what_the_model_was_trained_to(caplog):
    def shorter(model, tokenizer):
        model.args.max_position_embeddings = 600

    def told_of(**options):
        caplog.clear()
        with serving(load_named("demo", shorter), **options) as server:
            for n in (500, 700):
                body = {"prompt": [5 + i % 60 for i in range(n)], "max_tokens": 1}
                assert server.post("/v1/completions", body).status_code == 200
        return [r.getMessage() for r in caplog.records if "trained" in r.getMessage()]

    with caplog.at_level(logging.WARNING, "mlx_snapkv.server"):
        (told,) = told_of()
        assert told.startswith("700 tokens are more than the 600 that this model was trained to")
        assert "keydiff" in told
        assert told_of(policy="keydiff:budget=256,block=64") == []  # which brings them nearer
        assert told_of(generation={"far": "keep"}) == []  # as was asked for
