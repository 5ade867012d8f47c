"""Edge cases of requests: prompts of a few tokens, answers of one token, misused arguments."""

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import filled_cache
from tiny_models import make_llama, make_qwen

from mlx_snapkv import (
    BlockKVCache,
    Conversation,
    SnapKVError,
    compress_prompt_cache,
    generate_step,
    prefill,
)
from mlx_snapkv.caches.adapter import layer_cache
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.engine import request as request_module
from mlx_snapkv.engine.prefill import mlx_generate
from mlx_snapkv.planning.settings import resolve_compress
from mlx_snapkv.sparse.options import PAGE_SIZE

SMALL = "n_sink=1,n_window=4,obs_window=4,pool_kernel=3"
FEW = f"snapkv:budget=6,{SMALL}"
SNAPKV = f"{FEW},lookahead=4"
SHORT = [
    f"{SNAPKV},on_full=slide",
    "snapkv:budget=3,n_sink=0,lookahead=4",
    f"{FEW},lookahead=9",
    "snapkv:budget=90%,n_sink=0,n_window=4,obs_window=4,lookahead=4",
    f"{FEW},schedule=block,block=3",
    "h2o:budget=4,n_window=2,schedule=once",
    "keydiff:budget=25%,block=2",
    "keydiff:budget=5,n_window=0,block=2",
    f"h2o:budget=12,n_window=1,block=1 then {FEW},lookahead=6",
]


def assert_told(report):
    """Assert that entries were evicted, or that the report gives a reason why not."""
    assert report.compressed or report.reason
    if report.compressed:
        assert 0 < report.entries <= report.prompt_tokens


@pytest.mark.parametrize(
    ("tiny_model", "policy"),
    [*((make_llama, policy) for policy in SHORT), *((make_qwen, SHORT[i]) for i in (0, 4, -1))],
    indirect=["tiny_model"],
)
def test_a_prompt_of_a_few_tokens_is_served(tiny_model, tokens, policy):
    for n in (1, 4, 40):
        reports = []
        cache, report = prefill(tiny_model, tokens[:n], policy)
        list(generate_step(tokens[:3], tiny_model, max_tokens=4, prompt_cache=cache))
        options = {"policy": policy, "on_report": reports.append, "max_tokens": 10}
        assert len(list(generate_step(tokens[:n], tiny_model, **options))) == 10
        for each in (report, *reports):
            assert_told(each)
            if each.reason is not None and "a share" in each.reason:
                assert "is less than one entry of this prompt" in each.reason


SPARSE = [
    "budget=6,n_sink=1,n_window=4",
    "top_k=1,n_sink=0,n_window=1",
    "budget=90%,n_window=50%,read=dense",
    f"budget=6,n_sink=40,read_top_k={PAGE_SIZE}",
    "budget=25%,residual=none",
]


@pytest.mark.parametrize("sparse", SPARSE)
@pytest.mark.parametrize("store", ["memory", "file"])
def test_a_prompt_of_a_few_tokens_is_served_with_sparse_attention(
    tiny_model, tokens, sparse, store
):
    for n in (1, 9):
        reports, cache = [], make_prompt_cache(tiny_model)
        options = {"sparse": f"{sparse},store={store}", "on_report": reports.append}
        options |= {"prompt_cache": cache, "max_tokens": 3}
        for turn in (tokens[:n], tokens[:1], tokens[:n]):
            assert len(list(generate_step(turn, tiny_model, **options))) == 3
        for report in reports:
            assert report.reason or 0 < report.entries <= report.prompt_tokens
            assert report.compressed == (report.read_per_token is not None)
        assert reports[-1].prompt_tokens >= n


@pytest.mark.parametrize(
    "how",
    [{"policy": p} for p in SHORT] + [{"sparse": sparse} for sparse in SPARSE],
    ids=str,
)
def test_turns_of_a_few_tokens_are_served(demo_llama, how):
    talk = Conversation(*demo_llama, max_tokens=7, **how)
    for text in ("a", "And the blue one, what is it called?", "b"):
        assert list(talk.send(text))
        assert_told(talk.report)


def positions(model, cache):
    layers = attention_layers(model, cache)
    return [np.array(layer.layer_cache_in(cache).held().positions) for layer in layers]


@pytest.mark.parametrize(
    "policy", [SNAPKV, f"keydiff:budget=20,block=8 then {SNAPKV}", "tova:budget=20,schedule=once"]
)
def test_a_policy_may_be_a_string_and_only_queries_of_its_window_vote(tiny_model, tokens, policy):
    obs_window = resolve_compress(policy=policy).decode_policy.obs_window
    kept = []
    for n in (obs_window, 4 + obs_window, 100):
        cache, queries = filled_cache(tiny_model, tokens, n)
        report = compress_prompt_cache(tiny_model, cache, policy, queries=queries)
        assert report.compressed and report.policy == str(resolve_compress(policy=policy))
        kept.append(positions(tiny_model, cache))
    assert all(np.array_equal(a, b) for other in kept[1:] for a, b in zip(kept[0], other))


def test_embeddings_on_a_block_cache_are_refused_at_the_call(tokens):
    model = make_llama()
    cache, _ = prefill(model, tokens, "keydiff:budget=20,block=8")
    embeddings = model.model.embed_tokens(tokens[:9])
    with pytest.raises(SnapKVError, match="input_embeddings can't continue from a prompt cache"):
        generate_step(tokens[:9], model, input_embeddings=embeddings, prompt_cache=cache)


def test_embeddings_are_left_to_mlx_lm_with_a_progress_callback(tokens):
    model, done = make_llama(), []
    options = {
        "max_tokens": 4,
        "input_embeddings": model.model.embed_tokens(tokens),
        "prompt_progress_callback": lambda *at: done.append(at),
    }
    expected = [token for token, _ in mlx_generate.generate_step(tokens, model, **options)]
    options["policy"] = SNAPKV
    assert [token for token, _ in generate_step(tokens, model, **options)] == expected
    assert done[: len(done) // 2] == done[len(done) // 2 :]


AHEAD = f"{FEW},lookahead=5"


@pytest.mark.parametrize("n", [1, 4])
def test_an_answer_that_ends_before_the_compression_costs_no_selection(
    tiny_model, tokens, n, monkeypatch
):
    monkeypatch.delattr(request_module, "choose_entries")
    reports = []
    options = {"max_tokens": n, "policy": AHEAD, "on_report": reports.append}
    assert len(list(generate_step(tokens, tiny_model, **options))) == n
    (report,) = reports
    assert not report.compressed and "ended before" in report.reason


def test_a_short_answer_after_block_prefill_reports_that_it_read_the_kept_entries(
    tiny_model, tokens
):
    reports = []
    policy = f"keydiff:budget=20,block=8 then {AHEAD}"
    options = {"max_tokens": 4, "policy": policy, "on_report": reports.append}
    assert len(list(generate_step(tokens, tiny_model, **options))) == 4
    (report,) = reports
    assert "the entries that prefill had kept" in report.reason


@pytest.mark.parametrize("n_read", [0, 1, 9])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("policy", [AHEAD, "keydiff:budget=20,block=8"])
def test_there_is_one_report_however_many_tokens_are_taken(tokens, n_read, given, policy):
    model, reports = make_llama(), []
    options = {"prompt_cache": make_prompt_cache(model)} if given else {}
    options |= {"policy": policy, "on_report": reports.append, "max_tokens": 9}
    answer = generate_step(tokens, model, **options)
    for _ in range(n_read):
        next(answer)
    answer.close()
    ahead = max(1, resolve_compress(policy=policy).decode_policy.lookahead)
    # A caller who takes no token, or stops before the compression and gave no cache, gets no report.
    assert len(reports) == (1 if n_read >= ahead or (given and n_read) else 0)
    if given:
        is_cut = [layer_cache(c).is_compressed for c in options["prompt_cache"]]
        assert is_cut == [n_read > 0] * 2 and all(report.compressed for report in reports)


@pytest.mark.parametrize(
    "policy",
    [
        "tova:budget=20,n_window=1,block=8,min_ctx=80",
        "h2o:budget=20,n_window=1,block=8,min_ctx=80",
        f"snapkv:budget=20,{SMALL},lookahead=4,min_ctx=80,schedule=block,block=3",
        f"tova:budget=20,n_window=1,block=8,min_ctx=80 then {SNAPKV}",
    ],
)
def test_turns_after_an_uncompressed_one_hold_the_budget_and_a_block(
    demo_llama, policy, monkeypatch
):
    """In the second turn, the first turn's entries have no votes yet. From then on, queries of the last answer vote."""
    chosen, compressed, held = resolve_compress(policy=policy), [], []
    append = BlockKVCache.append

    def watched(self, keys, values):
        append(self, keys, values)
        held.append(self.n_entries)

    talk = Conversation(*demo_llama, policy=policy, max_tokens=7)
    for n in (15, 60, 20, 20):
        list(talk.send("word " * n))
        compressed.append(talk.report.compressed)
        if len(compressed) == 2:
            monkeypatch.setattr(BlockKVCache, "append", watched)
    assert compressed == [False, True, True, True]
    decode_policy = chosen.decode_policy
    assert 20 < max(held) <= 20 + max(decode_policy.block, decode_policy.lookahead, 1)
