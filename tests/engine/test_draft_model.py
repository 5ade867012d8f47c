"""Draft models with a compressed main cache: answers equal the greedy answers without a draft model."""

import random

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError, prefill, stream_generate
from mlx_snapkv.engine.prefill import mlx_generate

SNAPKV = "snapkv:top_k=20,n_sink=4,n_window=32"
LOOKING = f"{SNAPKV},lookahead=4"
RING = f"{LOOKING},on_full=slide"
FEW = "snapkv:top_k=2,n_sink=4,n_window=16,obs_window=16,lookahead=4"
KEYDIFF = "keydiff:budget=40,block=16"
PROMPT = [random.Random(0).randrange(300) for _ in range(100)]


def wild(vocab_size: int, noise: float = 0.0):
    """Return a random model with large weights. Its answers don't repeat, and every entry it reads matters."""
    model = make_llama(vocab_size=vocab_size, tie_word_embeddings=False)

    def scaled(w):
        return 2 * w + noise * mx.random.normal(w.shape) if w.ndim == 2 else w

    model.update(tree_map(scaled, model.parameters()))
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def tokenizer(demo_llama):
    """Yield the built-in tokenizer without an end-of-sequence token, so that answers reach their full length."""
    _, tokenizer = demo_llama
    eos, tokenizer.eos_token_ids = tokenizer.eos_token_ids, []
    yield tokenizer
    tokenizer.eos_token_ids = eos


@pytest.fixture(scope="module")
def main(tokenizer):
    return wild(len(tokenizer))


@pytest.fixture(scope="module")
def draft(tokenizer):
    """Return a draft model that is right some of the time."""
    return wild(len(tokenizer), noise=0.01)


def said(responses):
    return [response.token for response in responses]


@pytest.mark.parametrize(
    "policy, k, n",
    [(f"{SNAPKV},lookahead=0", 2, 50), (LOOKING, 4, 201), (f"{KEYDIFF} then {FEW}", 3, 50)],
)  # fmt: skip
def test_a_poor_draft_changes_nothing(main, draft, tokenizer, policy, k, n):
    expected = list(stream_generate(main, tokenizer, PROMPT, n, policy=policy))
    assert len({*said(expected)}) >= n / 5
    reports = []
    options = {"num_draft_tokens": k, "policy": policy, "on_report": reports.append}
    mine = list(stream_generate(main, tokenizer, PROMPT, n, draft, **options))
    assert said(mine) == said(expected)
    assert "".join(r.text for r in mine) == "".join(r.text for r in expected)
    ours, theirs = (mx.stack([r.logprobs for r in rs]) for rs in (mine, expected))
    assert mx.allclose(ours, theirs, atol=1e-3)
    assert len(reports) == 1 and reports[0].compressed
    assert 0.01 < sum(r.from_draft for r in mine) / n < 0.8
    assert [r.generation_tokens for r in mine] == list(range(1, n + 1))
    assert {r.prompt_tokens for r in mine} == {100} and len({r.prompt_tps for r in mine}) == 1
    assert [r.finish_reason for r in mine[-2:]] == [None, "length"]


@pytest.mark.parametrize("n", [1, 5, 6])
def test_answers_that_end_when_drafting_would_start(main, draft, tokenizer, n):
    mine = list(stream_generate(main, tokenizer, PROMPT, n, draft, policy=LOOKING))
    assert said(mine) == said(stream_generate(main, tokenizer, PROMPT, n, policy=LOOKING))
    assert mine[-1].finish_reason == "length" and mine[-1].generation_tokens == n


def test_processors_see_the_whole_text(main, draft, tokenizer):
    def never_again(tokens, logits):
        return mx.where(mx.zeros(logits.shape[-1]).at[tokens].add(1) > 0, -1e9, logits)

    options = {"policy": LOOKING, "logits_processors": [never_again]}
    expected = list(stream_generate(main, tokenizer, PROMPT, 40, **options))
    mine = list(stream_generate(main, tokenizer, PROMPT, 40, draft, **options))
    assert said(mine) == said(expected)
    assert not {*said(mine)} & set(PROMPT)


@pytest.mark.parametrize("keywords", [{}, {"snapkv": {}}, {"policy": "keydiff:budget=400"}])
def test_without_compression_answers_equal_mlx_lms(main, draft, tokenizer, keywords):
    theirs = list(mlx_generate.stream_generate(main, tokenizer, PROMPT, 20, draft))
    mine = list(stream_generate(main, tokenizer, PROMPT, 20, draft, **keywords))
    assert [(r.token, r.from_draft) for r in mine] == [(r.token, r.from_draft) for r in theirs]
    assert all(mx.array_equal(a.logprobs, b.logprobs) for a, b in zip(mine, theirs))


def test_a_failure_before_the_compression_leaves_the_callers_caches_alone(main, draft, tokenizer):
    def fail(done, total):
        raise RuntimeError("stop")

    caches = make_prompt_cache(main) + make_prompt_cache(draft)
    before = list(caches)
    options = {"prompt_cache": caches, "prompt_progress_callback": fail}
    with pytest.raises(RuntimeError, match="stop"):
        list(stream_generate(main, tokenizer, PROMPT, 20, draft, policy=LOOKING, **options))
    assert all(a is b and a.empty() for a, b in zip(caches, before))


@pytest.mark.parametrize(
    "keywords, message",
    [
        *(
            ({"policy": policy}, f"cache that only grows after the prompt, and {name}:.* goes on evicting: use snapkv")
            for policy, name in ((RING, "snapkv"), (KEYDIFF, "keydiff"), ("h2o:budget=40", "h2o"),
                                 ("tova:budget=40,schedule=once", "tova"), (f"{KEYDIFF} then {RING}", "snapkv"))
        ),
        ({"policy": LOOKING, "kv_bits": 8}, "kv_bits"),
        ({"policy": LOOKING, "max_tokens": -1}, "max_tokens must be at least 1"),
        ({"policy": LOOKING, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"policy": LOOKING, "prompt_cache": [KVCache(), KVCache()]}, "caches of both models, 2 [+] 2, got 2"),
        ({"policy": LOOKING, "draft_model": make_qwen()}, "the draft model \\("),
        ({"model": make_qwen()}, r"main model \(qwen3_next\) has layers with ArraysCache"),
        ({"model": make_qwen(), "policy": LOOKING}, r"main model \(qwen3_next\) has layers with ArraysCache"),
        ({"prompt_cache": [RotatingKVCache(64), RotatingKVCache(64)]}, "layers with RotatingKVCache"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_exact_are_refused_at_the_call(
    main, draft, tokenizer, keywords, message
):
    options = {"model": main, "draft_model": draft} | keywords
    prompt = [token % 64 for token in PROMPT]  # every model here knows these ids
    with pytest.raises(SnapKVError, match=message):
        stream_generate(tokenizer=tokenizer, prompt=prompt, **options)


def test_a_given_cache_that_evicts_is_refused_and_one_that_grows_is_continued(
    main, draft, tokenizer
):
    for policy in (KEYDIFF, RING):
        cache, _ = prefill(main, PROMPT[:-1], policy)
        options = {"prompt_cache": cache + make_prompt_cache(draft), "num_draft_tokens": 3}
        with pytest.raises(SnapKVError, match="can't continue from a prompt cache that evicts"):
            stream_generate(main, tokenizer, PROMPT[-1:], 20, draft, **options)
    answers = []
    for drafts in (None, draft):
        cache, _ = prefill(main, PROMPT[:-1], SNAPKV)
        options = {"prompt_cache": cache + (make_prompt_cache(draft) if drafts else [])}
        answers.append(said(stream_generate(main, tokenizer, PROMPT[-1:], 20, drafts, **options)))
        assert not any(c.is_trimmable() for c in cache)
    assert answers[0] == answers[1]
