import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv import SnapKV, SnapKVError
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.policies import resolve_policy
from mlx_snapkv.policies.snapkv import pool_votes


def test_average_pooling_by_hand():
    pooled = pool_votes(mx.array([3.0, 0, 0, 6, 0]), "avg", 3)
    assert pooled.tolist() == [1, 1, 2, 2, 2]


def test_max_pooling_by_hand():
    pooled = pool_votes(mx.array([3.0, 0, 0, 6, 1]), "max", 3)
    assert pooled.tolist() == [3, 3, 6, 6, 6]


def test_forward_pooling_by_hand():
    pooled = pool_votes(mx.array([3.0, 0, 0, 6, 0]), "forward", 2)
    assert pooled.tolist() == [1.5, 1.5, 0, 3, 3]


@given(
    st.lists(st.floats(0, 10, width=32), min_size=1, max_size=30),
    st.sampled_from(["avg", "max", "forward"]),
    st.sampled_from([1, 3, 5, 13]),
)
def test_pooling_equals_the_reference(row, kind, kernel):
    assert np.allclose(
        pool_votes(mx.array(row), kind, kernel), reference.pool(row, kind, kernel), atol=1e-5
    )


def make_entries(T=60, seed=0):
    rng = np.random.default_rng(seed)
    keys = mx.array(rng.normal(size=(1, 2, T, 8)).astype(np.float32))
    queries = mx.array(rng.normal(size=(1, 4, 6, 8)).astype(np.float32))
    return Entries(keys, keys, Queries(queries, range(T - 6, T), 8**-0.5))


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_votes_of_rows_kept_anyway_do_not_leak_into_the_middle(pool):
    entries = make_entries()
    policy = SnapKV(top_k=5, n_sink=4, n_window=8, obs_window=6, pool_kernel=5, pool=pool)
    raw = reference.votes(
        entries.queries, entries.keys, entries.observed.places, entries.observed.scale
    )
    scores = np.asarray(policy.score(entries))
    for head in range(2):
        assert np.allclose(
            scores[0, head, 4:-8], reference.pool(raw[0, head, 4:-8], pool, 5), atol=1e-5
        )
        assert np.allclose(scores[0, head, :4], raw[0, head, :4], atol=1e-5)
        assert np.allclose(scores[0, head, -8:], raw[0, head, -8:], atol=1e-5)


def test_an_entry_has_the_highest_of_its_own_votes_and_the_contrasts_pooled_forward():
    """By hand: of 128 queries the first 64 ask for entry 2, the next 32 for entry 4, the last 32 for entry 7.

    Every third query asks for entry 9 instead: it has votes of its own, and no contrast.
    """
    keys = mx.zeros((1, 1, 140, 4))
    for i, entry in enumerate((2, 4, 7, 9)):
        keys[:, :, entry, i] = 50
    asked = np.repeat([0, 1, 2], [64, 32, 32])
    asked[::4] = 3
    queries = mx.array(np.eye(4, dtype=np.float32)[asked])[None, None]
    policy = SnapKV(n_sink=1, n_window=1, pool_kernel=3)

    def scores(places):
        entries = Entries(keys, keys, Queries(queries, places, 1.0))
        return policy.score(entries)[0, 0, 1:11]

    # Own votes: the mean of all queries and of the last 32. Contrasts: 3/4 of the last 32 (entry 7), 3/8 and 3/8 of the
    # last 64 (entries 4 and 7), a third of them for the entry and the two after it.
    two, seven = 48 / 256, 24 / 256 + 0.375
    wanted = [0, two, 0, 0.125, 0.125, 0.125, seven, 0.25, 0.25, 0]
    assert np.allclose(scores(range(12, 140)), wanted)


@given(
    n_voters=st.sampled_from([1, 20, 32, 33, 36, 50, 64, 65, 69, 90]),
    kernel=st.integers(1, 20),
    n_sink=st.integers(0, 6),
    n_window=st.integers(1, 30),
    beyond=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_forward_scores_equal_the_reference(n_voters, kernel, n_sink, n_window, beyond, seed):
    rng = np.random.default_rng(seed)
    T = 100
    keys = mx.array(2 * rng.normal(size=(1, 2, T, 8)).astype(np.float32))
    queries = mx.array(2 * rng.normal(size=(1, 4, n_voters, 8)).astype(np.float32))
    stop = T + beyond
    observed = Queries(queries, range(stop - n_voters, stop), 8**-0.5)
    ends = {"n_sink": n_sink, "n_window": n_window}
    policy = SnapKV(pool_kernel=kernel, **ends)
    scores = policy.score(Entries(keys, keys, observed))
    expected = reference.forward_scores(
        queries, keys, observed.places, observed.scale, beyond, (n_sink, n_window), kernel
    )
    assert np.allclose(scores, expected, atol=1e-6)


def test_what_is_kept_anyway_is_the_windows_share_of_the_budget():
    """Told nothing, a policy takes its own budget's; a layer of a pyramid is told the mean's."""
    entries = make_entries(T=200)
    plain = reference.votes(entries.queries, entries.keys, entries.observed.places, 8**-0.5)
    policy = SnapKV(budget="30%", pool="avg", pool_kernel=3)
    for budget, told, n_window in ((None, None, 15), (100, None, 25), (100, 40, 40)):
        entries.budget, entries.n_window = budget, told
        scores = np.asarray(policy.score(entries))
        raw = np.isclose(scores, plain, atol=1e-7).all(axis=(0, 1))
        assert raw[-n_window:].all() and not raw[-n_window - 3 : -n_window].any()


def test_shared_gives_all_heads_one_score():
    scores = SnapKV(heads="shared", n_window=32, n_sink=4).score(make_entries())
    assert mx.array_equal(scores[:, 0], scores[:, 1])
    assert not mx.array_equal(
        *mx.split(SnapKV(n_sink=4, n_window=32).score(make_entries()), 2, axis=1)
    )


def test_the_defaults():
    policy = SnapKV()
    assert (policy.top_k, policy.n_sink, policy.n_window) == (4096, 4, "25%")
    assert (policy.obs_window, policy.pool, policy.pool_kernel) == (256, "forward", 16)
    assert (policy.min_ctx, policy.prefill_chunk, policy.on_full) == (0, None, "grow")
    assert policy.budget == 4096 + 4 + 1366


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"top_k": "abc"}, "top_k must be a whole number of at least 0, got 'abc'"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 0, got 1.5"),
        ({"top_k": True}, "top_k must be a whole number of at least 0, got True"),
        (
            {"n_window": 0},
            'n_window must be a whole number of entries of at least 1 or a share such as "25%", got 0',
        ),
        ({"obs_window": 0}, "obs_window must be a whole number of at least 1, got 0"),
        ({"pool": "avg", "pool_kernel": 4}, "pool_kernel must be odd with pool=avg, got 4"),
        ({"pool": "max"}, "pool_kernel must be odd with pool=max, got 16"),
        ({"pool_kernel": 257}, "pool_kernel must be a whole number of 1 to 255, got 257"),
        ({"top_k": 10**12}, "top_k must be a whole number of 0 to 2147483647, got 1000000000000"),
        ({"pool": "mean"}, "pool must be forward, avg or max, got 'mean'"),
        ({"heads": "all"}, "heads must be per_head or shared, got 'all'"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1, got 0"),
        ({"lookahead": -1}, "lookahead must be a whole number of 0 to 256, got -1"),
        ({"last_token": 1}, "last_token must be true or false, got 1"),
        (
            {"last_token": False, "lookahead": 2},
            "lookahead must be 0 when last_token is false, got 2",
        ),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(SnapKVError) as error:
        resolve_policy(snapkv=options)
    assert str(error.value) == f"snapkv option {message}"


def test_a_misspelt_option_lists_the_known_ones():
    with pytest.raises(SnapKVError) as error:
        resolve_policy(snapkv={"topk": 4})
    assert "unknown snapkv option 'topk' (did you mean 'top_k'?); known: top_k, n_sink" in str(
        error.value
    )


def test_strings_dicts_and_objects_name_the_same_policy():
    policy = SnapKV(top_k=64, pool_kernel=7, last_token=False, lookahead=0, prefill_chunk=256)
    assert resolve_policy(snapkv=policy) is policy
    text = "top_k=64, pool_kernel=7,last_token=false,lookahead=0,prefill_chunk=256"
    assert resolve_policy(snapkv=text) == policy
    assert resolve_policy(policy=f"snapkv:{text}") == policy
    assert resolve_policy(policy=str(policy)) == policy
    assert (
        resolve_policy(snapkv=True)
        == resolve_policy(snapkv={})
        == resolve_policy(policy="snapkv")
        == SnapKV()
    )
    assert resolve_policy() is None


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"snapkv": {}, "policy": "snapkv"}, "give only one"),
        ({"policy": "snapvk"}, "unknown policy 'snapvk'.*known: snapkv"),
        ({"snapkv": "top_k"}, "written key=value"),
        ({"snapkv": "top_k=1,top_k=2"}, "top_k is given twice"),
        ({"snapkv": {1: 2}}, "unknown snapkv option '1'"),
        ({"snapkv": 4}, "must be a SnapKV, a dict or a string"),
        ({"policy": 4}, "must be a policy object or a string"),
    ],
)
def test_requests_that_name_no_policy(keywords, message):
    with pytest.raises(SnapKVError, match=message):
        resolve_policy(**keywords)


@pytest.mark.parametrize(
    "text, n",
    [
        ("snapkv", 32),
        ("snapkv:lookahead=0", 0),
        ("snapkv:lookahead=7", 7),
        ("snapkv:last_token=false", 0),
        ("keydiff", 0),
        ("keydiff then snapkv", 32),
    ],
)
def test_one_lookahead_for_every_way_in(text, n):
    _, decode_policy = resolve_policy(policy=text).stages
    assert decode_policy.n_lookahead == n
