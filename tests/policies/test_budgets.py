import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv import KeyDiff, SnapKV, SnapKVError
from mlx_snapkv.policies.budgets import Quota, layer_entries, shared_out, smallest_for_share


@given(st.integers(1, 5000), st.integers(1, 60), st.integers(0, 100))
def test_a_pyramid_falls_and_keeps_the_mean(mean, n_layers, least):
    rows = layer_entries(f"pyramid:{mean}", 10_000, n_layers, min(least, mean))
    assert rows == sorted(rows, reverse=True)
    assert min(rows) >= min(least, mean)
    assert abs(sum(rows) - mean * n_layers) <= n_layers


def test_pyramid_by_hand():
    """Top layer 100 / 20, bottom layer 200 - 5, linear between."""
    assert layer_entries("pyramid:100", 1000, 3, 0) == [195, 100, 5]
    assert layer_entries("pyramid:10%", 1000, 3, 50) == [150, 100, 50]


@pytest.mark.parametrize(
    "budget, rows", [(300, 300), ("25%", 250), ("12.5%", 125), ("pyramid:25%", 250), ("100%", 1000)]
)
def test_mean_rows_of_a_prompt(budget, rows):
    quotas = KeyDiff(budget=budget).quotas(1000, 5)
    assert quotas[2] == Quota(rows, 0, rows // 10)


@pytest.mark.parametrize(
    "budget", [0, -1, 1.5, True, "", "0%", "101%", "x%", "nan%", "pyramid:", "5"]
)
def test_a_bad_budget_is_one_sentence(budget):
    with pytest.raises(
        SnapKVError, match="keydiff option budget must be a whole number of entries"
    ):
        KeyDiff(budget=budget)


def test_a_share_without_room_is_refused_when_the_prompt_is_known():
    policy = SnapKV(budget="25%")
    with pytest.raises(SnapKVError, match=r"at least 640 .*, got 500 entries"):
        policy.quotas(2000, 4)
    assert policy.quotas(4000, 4)[0].entries == 1000
    with pytest.raises(SnapKVError, match=r"at least 1 .*, got 0 entries"):
        KeyDiff(budget="25%").quotas(3, 4)


def test_every_layer_keeps_an_entry():
    assert [quota.entries for quota in KeyDiff(budget="pyramid:5").quotas(2000, 3)] == [9, 5, 1]


def test_snapkvs_budget_and_top_k_say_the_same():
    assert SnapKV(budget=1024) == SnapKV(top_k=1024 - 640)
    assert str(SnapKV(budget=1024)) == "snapkv:top_k=384"
    assert SnapKV(top_k=100).budget == 740
    assert str(SnapKV(budget="25%")) == "snapkv:budget=25%"


@given(st.floats(0.01, 1), st.integers(0, 5), st.integers(1, 6), st.integers(0, 1000))
def test_mass_keeps_the_fewest_rows_that_reach_it(mass, n_sink, n_window, seed):
    rng = np.random.default_rng(seed)
    votes = rng.exponential(size=(2, 40)) ** 3
    scores = votes + rng.normal(size=votes.shape) * 0.1
    votes, scores = (np.float32(x) for x in (votes, scores))
    found = smallest_for_share(
        mx.array(scores[None]), mx.array(votes[None]), Quota(40, n_sink, n_window), mass
    )
    expected = reference.smallest_mass(scores, votes, n_sink, n_window, mass)
    if found.entries != expected:  # rounding may decide one row, and nothing but rounding
        kept = [
            votes[
                h,
                reference.select(
                    scores[h], n_sink, min(found.entries, expected) - n_sink - n_window, n_window
                ),
            ]
            for h in (0, 1)
        ]
        assert np.sum(kept) / votes.sum() == pytest.approx(mass, abs=1e-5)


def test_mass_stays_within_max_budget():
    votes = mx.ones((1, 1, 1000))
    assert smallest_for_share(votes, votes, Quota(100, 4, 8), 0.99).entries == 100
    assert smallest_for_share(votes, votes, Quota(1000, 4, 8), 0.5).entries == 500
    assert SnapKV(mass=0.9, max_budget="50%").quotas(4000, 2)[1].entries == 2000


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 50),
    st.sampled_from([0, 1]),
)
def test_an_adaptive_budget_is_shared_out_by_one_ranking(lengths, heads, seed, levels):
    """Each layer gets the mean over its heads of how many of the best of all are theirs, to the rounding."""
    rng = np.random.default_rng(seed)
    sink, window = 2, 3
    scores = [rng.random((1, heads, n + sink + window)) for n in lengths]
    if levels:  # many ties
        scores = [np.round(s) for s in scores]
    free = sum(rng.integers(0, n + 1) for n in lengths)
    given_each = [sink + window + free // len(lengths)] * len(lengths)
    given_each[0] += free % len(lengths)
    quotas = [Quota(n, sink, window) for n in given_each]
    found = shared_out([mx.array(s) for s in scores], quotas)
    assert all((q.n_sink, q.n_window) == (sink, window) for q in found)
    voted = [q.entries - sink - window for q in found]
    assert sum(voted) == min(free, sum(lengths)) and all(
        0 <= n <= most for n, most in zip(voted, lengths)
    )
    if levels or not free:
        return
    every = sorted((x for s in scores for x in s[..., sink:-window].ravel()), reverse=True)
    best = every[free * heads - 1]
    for n, s in zip(voted, scores):
        assert abs(n - (s[..., sink:-window] >= best).sum() / heads) <= 1
