"""Random entries of a layer, the queries that vote for them, and their votes in float64."""

import mlx.core as mx
import numpy as np
import reference

from mlx_snapkv.entries import attention
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.sparse import full_view, index


def normal(*shape, seed=0, mean=0.0):
    return mx.array(np.random.default_rng(seed).normal(mean, 1, shape).astype(np.float32))


def make_entries(B=1, n_heads=4, H=2, T=70, n=5, D=8, dtype=mx.float32, seed=0, **more):
    keys, values = (normal(B, H, T, D, seed=s, mean=0.3).astype(dtype) for s in (seed, seed + 1000))
    queries = normal(B, n_heads, n, D, seed=seed + 2000).astype(dtype)
    return Entries(keys, values, Queries(queries, range(T - n, T), D**-0.5), **more)


def asked(entries):
    """Return the arguments for the functions of `reference.py`: queries, keys, query positions, scale."""
    observed = entries.voting_queries
    queries, keys = (x.astype(mx.float32) for x in (observed.vectors, entries.keys))
    return queries, keys, observed.indices, observed.scale


def votes_of(entries):
    return reference.votes(*asked(entries), entries.voting_queries.sinks)


def exact_up_to(monkeypatch, n):
    """Make tokens use an index if they rank more than `n` entries."""
    monkeypatch.setattr(index, "EXACT_ENTRIES", n)


def count_indexes(monkeypatch):
    """Return a list to which every index that a layer creates from now on is appended."""
    made = []

    class Counted(index.KeyIndex):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(full_view, "KeyIndex", Counted)
    return made


def in_blocks(monkeypatch, n_bytes, one_pass=attention.ONE_PASS_BYTES):
    """Compute votes in blocks of `n_bytes`, unless they need at most `one_pass` bytes."""
    monkeypatch.setattr(attention, "BLOCK_BYTES", n_bytes)
    monkeypatch.setattr(attention, "ONE_PASS_BYTES", one_pass)
