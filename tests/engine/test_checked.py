"""verify="all": drafts of a small cache, and the full cache's own answer, whatever is sampled."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from request_helpers import assert_unpatched, plain, steps
from tiny_models import make_llama

from mlx_snapkv import Conversation, generate_step, stream_generate
from mlx_snapkv.engine import checked
from mlx_snapkv.engine.prefill import mlx_generate, read

POLICY = "snapkv:top_k=20,n_sink=4,n_window=16,obs_window=8,lookahead=0"
ALL = {"policy": POLICY, "memory": "recall", "verify": "all"}


def ids(items):
    return [token for token, _ in items]


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize(
    "policy", [POLICY, "keydiff:budget=40,schedule=once", "tova:budget=40,schedule=once,block=8"]
)
def test_the_full_caches_own_answer(tokens, policy, lookahead):
    model = make_llama(seed=3)
    policy = policy.replace("lookahead=0", f"lookahead={lookahead}")
    reports = []
    found = steps(model, tokens, 120, **ALL | {"policy": policy}, on_report=reports.append)
    wanted = plain(model, tokens, 120)
    assert ids(found) == ids(wanted)
    for (_, a), (_, b) in zip(found, wanted):
        assert mx.allclose(a, b, atol=1e-4)
    verified = reports[0].verified
    assert 0 < verified.accepted <= verified.drafted and verified.tokens >= 119 - lookahead
    assert_unpatched()


def test_many_answers_are_the_full_caches(demo_llama, ask):
    model, tokenizer = demo_llama
    for seed in range(6):
        tokens, _ = ask(tokenizer, 700, seed=seed)
        wanted = [r.token for r in stream_generate(model, tokenizer, tokens, 24)]
        assert [r.token for r in stream_generate(model, tokenizer, tokens, 24, **ALL)] == wanted


def test_samples_and_processors_see_the_full_caches_logits(tokens):
    model = make_llama(seed=3)
    for temp in (0.0, 0.7):
        answers = []
        for keywords in ({}, ALL):
            mx.random.seed(5)
            options = {
                "sampler": make_sampler(temp, top_p=0.9),
                "logits_processors": make_logits_processors(repetition_penalty=1.3),
            }
            answers.append(ids(steps(model, tokens, 60, **options, **keywords)))
        assert answers[0] == answers[1]


def test_quantised_entries_give_the_quantised_caches_answer(tokens):
    model = make_llama(seed=3, head_dim=32)
    cache = [KVCache() for _ in model.layers]
    first = mx.argmax(read(model, tokens, cache, {}), axis=-1)
    # The first token of the answer is fed before entries are quantised.
    (second, _), *_ = mlx_generate.generate_step(first, model, max_tokens=1, prompt_cache=cache)
    for c in cache:
        c.trim(1)
    cache = [c.to_quantized(32, 8) for c in cache]
    rest = mlx_generate.generate_step(mx.array([second]), model, max_tokens=60, prompt_cache=cache)
    wanted = [first.item(), second, *ids(rest)]
    found = steps(model, tokens, 62, **ALL | {"memory": "recall:8bit"})
    assert ids(found) == wanted


def test_a_conversation_keeps_what_it_has_checked(demo_llama, ask):
    model, tokenizer = demo_llama
    tokens, fact = ask(tokenizer, 700, seed=1)
    told = {"memory": "recall", "policy": POLICY, "max_tokens": 10}
    texts = []
    for verify in (None, "all"):
        conversation = Conversation(model, tokenizer, verify=verify, **told)
        turns = [tokenizer.decode(tokens), fact.question, fact.question]
        texts.append(["".join(r.text for r in conversation.send(turn)) for turn in turns])
        if verify == "all":  # the answer's entries are exact, so they need not be read again
            assert len(conversation.pending_tokens) <= 1
    assert fact.value in texts[1][1] and texts[1][1] == texts[1][2]


def test_goes_on_plainly_when_drafts_gain_nothing(tokens, monkeypatch):
    """Of ten tokens, judged by the clock: a plain round that took no time can't be beaten."""
    monkeypatch.setattr(checked, "PATIENCE", 10)
    model = make_llama(seed=3)
    reports = []
    answer = generate_step(tokens, model, max_tokens=80, on_report=reports.append, **ALL)
    for n, _ in enumerate(answer):
        if n == 4:
            reports[0].verified.plain_seconds = 0.0
        if n == 40:
            drafted = reports[0].verified.drafted
    assert reports[0].verified.drafted == drafted
