"""A request of a batch that fails ends alone; the others answer as if it had not been there."""

import mlx.core as mx
import pytest
from batch_helpers import Run, alone, prompts_of
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


def others_answer_as_alone(run, model, prompts, policy, failed):
    run.finish()
    assert_unpatched()
    for uid, prompt in enumerate(prompts):
        if uid == failed:
            assert run.last[uid].finish_reason == "error"
        else:
            assert run.answers[uid] == alone(model, prompt, 30, policy=policy)
    return run.last[failed].error


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", [0, 149])
def test_nan_in_a_prompt(model, prompts, policy, place):
    prompts[0][place] = BAD
    run = Run(model, policy)
    run.insert(prompts, 30)
    error = others_answer_as_alone(run, model, prompts, policy, failed=0)
    assert "NaN" in str(error)


@pytest.mark.parametrize("policy", POLICIES)
def test_nan_in_an_answer(model, prompts, policy):
    """A processor that makes the answer say a token which the model can't read."""

    def say_bad(tokens, logits):
        return mx.where(mx.arange(64) == BAD, 1e9, logits) if len(tokens) > 160 else logits

    run = Run(model, policy)
    run.insert(prompts, 30, logits_processors=[[say_bad], None, None])
    error = others_answer_as_alone(run, model, prompts, policy, failed=0)
    assert "NaN" in str(error)
    assert run.answers[0][:5] == alone(model, prompts[0], 5, policy=policy)


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
    model = make_llama()
    run = Run(model, policy)
    run.insert(prompts, 30, **{option: given})
    error = others_answer_as_alone(run, model, prompts, policy, failed=number)
    assert "no such word" in str(error) or "(3, 7)" in str(error)


def test_a_model_that_fails_ends_the_requests_of_that_step_and_no_others(prompts, monkeypatch):
    model, policy = make_llama(), POLICIES[0]
    run = Run(model, policy)
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
    assert run.answers[uid] == alone(model, prompts[2], 30, policy=policy)
