"""SnapKV's votes, pooling and options, and the ways to name a policy in a request."""

import numpy as np
import pytest
import reference
from entry_helpers import asked, make_entries, votes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_snapkv import SnapKV, SnapKVError
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.entries.quota import Quota
from mlx_snapkv.planning.settings import resolve_compress


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize(
    "options, n_sink, n_window",
    [({"top_k": 5, "n_sink": 4, "n_window": 8}, 4, 8), ({"budget": 4, "n_sink": 4}, 1, 1)],
)
def test_votes_of_sink_and_window_are_not_pooled_into_the_middle(pool, options, n_sink, n_window):
    """A budget that is too small for the sink shrinks it."""
    entries = make_entries(n=6)
    policy = SnapKV(**options, obs_window=6, pool_kernel=5, pool=pool)
    middle = slice(n_sink, -n_window)
    scores, expected = np.asarray(policy.score(entries)), votes_of(entries)
    for head in range(2):
        expected[0, head, middle] = reference.pool(expected[0, head, middle], pool, 5)
    assert np.allclose(scores, expected, atol=1e-5)


@settings(max_examples=30)
@given(
    n_voters=st.sampled_from([1, 20, 32, 33, 36, 50, 64, 65, 69, 90]),
    kernel=st.integers(1, 20),
    n_sink=st.integers(0, 6),
    n_window=st.integers(1, 30),
    beyond=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_forward_scores_equal_the_reference(n_voters, kernel, n_sink, n_window, beyond, seed):
    entries = make_entries(T=100, n=n_voters, seed=seed)
    places, queries = range(100 + beyond - n_voters, 100 + beyond), 4 * entries.queries
    entries.voting_queries = Queries(queries, places, 8**-0.5)
    policy = SnapKV(pool_kernel=kernel, n_sink=n_sink, n_window=n_window)
    ends = (n_sink, n_window)
    expected = reference.forward_scores(*asked(entries), beyond, ends, kernel)
    assert np.allclose(policy.score(entries), expected, atol=1e-6)


def test_the_unpooled_window_is_a_share_of_the_budget():
    """Without a quota, the policy uses the window of its own budget."""
    entries = make_entries(T=200, n=6)
    policy = SnapKV(budget="30%", pool="avg", pool_kernel=3)
    for quota, n_window in ((None, 15), (Quota(100, 4, 40), 40)):
        entries.quota = quota
        raw = np.isclose(policy.score(entries), votes_of(entries), atol=1e-7).all(axis=(0, 1))
        assert raw[-n_window:].all() and not raw[-n_window - 3 : -n_window].any()


# Options


WINDOW_RANGE = 'n_window must be a whole number of entries of at least 1 or a share such as "25%"'


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"top_k": True}, "top_k must be a whole number of at least 0, got True"),
        ({"top_k": 10**12}, "top_k must be at most 2147483647, got 1000000000000"),
        ({"top_k": 2**31 - 1}, "budget must be at most 2147483647, got 2863311534"),
        ({"n_window": 0}, f"{WINDOW_RANGE}, got 0"),
        ({"pool": "avg", "pool_kernel": 4}, "pool_kernel must be odd with pool=avg, got 4"),
        ({"pool_kernel": 257}, "pool_kernel must be a whole number of 1 to 255, got 257"),
        ({"pool": "mean"}, "pool must be forward, avg or max, got 'mean'"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(SnapKVError) as error:
        resolve_compress(snapkv=options)
    assert str(error.value) == f"snapkv option {message}"


def test_strings_dicts_and_objects_name_the_same_policy():
    policy = SnapKV(top_k=64, pool_kernel=7, lookahead=0, prefill_chunk=256)
    text = "top_k=64, pool_kernel=7,lookahead=0,prefill_chunk=256"
    assert resolve_compress(snapkv=policy).policy is policy
    same = [{"snapkv": text}, {"policy": f"snapkv:{text}"}, {"policy": str(policy)}]
    assert all(resolve_compress(**keywords) == Compress(policy) for keywords in same)
    for default in ({"snapkv": {}}, {"policy": "snapkv"}):
        assert resolve_compress(**default) == Compress(SnapKV())
    assert resolve_compress() is None


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"snapkv": {}, "policy": "snapkv"}, "give only one"),
        ({"policy": "snapvk"}, "unknown policy 'snapvk'.*known: snapkv"),
        ({"snapkv": "top_k"}, "written key=value"),
        ({"snapkv": "top_k=1,top_k=2"}, "top_k is given twice"),
        (
            {"snapkv": "top_k=64,budget=100"},
            "^snapkv options top_k and budget say the same: give only one$",
        ),
        ({"policy": "snapkv:budget=25%,top_k=64"}, "options top_k and budget say the same"),
        ({"snapkv": {1: 2}}, "unknown snapkv option '1'"),
        ({"snapkv": {"topk": 4}}, r"'topk' \(did you mean 'top_k'\?\); known: top_k, n_sink"),
        ({"snapkv": 4}, "^snapkv must be a SnapKV object, a dict or a string, got int$"),
        ({"policy": 4}, "^policy must be a policy object or a string, got int$"),
        ({"policy": "keydiff then tova then snapkv"}, "must be one policy or two"),
    ],
)
def test_unusable_names_of_policies_are_refused(keywords, message):
    with pytest.raises(SnapKVError, match=message):
        resolve_compress(**keywords)
