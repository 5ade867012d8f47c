"""A request of a batch that fails ends alone; the others answer as if it had not been there."""

import mlx.core as mx
import pytest
from batch_helpers import Run, prompts_of
from request_helpers import assert_unpatched
from tiny_models import make_llama

POLICIES = [
    "snapkv:n_sink=4,n_window=32,budget=56,lookahead=4",
    "snapkv:n_sink=4,n_window=32,min_ctx=9999,lookahead=4",
    "h2o:budget=48,block=16",
]
BAD = 63  # a token whose embedding is NaN where a test says so


@pytest.fixture
def model():
    model = make_llama(tie_word_embeddings=False)
    model.model.embed_tokens.weight[BAD] = mx.nan
    return model


@pytest.fixture
def prompts():
    return prompts_of(150, 90, 200, vocab_size=BAD)


def error_of(run, prompts, failed):
    """What ended that request; the others answer as alone."""
    run.finish()
    assert_unpatched()
    others = [uid for uid in range(len(prompts)) if uid != failed]
    run.assert_alone(others, [prompts[uid] for uid in others], [30, 30])
    assert run.last[failed].finish_reason == "error"
    return str(run.last[failed].error)


@pytest.mark.parametrize(("policy", "place"), list(zip(POLICIES, [0, 149, 149])))
def test_nan_in_a_prompt(model, prompts, policy, place):
    prompts[0][place] = BAD
    run = Run(model, policy)
    run.insert(prompts, 30)
    assert "NaN" in error_of(run, prompts, failed=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_nan_in_an_answer(model, prompts, policy):
    """A processor that makes the answer say a token which the model can't read."""

    def say_bad(tokens, logits):
        return mx.where(mx.arange(64) == BAD, 1e9, logits) if len(tokens) > 160 else logits

    run = Run(model, policy)
    run.insert(prompts, 30, logits_processors=[[say_bad], None, None])
    assert "NaN" in error_of(run, prompts, failed=0)
    assert run.answers[0][:5] == run.alone(prompts[0], 5)


def raises(*args):
    raise KeyError("no such word")


@pytest.mark.parametrize(
    ("policy", "number", "option", "function"),
    [
        (POLICIES[0], 0, "samplers", raises),
        (POLICIES[1], 1, "logits_processors", raises),
        (POLICIES[2], 2, "samplers", lambda *args: mx.zeros((3, 7))),
        (POLICIES[0], 2, "logits_processors", lambda *args: mx.zeros((3, 7))),
    ],
)
def test_functions_of_a_request(prompts, policy, number, option, function):
    given = [None] * 3
    given[number] = function if option == "samplers" else [function]
    run = Run(make_llama(), policy)
    run.insert(prompts, 30, **{option: given})
    why = "no such word" if function is raises else "(3, 7)"
    assert why in error_of(run, prompts, failed=number)


def test_a_model_that_fails_ends_the_requests_of_that_step_and_no_others(prompts, monkeypatch):
    model = make_llama()
    run = Run(model, POLICIES[0])
    run.insert(prompts[:2], 30)
    while len(run.answers.get(1, [])) < 8:
        run.step()
    call = type(model).__call__
    monkeypatch.setattr(type(model), "__call__", raises)
    run.step()
    monkeypatch.setattr(type(model), "__call__", call)
    assert [run.last[uid].finish_reason for uid in (0, 1)] == ["error", "error"]
    (uid,) = run.insert(prompts[2:], 30)
    run.finish()
    assert run.answers[uid] == run.alone(prompts[2], 30)
