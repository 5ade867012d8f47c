"""One reading, several ways: answers are those of `generate`, and KL is that of `eval fidelity`."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_snapkv import generate
from mlx_snapkv.evals.compare import Comparison, Way
from mlx_snapkv.evals.fidelity import KNOWN, Judges
from mlx_snapkv.policies import resolve_policy

POLICIES = [
    "snapkv:budget=60,n_window=16,lookahead=0",
    "streaming_llm:budget=60,schedule=once",
    "keydiff:budget=60,block=64",
    "keydiff:budget=256 then snapkv:budget=60,lookahead=4",
    "h2o:budget=60,schedule=once",
]
N = 12


@pytest.fixture(scope="module")
def compared(demo_llama, ask):
    """The prompt, and by policy the way and its answer; None is the full cache."""
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 600, 0)
    ways = [Way(), *(Way(resolve_policy(policy=text)) for text in POLICIES)]
    ways.append(Way(resolve_policy(policy=POLICIES[0]), {"memory": "recall", "refresh": "turn"}))
    comparison = Comparison(model, tokenizer, prompt, ways, N)
    return prompt, [(way, comparison.answer(way)) for way in ways]


def test_every_answer_is_that_of_generate(demo_llama, compared):
    prompt, found = compared
    for way, answer in found:
        text = generate(*demo_llama, prompt, max_tokens=N, policy=way.policy, **way.options)
        assert answer.text == text, way.name
        assert way.policy is None or answer.entries < len(prompt)
        assert (answer.differs is None) == (answer.tokens == found[0][1].tokens)


def test_kl_is_that_of_fidelity(demo_llama, compared):
    model, tokenizer = demo_llama
    prompt, found = compared
    policies = [way.policy for way, _ in found if way.policy is not None and not way.options]
    piece = SimpleNamespace(tokens=prompt[:-20], following=[])
    frame = SimpleNamespace(start=[], before=[], after=prompt[-20:])
    stops = tokenizer.eos_token_ids
    document = Judges(model, piece, frame, policies, {KNOWN}, N, stops)
    for way, answer in found:
        if way.policy in policies and not way.options:
            record = document.judge(KNOWN, way.policy, mx.default_stream(mx.default_device()))
            assert answer.kl == pytest.approx(float(record["kl"]), abs=1e-4), way.name
    assert found[0][1].kl == 0 and max(answer.kl for _, answer in found) > 0.1
    refreshed = [answer.kl for way, answer in found if way.options]
    assert refreshed == [pytest.approx(found[1][1].kl, abs=1e-4)]


def test_what_differs_is_shown_in_its_place(demo_llama, compared):
    _, found = compared
    full = found[0][1]
    other = next(answer for _, answer in found if answer.differs is not None)
    n, before, theirs, ours = other.differs
    assert full.tokens[:n] == other.tokens[:n] and theirs != ours
    assert full.text.startswith(before.lstrip()) or n > 8
    assert other.kept.shape == (len(compared[0]),) and 0 < other.kept.mean() < 0.3


def test_a_prompt_that_fits_the_budget_is_the_full_caches(demo_llama, ask):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 200, 1)
    ways = [Way(), Way(resolve_policy(policy="snapkv:top_k=4096"))]
    full, other = map(Comparison(model, tokenizer, prompt, ways, 4).answer, ways)
    assert "fit the budget" in other.reason and (full.text, full.kl) == (other.text, other.kl)
