import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import reference
from entry_helpers import asked, in_blocks, make_entries, votes_of

from mlx_snapkv import KeyDiff, KeyNorm
from mlx_snapkv.entries.attention import attention_votes
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.quantization import Quantization
from mlx_snapkv.entries.queries import Queries

SINKS = mx.array([0.5, -1.0, 2.0, -mx.inf])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape, sinks", [
    ({"B": 2, "n": 3}, SINKS), ({"n_heads": 6, "H": 1}, None), ({"n_heads": 2, "n": 1}, None),
    ({"n": 70, "dtype": mx.float16}, None), ({"T": 300}, None),
])  # fmt: skip
def test_votes_and_weights_equal_the_float64_reference(shape, sinks, blocks, monkeypatch):
    """Sinks take a share of the softmax."""
    if blocks:
        in_blocks(monkeypatch, 1, one_pass=0)
    entries = make_entries(**shape)
    entries.voting_queries = dataclasses.replace(entries.voting_queries, sinks=sinks)
    wanted = reference.weights(*asked(entries), sinks)
    assert entries.votes.dtype == mx.float32
    assert np.allclose(entries.votes, votes_of(entries), atol=1e-5)
    assert np.allclose(entries.attention, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["held", "blocks"])
@pytest.mark.parametrize("way", [
    {}, {"sinks": SINKS}, {"logit_cap": 0.7}, {"indices": range(290, 310)},
], ids=["plain", "sinks", "capped", "past the last entry"])  # fmt: skip
def test_latest_votes_equal_the_votes_of_the_last_queries_alone(way, kind, monkeypatch):
    """A single pass over the keys also returns the votes of all queries."""
    entries = make_entries(T=300, n=20)
    every = entries.voting_queries = dataclasses.replace(entries.voting_queries, **way)
    alone = every.latest(7)
    assert (
        mx.array_equal(alone.vectors, every.vectors[:, :, 13:])
        and alone.indices == every.indices[13:]
    )
    whole = [attention_votes(entries.key_reader(), observed) for observed in (every, alone)]
    mx.eval(whole)
    in_blocks(monkeypatch, 1, one_pass=1 << 30 if kind == "held" else 0)
    (latest,) = entries.latest_votes(7)
    assert np.allclose(latest, whole[1], atol=1e-6)
    assert "votes" in vars(entries) and np.allclose(entries.votes, whole[0], atol=1e-6)
    assert all(mx.array_equal(entries.latest_votes(n)[0], entries.votes) for n in (20, 99))


@pytest.mark.parametrize("n_heads, found", [
    (32, lambda entries: entries.votes),
    (32, lambda entries: (entries.latest_votes(5), entries.votes)),
    (32, lambda entries: entries.above_average),
    (8, lambda entries: Entries(entries.keys, entries.values, entries.voting_queries.latest(2)).attention),
    (32, lambda entries: entries.with_quantization(Quantization(4, 64)).votes),
    (32, KeyNorm(budget=9).score),
    (32, KeyDiff(budget=9).score),
], ids=["votes", "latest", "above average", "attention", "4 bits", "key norm", "keydiff"])  # fmt: skip
def test_no_float32_copy_of_all_keys_is_made(n_heads, found, monkeypatch):
    # MLX's CPU backend allocates several blocks ahead, so blocks are much smaller than such a copy.
    in_blocks(monkeypatch, 3 << 19)
    T = 32_768
    keys = mx.random.normal((1, 8, T, 64)).astype(mx.bfloat16)
    queries = mx.random.normal((1, n_heads, 12, 64)).astype(mx.bfloat16)
    entries = Entries(keys, keys, Queries(queries, range(T - 12, T), 0.125))
    mx.eval(keys, queries)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(found(entries))
    assert mx.get_peak_memory() - before < 2 * keys.nbytes  # the bytes of such a copy
