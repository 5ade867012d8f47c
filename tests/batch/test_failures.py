"""One failing request does not affect the others in its batch."""

import mlx.core as mx
import pytest
from batch_helpers import Run, prompts_of
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_unpatched
from tiny_models import make_llama

POLICIES = [
    "snapkv:n_sink=4,n_window=32,budget=56,lookahead=4",
    "snapkv:n_sink=4,n_window=32,min_ctx=9999,lookahead=4",
    "h2o:budget=48,block=16",
]
BAD = 63  # a token whose embedding is NaN
LENGTHS = 150, 90, 200


@pytest.fixture
def model():
    model = make_llama(tie_word_embeddings=False)
    model.model.embed_tokens.weight[BAD] = mx.nan
    return model


def say_bad(tokens, logits):
    """Act as a logits processor that makes the answer contain a token that the model can't read."""
    return mx.where(mx.arange(64) == BAD, 1e9, logits) if len(tokens) > 160 else logits


def raises(*args):
    raise KeyError("no such word")


def of_another_shape(*args):
    return mx.zeros((3, 7))


@pytest.mark.parametrize(
    ("policy", "failed", "what", "how", "why"),
    [
        *((policy, 0, "prompt", n, "NaN") for policy, n in zip(POLICIES, [0, 149, 149])),
        *((policy, 0, "logits_processors", say_bad, "NaN") for policy in POLICIES),
        (POLICIES[0], 0, "samplers", raises, "no such word"),
        (POLICIES[1], 1, "logits_processors", raises, "no such word"),
        (POLICIES[2], 2, "samplers", of_another_shape, "(3, 7)"),
        (POLICIES[0], 2, "logits_processors", of_another_shape, "(3, 7)"),
    ],
)
def test_one_of_three_requests_fails_alone(model, policy, failed, what, how, why):
    """The failure comes from a token of the prompt or answer, or from the request's sampler or logits processor."""
    prompts, options = prompts_of(*LENGTHS, vocab_size=BAD), {}
    if what == "prompt":
        prompts[failed][how] = BAD
    else:
        options = {what: [None] * 3}
        options[what][failed] = how if what == "samplers" else [how]
    run = Run(model, policy)
    run.insert(prompts, 20, **options)
    run.finish()
    assert_unpatched()
    others = [uid for uid in range(3) if uid != failed]
    run.assert_alone(others, [prompts[uid] for uid in others], [20, 20])
    last = run.last[failed]
    assert last.finish_reason == "error" and why in str(last.error)
    if how is say_bad:
        assert run.answers[failed][:5] == run.alone(prompts[failed], 5)


def test_a_failing_model_ends_the_requests_of_that_step_and_no_others(model, monkeypatch):
    prompts = prompts_of(*LENGTHS, vocab_size=BAD)
    run = Run(model, POLICIES[0])
    run.insert(prompts[:2], 20)
    while len(run.answers.get(1, [])) < 8:
        run.step()
    with monkeypatch.context() as failing:
        failing.setattr(type(model), "__call__", raises)
        run.step()
    assert [run.last[uid].finish_reason for uid in (0, 1)] == ["error", "error"]
    (uid,) = run.insert(prompts[2:], 20)
    run.finish()
    assert run.answers[uid] == run.alone(prompts[2], 20)


@pytest.mark.parametrize("policy", [POLICIES[1], "keydiff:budget=400"])
def test_caches_of_another_model_fail_alone(model, policy):
    """The prompts are left to mlx-lm."""
    prompts = prompts_of(*LENGTHS, vocab_size=BAD)
    other_caches = make_prompt_cache(make_llama(num_hidden_layers=1))
    run = Run(model, policy)
    run.insert(prompts, 20, caches=[None, other_caches, None])
    run.finish()
    run.assert_alone([0, 2], [prompts[0], prompts[2]], [20, 20])
    assert "1 caches with entries for" in str(run.last[1].error)
