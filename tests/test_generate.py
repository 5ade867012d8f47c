import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models import llama, qwen3_next
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import make_llama

from mlx_snapkv import SnapKVCache, SnapKVError, generate, generate_step, stream_generate
from mlx_snapkv.prefill import mlx_generate

SMALL = {"top_k": 20, "n_sink": 4, "n_window": 32, "min_ctx": 0}
CALLS = [(llama.Attention, llama.Attention.__call__)]
CALLS += [(qwen3_next.Qwen3NextAttention, qwen3_next.Qwen3NextAttention.__call__)]


def assert_unpatched():
    for cls, call in CALLS:
        assert cls.__call__ is call


def steps(model, prompt, n=12, **keywords):
    """Tokens and log-probabilities of our generate_step."""
    return list(generate_step(prompt, model, max_tokens=n, **keywords))


def plain(model, prompt, n=12, **keywords):
    return list(mlx_generate.generate_step(prompt, model, max_tokens=n, **keywords))


def assert_same(a, b):
    assert [t for t, _ in a] == [t for t, _ in b]
    assert all(mx.array_equal(x, y) for (_, x), (_, y) in zip(a, b))


@pytest.fixture
def counting_patches(monkeypatch):
    """How often a class was patched."""
    from mlx_snapkv import capture

    held = []
    hold = capture._hold
    monkeypatch.setattr(capture, "_hold", lambda cls: held.append(cls) or hold(cls))
    return held


# Gates: off means off.


@pytest.mark.parametrize(
    "keywords",
    [{}, {"snapkv": None, "policy": None}, {"snapkv": False}, {"snapkv": {}}, {"policy": "snapkv:min_ctx=201"},
     {"snapkv": "min_ctx=0,top_k=163,n_sink=5,n_window=32"},
     {"snapkv": "min_ctx=0,top_k=162,n_sink=5,n_window=32,last_token=false"}],
    ids=["nothing", "none", "false", "below min_ctx", "one below min_ctx", "fits the budget",
         "fits without its last token"],
)  # fmt: skip
def test_gated_output_is_bit_identical(tiny_model, tokens, keywords, counting_patches):
    assert_same(steps(tiny_model, tokens, **keywords), plain(tiny_model, tokens))
    assert counting_patches == []


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


@pytest.mark.parametrize(
    "changes", [{}, {"last_token": False}, {"lookahead": 1}, {"lookahead": 4}, {"heads": "shared"}]
)
def test_the_cache_is_cut_to_the_budget_and_stays_there(tiny_model, tokens, changes):
    out, cache, reports = run(tiny_model, tokens, **changes)
    assert len(out) == 12 and len(reports) == 1 and reports[0].compressed
    assert reports[0].prompt_tokens == 200
    for c in cache:
        if isinstance(c, SnapKVCache):
            assert (c.size(), c.offset) == (56, 212)
    assert sum(isinstance(c, SnapKVCache) for c in cache) == 2
    assert_unpatched()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5, None])
def test_tokens_before_the_cut_are_the_full_caches_own(tiny_model, tokens, lookahead):
    # One more is computed before the cut, since mlx-lm runs one step ahead.
    out, _, _ = run(tiny_model, tokens, lookahead=lookahead)
    n = max(1, 4 if lookahead is None else lookahead) + 1
    assert_same(out[:n], plain(tiny_model, tokens)[:n])


def test_the_seeds_window_cuts_before_the_first_token(tiny_model, tokens):
    out, _, _ = run(tiny_model, tokens, last_token=False)
    assert not mx.array_equal(out[0][1], plain(tiny_model, tokens)[0][1])


@pytest.mark.parametrize("votes", [{"last_token": False}, {"lookahead": 0}, {"lookahead": 3}])
def test_keeping_everything_but_one_row_barely_matters_and_all_rows_not_at_all(
    tiny_model, tokens, votes
):
    """`top_k >= T` is the full cache; one row less goes through the whole machinery."""
    full = plain(tiny_model, tokens)
    assert_same(steps(tiny_model, tokens, snapkv=votes | {"min_ctx": 0, "top_k": 200}), full)
    parts = {"min_ctx": 0, "n_sink": 4, "n_window": 100, "top_k": 95}
    nearly = steps(tiny_model, tokens, snapkv=votes | parts)
    assert mx.allclose(nearly[1][1], full[1][1], atol=0.2)


@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 199, 4096])
@pytest.mark.parametrize("votes", [{"last_token": False}, {"lookahead": 0}, {"lookahead": 3}])
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

    for votes in ({"last_token": False}, {"lookahead": 0}, {}):
        seen, expected, done, expected_done = [], [], [], []
        list(generate_step(tokens, tiny_model, max_tokens=3, snapkv=SMALL | votes, prefill_step_size=64,
                           logits_processors=[watch(seen)],
                           prompt_progress_callback=lambda *a, done=done: done.append(a)))  # fmt: skip
        plain(tiny_model, tokens, n=3, prefill_step_size=64, logits_processors=[watch(expected)],
              prompt_progress_callback=lambda *a, done=expected_done: done.append(a))  # fmt: skip
        assert done == expected_done
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


# Failures leave nothing behind.


@pytest.mark.parametrize("call", [1, 2, 3, 5])
@pytest.mark.parametrize("votes", [{"last_token": False}, {"lookahead": 0}, {}])
def test_an_exception_restores_classes_and_the_callers_cache(
    tiny_model, tokens, votes, call, monkeypatch
):
    count = [0]
    original = type(tiny_model).__call__

    def failing(self, *args, **kwargs):
        count[0] += 1
        if count[0] == call:
            raise RuntimeError("the model failed")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_model), "__call__", failing)
    cache = make_prompt_cache(tiny_model)
    before = list(cache)
    with pytest.raises(RuntimeError, match="the model failed"):
        steps(tiny_model, tokens, snapkv=SMALL | votes, prompt_cache=cache, prefill_step_size=100)
    assert_unpatched()
    if isinstance(cache[-1], SnapKVCache):
        assert not any(type(c).__name__ in ("KVCache", "RecordingKVCache") for c in cache)
    else:
        assert all(a is b for a, b in zip(cache, before)) and all(c.empty() for c in cache)


@pytest.mark.parametrize("top_k", [0, 20])
def test_nan_attention_is_one_sentence_and_leaves_the_cache_alone(tokens, top_k):
    model = make_llama()
    model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    cache = make_prompt_cache(model)
    with pytest.raises(SnapKVError, match="NaN"):
        steps(model, tokens, snapkv=SMALL | {"top_k": top_k}, prompt_cache=cache)
    assert all(c.empty() for c in cache)
    assert_unpatched()


def test_a_reader_who_stops_early_finds_the_cache_compressed(tiny_model, tokens):
    cache, reports = make_prompt_cache(tiny_model), []
    answer = generate_step(
        tokens,
        tiny_model,
        snapkv=SMALL | {"lookahead": 8},
        prompt_cache=cache,
        on_report=reports.append,
    )
    next(answer), next(answer)
    answer.close()
    assert_unpatched()
    assert sum(isinstance(c, SnapKVCache) for c in cache) == 2 and reports[0].compressed


def test_one_cache_list_serves_one_request(tokens):
    """Rows that someone else put there after the call are not thrown away."""
    model = make_llama()
    shared = make_prompt_cache(model)
    first, second = (
        generate_step(tokens, model, snapkv=SMALL, prompt_cache=shared) for _ in range(2)
    )
    next(first), next(second)
    list(zip(range(8), first))
    with pytest.raises(SnapKVError, match="another request has filled this prompt cache"):
        list(zip(range(8), second))
    late = make_prompt_cache(model)
    waiting = generate_step(tokens, model, snapkv=SMALL, prompt_cache=late)
    model(tokens[None, :50], cache=late)
    with pytest.raises(SnapKVError, match="another request"):
        next(waiting)
    assert late[0].offset == 50
    assert_unpatched()


def test_a_foreign_patch_does_not_break_a_running_request(tokens):
    model = make_llama()
    answer = generate_step(tokens, model, max_tokens=8, snapkv=SMALL)
    first = [next(answer)]
    held = llama.Attention.__call__

    def foreign(self, *args, **kwargs):
        return held(self, *args, **kwargs)

    llama.Attention.__call__ = foreign
    try:
        assert len(first + list(answer)) == 8
        assert llama.Attention.__call__ is foreign
    finally:
        llama.Attention.__call__ = CALLS[0][1]
    assert_same(steps(model, tokens), plain(model, tokens))


def test_without_a_policy_the_report_says_so(tokens):
    reports = []
    steps(make_llama(), tokens, on_report=reports.append)
    assert [r.reason for r in reports] == ["no policy was given: pass snapkv or policy to compress"]


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"kv_bits": 8}, "kv_bits"),
        ({"max_kv_size": 64}, "max_kv_size"),
        ({"snapkv": SMALL, "policy": "snapkv"}, "give only one"),
        ({"snapkv": {"topk": 1}}, "unknown snapkv option"),
    ],
)
def test_requests_that_cannot_be_served_fail_at_the_call(tokens, keywords, message):
    with pytest.raises(SnapKVError, match=message):
        generate_step(tokens, make_llama(), **{"snapkv": SMALL} | keywords)


def test_an_empty_prompt_fails_at_the_call():
    with pytest.raises(SnapKVError, match="the prompt is empty"):
        generate_step(mx.array([], mx.int32), make_llama(), snapkv=SMALL)


# Text.


def test_stream_generate_counts_the_whole_prompt(demo_model, ask):
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 400, seed=1)
    for votes in ({"last_token": False}, {"lookahead": 0}, {}):
        reports = []
        responses = list(
            stream_generate(
                model, tokenizer, prompt, 8, snapkv=SMALL | votes, on_report=reports.append
            )
        )
        assert reports[0].compressed
        assert {r.prompt_tokens for r in responses} == {len(prompt)}
        assert responses[-1].finish_reason in ("stop", "length")


def test_the_prefills_clock_does_not_see_the_reader(tokens):
    reports = []
    for _ in generate_step(
        tokens, make_llama(), max_tokens=8, snapkv=SMALL, on_report=reports.append
    ):
        time.sleep(0.5)
    assert reports[0].prefill_seconds < 1.5


def test_the_selection_is_not_counted_as_generation(demo_llama, ask, monkeypatch):
    """A cut made a second slower does not slow the speed reported after it."""
    from mlx_snapkv import compress

    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 400, seed=3)
    choose = compress._choose
    monkeypatch.setattr(compress, "_choose", lambda *a: (time.sleep(1), choose(*a))[1])
    responses = list(stream_generate(model, tokenizer, prompt, 8, snapkv=SMALL | {"lookahead": 2}))
    assert len(responses) > 4
    assert responses[-1].generation_tokens / responses[-1].generation_tps < 1.5


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
        f"Prompt: {len(prompt)} tokens" in out and "Compression: " in out and "56 rows kept" in out
    )
