"""generate_step, stream_generate and generate: gates, what is kept, and the figures."""

import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import SMALL, assert_same, assert_unpatched, plain, steps
from tiny_models import make_llama

from mlx_snapkv import SnapKVCache, generate, generate_step, stream_generate
from mlx_snapkv.engine.prefill import mlx_generate


@pytest.fixture
def counting_patches(monkeypatch):
    """How often a class was patched."""
    from mlx_snapkv.models import patch as capture

    held = []
    hold = capture._hold
    monkeypatch.setattr(capture, "_hold", lambda cls: held.append(cls) or hold(cls))
    return held


# Gates: off means off.


@pytest.mark.parametrize(
    "keywords",
    [{}, {"snapkv": None, "policy": None}, {"snapkv": False}, {"snapkv": {}}, {"policy": "snapkv:min_ctx=201"},
     {"snapkv": "top_k=163,n_sink=5,n_window=32"}],
    ids=["nothing", "none", "false", "below min_ctx", "one below min_ctx", "fits the budget"],
)  # fmt: skip
def test_gated_output_is_bit_identical(tiny_model, tokens, keywords, counting_patches):
    assert_same(steps(tiny_model, tokens, **keywords), plain(tiny_model, tokens))
    assert counting_patches == []


def test_a_populated_cache_is_continued_by_mlx_lm(tiny_model, tokens, counting_patches):
    """In the hybrid, layer 0 is linear and has no offset to look at."""
    mine, theirs = make_prompt_cache(tiny_model), make_prompt_cache(tiny_model)
    plain(tiny_model, tokens[:100], n=3, prompt_cache=mine)
    plain(tiny_model, tokens[:100], n=3, prompt_cache=theirs)
    reports = []
    out = steps(tiny_model, tokens[100:], snapkv=SMALL, prompt_cache=mine, on_report=reports.append)
    assert_same(out, plain(tiny_model, tokens[100:], prompt_cache=theirs))
    assert "already holds tokens" in reports[0].reason and counting_patches == []


# Compression.


def run(model, tokens, n=12, **changes):
    reports, cache = [], make_prompt_cache(model)
    out = steps(
        model, tokens, n, snapkv=SMALL | changes, prompt_cache=cache, on_report=reports.append
    )
    return out, cache, reports


@pytest.mark.parametrize("changes", [{}, {"lookahead": 1}, {"lookahead": 0}, {"heads": "shared"}])
def test_the_cache_is_cut_to_the_budget_and_stays_there(tiny_model, tokens, changes):
    out, cache, reports = run(tiny_model, tokens, on_full="slide", **changes)
    assert len(out) == 12 and len(reports) == 1 and reports[0].compressed
    assert reports[0].prompt_tokens == 200
    for c in cache:
        if isinstance(c, SnapKVCache):
            assert (c.size(), c.offset) == (56, 212)
    assert sum(isinstance(c, SnapKVCache) for c in cache) == 2
    assert_unpatched()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
def test_tokens_before_the_cut_are_the_full_caches_own(tiny_model, tokens, lookahead):
    # One more is computed before the cut, since mlx-lm runs one step ahead.
    out, _, _ = run(tiny_model, tokens, n=40, lookahead=lookahead)
    n = max(1, lookahead) + 1
    expected = plain(tiny_model, tokens, n=40)
    assert_same(out[:n], expected[:n])
    assert not mx.array_equal(out[n][1], expected[n][1])


def test_prompt_logits_are_never_evaluated(tokens, monkeypatch):
    """Nothing of the vocabulary's width is evaluated but the last position's log-probabilities."""
    model = make_llama(vocab_size=97)
    evaluated = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *a: (evaluated.extend(_shapes(a)), evaluate(*a))[1])
    run(model, tokens, prefill_chunk=50)
    assert len(evaluated) > 8
    assert not [shape for shape in evaluated if shape[-1:] == (97,)]


def _shapes(tree):
    if isinstance(tree, mx.array):
        return [tree.shape]
    if isinstance(tree, (list, tuple)):
        return [shape for item in tree for shape in _shapes(item)]
    return []


def test_logits_processors_and_callbacks_act_as_in_mlx_lm(tiny_model, tokens):
    def watch(seen):
        def processor(context, logits):
            seen.append(context.tolist())
            return logits

        return processor

    for votes in ({"lookahead": 0}, {}):
        seen, expected, done, expected_done = [], [], [], []
        list(generate_step(tokens, tiny_model, max_tokens=3, snapkv=SMALL | votes, prefill_step_size=64,
                           logits_processors=[watch(seen)],
                           prompt_progress_callback=lambda *a, done=done: done.append(a)))  # fmt: skip
        plain(tiny_model, tokens, n=3, prefill_step_size=64, logits_processors=[watch(expected)],
              prompt_progress_callback=lambda *a, done=expected_done: done.append(a))  # fmt: skip
        # The chunks are a little shorter, so that the observation window has one of its own.
        assert [done[0], *done[-2:]] == [expected_done[0], *expected_done[-2:]]
        assert [len(s) for s in seen] == [len(s) for s in expected]
        assert seen[0] == expected[0] == tokens.tolist()


@pytest.mark.parametrize("threads", [False, True])
def test_two_requests_at_a_time_equal_requests_alone(tiny_model, tokens, threads):
    prompts, options = (tokens, tokens[::-1]), SMALL | {"lookahead": 2, "prefill_chunk": 20}
    alone = [[t for t, _ in steps(tiny_model, p, snapkv=options)] for p in prompts]
    both = [generate_step(p, tiny_model, max_tokens=12, snapkv=options) for p in prompts]
    if threads:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda answer: [token for token, _ in answer], both))
    else:
        found = [list(answer) for answer in zip(*([t for t, _ in pair] for pair in zip(*both)))]
    assert found == alone
    assert_unpatched()


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to, clock(seconds), and a little when it is looked at."""
    now = [100.0]

    def wait(seconds=1e-6):
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(time, "perf_counter", wait)
    return wait


def test_the_selection_is_not_counted_as_generation(demo_llama, ask, monkeypatch, clock):
    """A cut made a second slower does not slow the speed reported after it."""
    from mlx_snapkv.engine import compress

    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 400, seed=3)
    choose = compress.choose
    monkeypatch.setattr(compress, "choose", lambda *a: (clock(1), choose(*a))[1])
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
