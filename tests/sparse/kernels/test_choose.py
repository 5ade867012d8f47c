"""`score` and `select` on a CPU, against float64 and a stable sort."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import LEAST_HALF, VARIANTS, Index, normal, ranks

from mlx_snapkv.sparse.kernels import launch
from mlx_snapkv.sparse.kernels.launch import SCORE_BLOCK, Shape, choose, make_params, run


def scored(queries, index, scale, n_groups):
    """Return the outputs of `score`: block maxima, and the distances of the logits from them."""
    n_heads, H, n = queries.shape[1], index.codes.shape[1], index.n
    n_blocks = -(-n // SCORE_BLOCK)
    params = make_params(
        n_means=0, n_chosen=1, n_sink=0, choice_stop=n, scale=scale, code_capacity=index.codes.shape[2],
        n_score_groups=n_groups,
    )  # fmt: skip
    arrays = index.arguments()
    outputs = run(
        "score", Shape.of(queries, arrays["codes"]), [queries, *arrays.values(), params], (n_groups, H),
        [(n_heads, n_blocks), (n_heads, n)],
    )  # fmt: skip
    return [np.array(x) for x in outputs]


@pytest.mark.parametrize("head_dim, group, dtype", VARIANTS)
@pytest.mark.parametrize(
    "H, n, broken", [(1, 1, False), (2, 31, True), (2, 1025, False), (1, 2500, True)]
)
def test_logits_equal_float64(shim, head_dim, group, dtype, H, n, broken):
    rng = np.random.default_rng(n)
    index = Index(rng, H, n, head_dim)
    queries = normal(rng, 1, H * group, 1, head_dim, dtype=dtype)
    if broken:
        index.powers[0, H - 1, n // 2] = 255  # a key of NaN
        queries[0, 0, 0, 0] = mx.inf  # a query that casts no vote
    scale = head_dim**-0.5
    maxima, below = scored(queries, index, scale, n_groups=1 + n % 2)
    with np.errstate(invalid="ignore"):
        wanted = index.logits(queries, scale)
    wanted[~np.isfinite(wanted)] = -3e38
    for b in range(maxima.shape[1]):
        block = slice(b * SCORE_BLOCK, min(n, (b + 1) * SCORE_BLOCK))
        top = wanted[:, block].max(axis=1, keepdims=True)
        np.testing.assert_allclose(maxima[:, b : b + 1], top, rtol=2e-5, atol=2e-5)
        # Half precision rounds by 2^-11.
        distance = np.maximum(wanted[:, block] - top, LEAST_HALF)
        np.testing.assert_allclose(below[:, block], distance, rtol=5.2e-4, atol=2e-4)


def blocks(rng, kind, heads, n):
    """Return outputs of `score` that are hard cases for `select`."""
    n_blocks = -(-n // SCORE_BLOCK)
    maxima = (rng.standard_normal((heads, n_blocks)) * 3 + 50).astype(np.float32)
    below = -np.abs(rng.standard_normal((heads, n)) * 20)
    if kind == "ties":
        maxima = -rng.integers(0, 4, maxima.shape).astype(np.float32)
        below = -rng.integers(0, 50, below.shape) / 8
    elif kind == "infinite and NaN":
        below[rng.random(below.shape) < 0.2] = -np.inf
        below[rng.random(below.shape) < 0.2] = np.nan
    elif kind == "all infinite":
        below[:] = -np.inf
    elif kind == "all best":
        below[:] = 0
        maxima[:] = 0
    elif kind == "no vote":
        maxima[0] = -3e38
    return maxima, below.astype(np.float16)


KINDS = ["random", "ties", "infinite and NaN", "all infinite", "all best", "no vote"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "group, n, first, k",
    [(1, 1, 0, 1), (7, 301, 4, 297), (4, 4099, 4, 256), (16, 1024, 0, 1), (4, 2050, 3, 2047)],
)
def test_selection_equals_a_stable_sort(shim, kind, group, n, first, k):
    rng = np.random.default_rng(n)
    head_dim, _, dtype = next(variant for variant in VARIANTS if variant[1] == group)
    H, n_means, spare = 2, 17, 3
    maxima, below = blocks(rng, kind, H * group, n)
    ids = rng.integers(0, n_means, (H, n + spare)).astype(np.uint16)
    counts = [np.bincount(row[first:n], minlength=n_means) for row in ids]
    shape = Shape(H * group, H, head_dim, dtype)
    params = make_params(
        n_means=n_means, n_chosen=k, n_sink=first, choice_stop=n, scale=1, id_capacity=n + spare
    )
    inputs = [*map(mx.array, (maxima, below, ids, np.stack(counts).astype(np.int32))), params]
    outputs = run("select", shape, inputs, (H, 1), [(H, k), (H, n_means), (H, n)])
    positions, unread, _ = map(np.array, outputs)
    wanted = ranks(below, maxima, group, SCORE_BLOCK)[:, first:]
    for h in range(H):
        best = np.sort(np.argsort(wanted[h], kind="stable")[:k]) + first
        np.testing.assert_array_equal(positions[h], best)
        np.testing.assert_array_equal(
            unread[h], counts[h] - np.bincount(ids[h, best], minlength=n_means)
        )


def test_selection_handles_a_long_text_and_many_clusters(shim):
    rng = np.random.default_rng(5)
    n, k, n_means = 70_001, 4375, launch.MAX_MEANS
    maxima, below = blocks(rng, "ties", 1, n)
    ids = (np.arange(n) * n_means // n).astype(np.uint16)
    params = make_params(
        n_means=n_means, n_chosen=k, n_sink=4, choice_stop=n, scale=1, id_capacity=n
    )
    counts = np.bincount(ids[4:], minlength=n_means).astype(np.int32)
    outputs = run(
        "select", Shape(1, 1, 64, mx.float32), [*map(mx.array, (maxima, below, ids, counts)), params],
        (1, 1), [(1, k), (1, n_means), (1, n)],
    )  # fmt: skip
    positions, unread, _ = map(np.array, outputs)
    best = np.argsort(ranks(below, maxima, 1, SCORE_BLOCK)[0, 4:], kind="stable")[:k] + 4
    np.testing.assert_array_equal(positions[0], np.sort(best))
    np.testing.assert_array_equal(unread[0], counts - np.bincount(ids[best], minlength=n_means))


@pytest.mark.parametrize("head_dim, group, dtype", VARIANTS)
def test_chosen_entries_are_the_best_by_the_index_with_and_without_means(
    shim, head_dim, group, dtype
):
    rng = np.random.default_rng(1)
    H, n, first, k = 2, 1500, 4, 93
    index = Index(rng, H, n, head_dim)
    queries = normal(rng, 1, H * group, 1, head_dim, dtype=dtype)
    arguments = dict(index.arguments(), n_chosen=k, n_sink=first, choice_stop=n)
    positions, unread = choose(queries, 0.1, **arguments)
    assert unread is None and positions.shape == (1, H, k) and positions.dtype == mx.uint32
    logits = index.logits(queries, 0.1)
    scores = (logits - logits.max(axis=1, keepdims=True)).reshape(H, group, n).max(axis=1)
    for row, chosen in zip(scores, np.array(positions)[0].astype(int)):
        assert (np.diff(chosen) > 0).all() and first <= chosen[0] and chosen[-1] < n
        others = np.delete(row, [*range(first), *chosen])
        assert others.max() <= row[chosen].min() * (1 - 2e-3) + 2e-3
    ids = mx.array(rng.integers(0, 6, (1, H, n)).astype(np.uint16))
    choosable = mx.full((1, H, 6), n, mx.int32)
    with_means, unread = choose(queries, 0.1, **arguments, ids=ids, choosable=choosable)
    assert mx.array_equal(positions, with_means)
    chosen_ids = np.take_along_axis(np.array(ids), np.array(positions).astype(int), axis=2)
    wanted = n - np.stack([np.bincount(row, minlength=6) for row in chosen_ids[0]])
    np.testing.assert_array_equal(np.array(unread)[0], wanted)
