"""Answers as text, and their figures."""

import time

import pytest
from request_helpers import SMALL
from tiny_models import make_llama

from mlx_snapkv import generate, generate_step, stream_generate
from mlx_snapkv.engine.prefill import mlx_generate


def test_stream_generate_counts_the_whole_prompt(demo_model, ask):
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 400, seed=1)
    for votes in ({"last_token": False, "lookahead": 0}, {"lookahead": 0}, {}):
        reports = []
        responses = list(
            stream_generate(
                model, tokenizer, prompt, 8, snapkv=SMALL | votes, on_report=reports.append
            )
        )
        assert reports[0].compressed
        assert {r.prompt_tokens for r in responses} == {len(prompt)}
        assert responses[-1].finish_reason in ("stop", "length")


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to, clock(seconds), and a little when it is looked at."""
    now = [100.0]

    def wait(seconds=1e-6):
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(time, "perf_counter", wait)
    return wait


def test_the_prefills_clock_does_not_see_the_reader(tokens, clock):
    reports = []
    for _ in generate_step(
        tokens, make_llama(), max_tokens=8, snapkv=SMALL, on_report=reports.append
    ):
        clock(0.5)
    assert reports[0].prefill_seconds < 0.5


def test_the_selection_is_not_counted_as_generation(demo_llama, ask, monkeypatch, clock):
    """A cut made a second slower does not slow the speed reported after it."""
    from mlx_snapkv.engine import choosing

    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 400, seed=3)
    choose = choosing.choose
    monkeypatch.setattr(choosing, "choose", lambda *a: (clock(1), choose(*a))[1])
    responses = []
    for response in stream_generate(model, tokenizer, prompt, 8, snapkv=SMALL | {"lookahead": 2}):
        responses.append(response)
        clock(0.01)
    assert len(responses) > 4
    assert responses[-1].generation_tokens / responses[-1].generation_tps < 1


def test_text_prompts_are_encoded_as_mlx_lm_does(demo_llama):
    model, tokenizer = demo_llama
    text = "The access code of the amber falcon is 123456. The access code of the amber falcon is"
    expected = mlx_generate.generate(model, tokenizer, text, max_tokens=6)
    assert generate(model, tokenizer, text, max_tokens=6) == expected
    assert generate(model, tokenizer, text, max_tokens=6, snapkv={}) == expected


def test_verbose_prints_the_answer_and_the_figures(demo_llama, ask, capsys):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 300, seed=2)
    text = generate(model, tokenizer, prompt, verbose=True, max_tokens=4, snapkv=SMALL)
    out = capsys.readouterr().out
    assert out.startswith(text)
    assert (
        f"Prompt: {len(prompt)} tokens" in out
        and "Compression: " in out
        and "56 entries kept" in out
    )
