"""A request's plan: requests follow it, commands print it, and computing it changes nothing."""

import dataclasses

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model

from mlx_snapkv import SnapKVError, Sparse, generate_step, plan_memory
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import NO_POLICY_REASON, plan_request
from mlx_snapkv.planning.settings import setting_named

N = 1200
SPARSE = "sparse:budget=400,n_sink=4,n_window=32,read_top_k=32,when=always"
TOKENS = mx.arange(N) % 90


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


def config(method, **more):
    return CompressionConfig(setting_named(method), **more)


@pytest.mark.parametrize(
    "method",
    [
        SPARSE,
        f"{SPARSE},store=file",
        "snapkv:budget=64,lookahead=2",
        "keydiff:budget=96,block=32 then snapkv:budget=64",
    ],
)
def test_a_request_follows_its_plan(llama, method):
    how, reports = config(method), []
    plan = plan_request(llama, how, N)
    given = {"sparse": how.sparse} if how.sparse else {"policy": how.compress}
    list(generate_step(TOKENS, llama, max_tokens=6, on_report=reports.append, **given))
    (report,) = reports
    assert report.entries == plan.decode_quota.entries
    if how.sparse:
        assert report.read_per_chunk <= plan.sparse_reading.last_reach.max_read


@pytest.mark.parametrize(
    "options, chooses",
    [
        ("", False),
        ("store=8bit", False),
        ("store=file", True),
        ("read_top_k=64", True),
        ("read=sparse", True),
        ("store=file,read=dense", False),
        ("read_top_k=64,read=dense", False),
    ],
)
def test_chunks_choose_only_if_entries_are_in_files_or_the_user_asks_for_it(
    llama, options, chooses
):
    plan = plan_request(llama, config(f"sparse:{options}".rstrip(":")), 2 * N)
    assert (plan.sparse_reading is not None) == chooses


def test_a_chunk_that_may_choose_little_still_chooses(llama):
    """A share of less than a page counts as one page, because zero pages would mean that the chunk reads everything."""
    how = config("sparse:budget=400,read_top_k=0.1%")
    reading = plan_request(llama, how, 2 * N).sparse_reading
    assert reading.reach.n_chosen == 16 and reading.n_before_choice < N


@pytest.mark.parametrize(
    "n_prompt, from_memory, from_files",
    [(10_000, 16_384, 4096), (200_000, 16_384, 16_384), (1 << 20, 32_768, 32_768)],
)
def test_the_last_tokens_choose_no_more_entries_from_files_than_from_memory(
    n_prompt, from_memory, from_files
):
    reach = Sparse().reach(n_prompt)
    assert reach.for_last_tokens(in_files=False).n_chosen == from_memory
    assert reach.for_last_tokens(in_files=True).n_chosen == from_files


def test_planning_changes_nothing(llama):
    cache = make_prompt_cache(llama)
    before, classes = list(cache), [type(x) for x in llama.modules()]
    plan = plan_request(llama, config("snapkv:budget=64"), N, cache)
    assert plan == plan_request(llama, config("snapkv:budget=64"), N, cache)
    assert all(a is b and a.empty() for a, b in zip(cache, before))
    assert [type(x) for x in llama.modules()] == classes
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.reason = "another"


def test_a_plan_says_why_a_prompt_is_left_to_mlx_lm(llama):
    held = make_prompt_cache(llama)
    llama(TOKENS[None, :8], cache=held)
    snapkv = config("snapkv:budget=64")
    assert plan_request(llama, CompressionConfig(), N).reason == NO_POLICY_REASON
    assert "fit the budget of 64" in plan_request(llama, snapkv, 50).reason
    assert "already holds tokens" in plan_request(llama, snapkv, N, held).reason
    assert "as embeddings" in plan_request(llama, snapkv, N, is_embedded=True).reason
    turn = plan_request(llama, config("snapkv:budget=64", turns=True), 92, held)
    assert turn.reason is None and (turn.n_earlier, turn.n_prompt) == (8, 100)


def test_an_unsupported_policy_is_refused_by_both_kinds_of_plans():
    model = make_model("gemma2")
    expected = "expected_attention:budget=64"
    with pytest.raises(SnapKVError, match="cap their logits, such as model type 'gemma2'"):
        plan_request(model, config(expected), N)
    with pytest.raises(SnapKVError, match="cap their logits"):
        plan_memory(model, N, expected)
