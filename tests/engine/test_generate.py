"""generate_step, stream_generate and generate: when they compress, what they return and report."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import SMALL, assert_same, plain, steps
from tiny_models import make_llama

from mlx_snapkv import SnapKVCache, generate, generate_step, stream_generate
from mlx_snapkv.engine import compress
from mlx_snapkv.engine.prefill import mlx_generate
from mlx_snapkv.engine.report import CompressionReport

# Gates: without compression, the output is mlx-lm's.


@pytest.mark.parametrize(
    "keywords, reason",
    [
        ({}, "no policy was given: pass snapkv or policy to compress"),
        ({"snapkv": False}, "no policy was given"),
        ({"snapkv": {}}, "200 entries fit the budget of 5466 (n_sink + top_k + n_window); lower it"),
        ({"policy": "snapkv:min_ctx=201"}, "200 tokens are below min_ctx=201; set min_ctx=0 to force"),
        ({"snapkv": "top_k=163,n_sink=5,n_window=32"}, "fit the budget of 200"),
    ],
)  # fmt: skip
def test_gated_output_is_bit_identical(tiny_model, tokens, keywords, reason):
    reports = []
    found = steps(tiny_model, tokens, on_report=reports.append, **keywords)
    assert_same(found, plain(tiny_model, tokens))
    assert reason in reports[0].reason and not reports[0].compressed


def test_a_populated_cache_is_continued_by_mlx_lm(tiny_model, tokens):
    """In the hybrid model, layer 0 is linear, and its cache has no offset."""
    mine, theirs = (make_prompt_cache(tiny_model) for _ in range(2))
    for cache in (mine, theirs):
        plain(tiny_model, tokens[:100], n=3, prompt_cache=cache)
    reports = []
    out = steps(tiny_model, tokens[100:], snapkv=SMALL, prompt_cache=mine, on_report=reports.append)
    assert_same(out, plain(tiny_model, tokens[100:], prompt_cache=theirs))
    assert "already holds tokens" in reports[0].reason


# Compression.


@pytest.mark.parametrize("lookahead", [0, 2])
def test_tokens_before_the_compression_are_the_full_caches_own(tiny_model, tokens, lookahead):
    """After the compression, every cache contains the budget."""
    reports, cache = [], make_prompt_cache(tiny_model)
    options = {"prompt_cache": cache, "on_report": reports.append}
    policy = SMALL | {"on_full": "slide", "lookahead": lookahead}
    out = steps(tiny_model, tokens, n=40, snapkv=policy, **options)
    # mlx-lm runs one step ahead, so one more token is computed before the compression.
    n = max(1, lookahead) + 1
    expected = plain(tiny_model, tokens, n=40)
    assert_same(out[:n], expected[:n])
    assert not mx.array_equal(out[n][1], expected[n][1])
    kept = [(c.size(), c.offset) for c in cache if isinstance(c, SnapKVCache)]
    assert kept == [(56, 240)] * 2
    (report,) = reports
    assert report.compressed and report.prompt_tokens == 200


def test_prompt_logits_are_never_evaluated(tokens, monkeypatch):
    """The only evaluated array as wide as the vocabulary is the last position's log-probabilities."""
    model = make_llama(vocab_size=97)
    shapes, evaluate = [], mx.eval

    def watched(*arrays):
        shapes.extend(x.shape for _, x in tree_flatten(arrays) if isinstance(x, mx.array))
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", watched)
    steps(model, tokens, snapkv=SMALL | {"prefill_chunk": 50})
    assert len(shapes) > 8 and not [shape for shape in shapes if shape[-1:] == (97,)]


def test_logits_processors_and_callbacks_act_as_in_mlx_lm(tiny_model, tokens):
    found = []
    for run, options in (
        (plain, {}),
        (steps, {"snapkv": SMALL | {"lookahead": 0}}),
        (steps, {"snapkv": SMALL}),
    ):
        seen, done = [], []

        def watch(context, logits, seen=seen):
            seen.append(context.tolist())
            return logits

        options["logits_processors"] = [watch]
        options["prompt_progress_callback"] = lambda *at, done=done: done.append(at)
        run(tiny_model, tokens, n=3, prefill_step_size=64, **options)
        # Chunks are a little shorter, because the observation window is a chunk by itself.
        found.append((seen[0], [len(s) for s in seen], done[0], done[-2:]))
    assert found[0] == found[1] == found[2] and found[0][0] == tokens.tolist()


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


def test_the_selection_is_not_counted_as_generation(demo_llama, ask, monkeypatch):
    """A selection that takes one second longer must not lower the reported generation speed."""
    now = [100.0]

    def clock(seconds=1e-6):
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 400, seed=3)
    score_and_select = compress._score_and_select
    monkeypatch.setattr(
        compress, "_score_and_select", lambda *a: (clock(1), score_and_select(*a))[1]
    )
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
    assert out.startswith(text) and f"Prompt: {len(prompt)} tokens" in out
    assert "Compression: " in out and "56 entries kept" in out


def test_warnings_are_given_only_without_a_gain():
    figures = {"kv_bytes_before": 9, "kv_bytes_after": 8, "full_token_seconds": 2.0}
    gained = CompressionReport("snapkv", 1000, **figures, token_seconds=1.0)
    assert gained.warnings == []
    slow, large = {"token_seconds": 4.0}, {"kv_bytes_after": 10}
    (said,) = dataclasses.replace(gained, **slow).warnings
    assert said.startswith("0.50 times as fast as the full cache")
    assert "more memory" in dataclasses.replace(gained, **large).warnings[0]
    assert dataclasses.replace(gained, full_token_seconds=None, **slow).warnings == []
    # The answer ends with tokens that read all entries: for good, or during a trial.
    ended_in_full = dataclasses.replace(gained, read_all=[[1, 17], [300, None]])
    assert ended_in_full.warnings == []
    (said,) = dataclasses.replace(ended_in_full, **slow).warnings
    assert said.startswith("sparse attention was 0.50 times as fast as the full cache")


def test_tokens_before_and_after_the_compression_are_timed(tokens):
    reports = []
    options = {"snapkv": SMALL | {"lookahead": 12}, "on_report": reports.append}
    for n, _ in enumerate(generate_step(tokens, make_llama(), max_tokens=30, **options), start=1):
        if n == 14:
            assert reports[0].full_token_seconds > 0 and reports[0].token_seconds is None
    assert reports[0].token_seconds > 0
