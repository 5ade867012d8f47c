from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import SMALL, assert_same, assert_unpatched, plain, steps
from tiny_models import make_llama

from mlx_snapkv import SnapKVCache, generate_step


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
     {"snapkv": "top_k=163,n_sink=5,n_window=32"},
     {"snapkv": "top_k=162,n_sink=5,n_window=32,last_token=false"}],
    ids=["nothing", "none", "false", "below min_ctx", "one below min_ctx", "fits the budget",
         "fits without its last token"],
)  # fmt: skip
def test_gated_output_is_bit_identical(tiny_model, tokens, keywords, counting_patches):
    assert_same(steps(tiny_model, tokens, **keywords), plain(tiny_model, tokens))
    assert counting_patches == []


def test_the_reason_names_the_rows_there_would_be(tokens):
    reports = []
    policy = "top_k=162,n_sink=5,n_window=32,last_token=false"
    steps(make_llama(), tokens, snapkv=policy, on_report=reports.append)
    assert "the prompt's 199 entries fit the budget of 199" in reports[0].reason


def test_a_prompt_as_long_as_min_ctx_is_compressed(tokens):
    reports = []
    steps(make_llama(), tokens, snapkv=SMALL | {"min_ctx": 200}, on_report=reports.append)
    assert reports[0].compressed


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


EARLY = {"last_token": False, "lookahead": 0}


@pytest.mark.parametrize(
    "changes", [{}, EARLY, {"lookahead": 1}, {"lookahead": 0}, {"heads": "shared"}]
)
def test_the_cache_is_cut_to_the_budget_and_stays_there(tiny_model, tokens, changes):
    out, cache, reports = run(tiny_model, tokens, on_full="slide", **changes)
    assert len(out) == 12 and len(reports) == 1 and reports[0].compressed
    assert reports[0].prompt_tokens == 200
    for c in cache:
        if isinstance(c, SnapKVCache):
            assert (c.size(), c.offset) == (56, 212)
    assert sum(isinstance(c, SnapKVCache) for c in cache) == 2
    assert_unpatched()


@pytest.mark.parametrize("keywords", [{}, {"snapkv": SMALL}])
def test_a_prompt_may_be_a_list_as_generates_may(tiny_model, tokens, keywords):
    listed = steps(tiny_model, tokens.tolist(), **keywords)
    assert_same(listed, steps(tiny_model, tokens, **keywords))


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5, None])
def test_tokens_before_the_cut_are_the_full_caches_own(tiny_model, tokens, lookahead):
    # One more is computed before the cut, since mlx-lm runs one step ahead.
    out, _, _ = run(tiny_model, tokens, n=40, lookahead=lookahead)
    n = max(1, 32 if lookahead is None else lookahead) + 1
    expected = plain(tiny_model, tokens, n=40)
    assert_same(out[:n], expected[:n])
    assert not mx.array_equal(out[n][1], expected[n][1])


def test_the_seeds_window_cuts_before_the_first_token(tiny_model, tokens):
    out, _, _ = run(tiny_model, tokens, **EARLY)
    assert not mx.array_equal(out[0][1], plain(tiny_model, tokens)[0][1])


@pytest.mark.parametrize("votes", [EARLY, {"lookahead": 0}, {"lookahead": 3}])
def test_keeping_everything_but_one_row_barely_matters_and_all_rows_not_at_all(
    tiny_model, tokens, votes
):
    """`top_k >= T` is the full cache; one row less goes through the whole machinery."""
    full = plain(tiny_model, tokens)
    assert_same(steps(tiny_model, tokens, snapkv=votes | {"top_k": 200}), full)
    parts = {"n_sink": 4, "n_window": 100, "top_k": 95}
    nearly = steps(tiny_model, tokens, snapkv=votes | parts)
    assert mx.allclose(nearly[1][1], full[1][1], atol=0.2)


@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 199, 4096])
@pytest.mark.parametrize("votes", [EARLY, {"lookahead": 0}, {"lookahead": 3}])
def test_chunks_do_not_change_what_is_kept(tokens, chunk, votes):
    model = make_llama()
    _, whole, _ = run(model, tokens, **votes)
    _, cut, _ = run(model, tokens, prefill_chunk=chunk, **votes)
    for a, b in zip(whole, cut):
        assert mx.array_equal(a.positions, b.positions)


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

    for votes in (EARLY, {"lookahead": 0}, {}):
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


def test_interleaved_requests_equal_requests_alone(tiny_model, tokens):
    other = tokens[::-1]
    alone = [steps(tiny_model, p, snapkv=SMALL | {"lookahead": 2}) for p in (tokens, other)]
    both = [
        generate_step(p, tiny_model, max_tokens=12, snapkv=SMALL | {"lookahead": 2})
        for p in (tokens, other)
    ]
    mixed = list(zip(*both))
    for i in range(2):
        assert_same([pair[i] for pair in mixed], alone[i])
    assert_unpatched()


def test_two_threads_equal_requests_alone(tiny_model, tokens):
    prompts = [tokens, tokens[::-1]]
    options = SMALL | {"lookahead": 2, "prefill_chunk": 20}
    alone = [steps(tiny_model, prompt, snapkv=options) for prompt in prompts]
    mx.eval([logprobs for answer in alone for _, logprobs in answer])
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda prompt: threaded(tiny_model, prompt, options), prompts))
    for a, b in zip(together, alone):
        assert a == [token for token, _ in b]
    assert_unpatched()


def threaded(model, prompt, options):
    return [token for token, _ in generate_step(prompt, model, max_tokens=12, snapkv=options)]
