import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlx_snapkv import KeyDiff, SnapKV, SnapKVError, StreamingLLM
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.compress.policies import policy_named
from mlx_snapkv.entries.quota import Quota
from mlx_snapkv.planning.prompt_plan import reason_to_leave


@pytest.mark.parametrize("budget", [0, 1.5, True, "", "0%", "101%", "x%", "nan%", "pyramid:5", "5"])
def test_a_bad_budget_is_one_sentence(budget):
    with pytest.raises(SnapKVError, match="keydiff option budget must be a whole number of entr"):
        KeyDiff(budget=budget)
    with pytest.raises(SnapKVError, match="budget=25% is less than one entry of this prompt"):
        KeyDiff(budget="25%").quota(3)


@pytest.mark.parametrize(
    "policy, n, kept",
    [
        (SnapKV(budget="25%"), 16, Quota(4, 1, 1)),
        (SnapKV(budget=64, n_window=128), 1000, Quota(64, 1, 31)),
        (SnapKV(budget=64, n_sink=32, n_window=32), 1000, Quota(64, 32, 32)),
        (SnapKV(budget=2, n_sink=2, n_window=9), 1000, Quota(2, 0, 1)),
        (KeyDiff(budget=6, n_sink=9, n_window=0), 1000, Quota(6, 3, 0)),
        (StreamingLLM(budget=3), 1000, Quota(3, 1, 2)),
    ],
)
def test_sink_and_window_shrink_to_half_of_a_budget_that_is_smaller(policy, n, kept):
    assert policy.quota(n) == kept
    assert reason_to_leave(Compress(policy), n, None) is None


def test_two_stages_share_a_small_budget():
    compress = Compress.from_string("keydiff:budget=20 then snapkv:budget=40,n_sink=4,n_window=36")
    assert compress.prefill_quota(1000) == Quota(20, 1, 9)


def test_snapkvs_budget_follows_from_top_k_and_vice_versa():
    assert SnapKV(budget=1023) == SnapKV(top_k=1023 - 4 - 255)
    assert SnapKV(top_k=100).budget == 138  # 4 + 100 + 34
    assert SnapKV(top_k=100, n_sink=2, n_window=30).budget == 132
    # 764 is also the top_k of budget=1024, but budget=1023 is the smallest budget with it.
    for budget, said in ((1023, "top_k=764"), (1024, "budget=1024"), ("25%", "budget=25%")):
        assert str(SnapKV(budget=budget)) == f"snapkv:{said}"


shares = st.integers(1, 99).map("{}%".format)


@given(st.integers(1, 5000), st.integers(0, 200), shares)
def test_top_k_gives_the_smallest_budget_with_this_top_k(top_k, n_sink, share):
    policy = SnapKV(top_k=top_k, n_sink=n_sink, n_window=share)
    for budget, enough in ((policy.budget, True), (policy.budget - 1, False)):
        assert (budget - n_sink - int(share[:-1]) * budget // 100 >= top_k) == enough
    assert policy.top_k == top_k


@given(st.integers(1, 5000), st.integers(0, 200), shares)
def test_a_policy_is_parsed_back_from_its_name(budget, n_sink, share):
    assume(budget >= max(1, n_sink + int(share[:-1]) * budget // 100))
    policy = SnapKV(budget=budget, n_sink=n_sink, n_window=share)
    assert policy.budget == budget and policy_named(str(policy)) == policy


def test_a_window_of_the_whole_budget_leaves_no_voted_entries():
    with pytest.raises(SnapKVError, match="n_window must be less than all of the budget, got"):
        SnapKV(n_window="100%")
    assert SnapKV(budget=100, n_sink=0, n_window="100%").top_k == 0


@pytest.mark.parametrize("n_window, n", [("25%", 250), (64, 64)])
def test_a_window_is_a_share_of_the_budget(n_window, n):
    assert SnapKV(budget="25%", n_window=n_window).quota(4000) == Quota(1000, 4, n)


def test_a_growing_answer_needs_no_window():
    assert SnapKV(budget=3, n_sink=0).quota(100) == Quota(3, 0, 0)
    with pytest.raises(SnapKVError, match="n_window must be at least 1 entry with schedule=once"):
        SnapKV(budget=3, n_sink=0, on_full="slide")
