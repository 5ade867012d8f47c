"""What is decided about a request before it runs: readers do it, commands tell it, and nothing is changed by asking."""

import dataclasses

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model

from mlx_snapkv import SnapKVError, generate_step, plan_memory
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.long_prompts import LongPrompts
from mlx_snapkv.planning.memory_plan import Planner
from mlx_snapkv.planning.request_plan import NO_POLICY_REASON, plan_request
from mlx_snapkv.policies import method_named
from mlx_snapkv.policies.budgets import Quota

N, LENGTH = 1200, 256
SPARSE = "sparse:budget=400,n_sink=4,n_window=32,read_top_k=32"
TOKENS = mx.arange(N) % 90


@pytest.fixture(scope="module")
def short():
    """A model that was trained to but a few tokens."""
    model = make_model("llama")
    model.args.max_position_embeddings = LENGTH
    return model


def config(method, **more):
    return CompressionConfig(method_named(method), **more)


@pytest.mark.parametrize(
    "method, memory",
    [
        (SPARSE, "recall"),
        (SPARSE, "recall:file"),
        ("snapkv:budget=64,lookahead=2", "drop"),
        ("snapkv:budget=64", "recall"),
        ("keydiff:budget=96,block=32 then snapkv:budget=64", "drop"),
    ],
)
def test_a_request_does_what_is_planned(short, method, memory):
    how, reports = config(method, memory=memory), []
    plan = plan_request(short, how, N)
    given = {"sparse": how.policy} if how.is_sparse else {"policy": how.policy}
    list(
        generate_step(TOKENS, short, max_tokens=6, memory=memory, on_report=reports.append, **given)
    )
    (report,) = reports
    assert report.pulled_to == plan.compacted_to
    assert report.entries == plan.decode_quota.entries
    if how.is_sparse:
        assert report.read_per_chunk <= plan.sparse_reading.last.most


@pytest.mark.parametrize(
    "method, more, words",
    [
        (None, {"memory": "recall"}, "without a policy it is decoded from all"),
        ("snapkv:budget=64", {"far": "pull"}, "far=pull needs sparse attention, or a policy that"),
    ],
)
def test_no_plan_is_made_of_what_can_not_be(short, method, more, words):
    with pytest.raises(SnapKVError, match=words):
        policy = method and method_named(method)
        plan_request(short, CompressionConfig(policy, **more), N)


def test_beyond_the_trained_length_what_is_read_at_once_is_half_of_it(short):
    """A chunk is at most a quarter; counts of memory and lines before reading say no more than that."""
    plan = plan_request(short, config(SPARSE), N)
    assert plan.compacted_to == LENGTH
    assert plan.decode_quota == Quota(128, 4, 32)
    assert plan.chunk_size(2048) == 64
    reading = plan.sparse_reading
    assert reading.near == 192 and max(reading.reach.most, reading.last.most) <= 128
    told = LongPrompts(short, policy=plan.policy).foretold(N)
    assert "a token of the answer at most 128; all" in told
    near = plan_request(short, config(SPARSE, far="keep"), N)
    assert near.compacted_to is None and near.chunk_size(2048) == 512
    assert near.decode_quota.entries == 400
    planner = Planner(short)
    assert planner.counted(plan)[0].reading < planner.counted(near)[0].reading


def test_a_chunk_that_may_choose_little_still_chooses(short):
    """A share of less than a page is a page; none would mean that everything is read."""
    how = config("sparse:budget=400,read_top_k=0.1%", memory="recall")
    reading = plan_request(make_model("llama"), how, 2 * N).sparse_reading
    assert reading.reach.n_chosen == 16 and reading.n_before < N


def test_asking_changes_nothing(short):
    cache = make_prompt_cache(short)
    before, classes = list(cache), [type(x) for x in short.modules()]
    plan = plan_request(short, config("snapkv:budget=64"), N, cache)
    assert plan == plan_request(short, config("snapkv:budget=64"), N, cache)
    assert all(a is b and a.empty() for a, b in zip(cache, before))
    assert [type(x) for x in short.modules()] == classes
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.reason = "another"


def test_why_a_prompt_is_left_to_mlx_lm(short):
    held = make_prompt_cache(short)
    short(TOKENS[None, :8], cache=held)
    snapkv = config("snapkv:budget=64")
    assert plan_request(short, CompressionConfig(), N).reason == NO_POLICY_REASON
    assert "fit the budget of 64" in plan_request(short, snapkv, 50).reason
    assert "already holds tokens" in plan_request(short, snapkv, N, held).reason
    assert "as embeddings" in plan_request(short, snapkv, N, is_embedded=True).reason
    turn = plan_request(short, config("snapkv:budget=64", turns=True), 92, held)
    assert turn.reason is None and (turn.n_held, turn.n_prompt) == (8, 100)


def test_what_cant_be_served_cant_be_counted_either():
    model = make_model("gemma2")
    expected = "expected_attention:budget=64"
    with pytest.raises(SnapKVError, match="cap their logits, such as model type 'gemma2'"):
        plan_request(model, config(expected), N)
    with pytest.raises(SnapKVError, match="cap their logits"):
        plan_memory(model, N, expected)
