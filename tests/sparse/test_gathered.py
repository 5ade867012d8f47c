"""The buffer of what a token reads: against plain lists, and in place."""

import copy
import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_snapkv.sparse.clusters import Clusters
from mlx_snapkv.sparse.gathered import Gathered
from mlx_snapkv.sparse.residual import Residual

B, H, D = 1, 2, 4


def entries(n: int, seed: int) -> tuple[mx.array, mx.array]:
    shape = B, H, n, D
    return tuple(mx.random.normal(shape, key=mx.random.key(2 * seed + i)) for i in range(2))


def rest_of(n_clusters: int, seed: int) -> Residual:
    ones = mx.ones((B, H, 1, 1, 1))
    clusters = Clusters(mx.zeros((B, H, 9), mx.uint16), *entries(n_clusters, seed))
    return Residual(clusters, mx.zeros((B, H, n_clusters), mx.int32), ones, ones)


def joined(*parts) -> list[np.ndarray]:
    return [np.concatenate([np.array(x[i]) for x in parts], axis=2) for i in range(2)]


@pytest.mark.parametrize("seed", range(8))
def test_reads_means_chosen_and_what_every_token_reads(seed):
    """Any sequence of updates gives what joining the parts anew would give."""
    draw, gathered, rest = random.Random(seed), Gathered(), None
    always = entries(3, 1000)
    gathered.append(*always)
    for step in range(60):
        what = draw.choice(["append", "append", "remove", "rest", "copy"])
        n = always[0].shape[2]
        if what == "append":
            new = entries(draw.choice([1, 1, 2, 300]), step)
            gathered.append(*new)
            always = tuple(map(mx.array, joined(always, new)))
        elif what == "remove" and n > 5:
            gathered.remove(1, 3)
            always = tuple(
                map(mx.array, joined([x[:, :, :1] for x in always], [x[:, :, 4:] for x in always]))
            )
        elif what == "rest":
            rest = draw.choice([None, rest_of(draw.choice([1, 2]), step)])
        elif what == "copy":
            other = copy.deepcopy(gathered)
            gathered.append(*entries(1, 7777))  # the copy does not see it
            gathered = other
        chosen = entries(draw.choice([5, 5, 5, 7]), 100 + step)
        read = gathered.read(chosen, rest)
        means = [] if rest is None else [(rest.clusters.keys, rest.clusters.values)]
        for got, expected in zip(read, joined(*means, chosen, always)):
            np.testing.assert_array_equal(np.array(got), expected)
        for got, expected in zip(gathered.always(), always):
            np.testing.assert_array_equal(np.array(got), np.array(expected))
        assert gathered.n == always[0].shape[2]


def test_keeps_its_memory_from_token_to_token():
    """A token of the same choice writes into the buffers that are there."""
    gathered, rest = Gathered(), rest_of(2, 1)
    gathered.append(*entries(10, 2))
    mx.eval(gathered.read(entries(500, 3), rest))
    mx.eval(gathered.keys, gathered.values)
    held = gathered.keys.nbytes + gathered.values.nbytes
    before = mx.get_active_memory()
    for i in range(5):
        chosen = entries(500, 10 + i)
        mx.eval(chosen)
        mx.reset_peak_memory()
        start = mx.get_active_memory()
        gathered.append(*entries(1, 20 + i))
        mx.eval(gathered.read(chosen, rest))
        assert mx.get_peak_memory() - start < held / 2
        del chosen
    assert mx.get_active_memory() - before < held / 2


def test_other_means_are_written_once_more():
    gathered = Gathered()
    gathered.append(*entries(4, 1))
    chosen, first = entries(6, 2), rest_of(2, 3)
    gathered.read(chosen, first)
    clusters = first.clusters._replace(keys=first.clusters.keys + 1)
    keys, _ = gathered.read(chosen, first._replace(clusters=clusters))
    np.testing.assert_array_equal(np.array(keys[:, :, :2]), np.array(clusters.keys))
