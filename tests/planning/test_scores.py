"""How many tokens are read at once if MLX stores their attention scores."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv.entries.quota import UNLIMITED
from mlx_snapkv.planning import scores
from mlx_snapkv.planning.machine import Machine
from mlx_snapkv.planning.scores import MIN_TOKENS_AT_ONCE, scores_limit, tokens_at_once
from mlx_snapkv.planning.shapes import LayerShape, score_bytes


@given(st.integers(0, 1 << 21), st.integers(1, 1000), st.integers(1, 1 << 30))
def test_scores_fill_the_limit_and_no_more(n_before, pair_bytes, limit):
    """The number of tokens is a multiple of 32."""
    n = tokens_at_once(n_before, pair_bytes, limit)

    def taken(n):
        return pair_bytes * n * (n_before + n)

    assert n % MIN_TOKENS_AT_ONCE == 0 and (
        n == MIN_TOKENS_AT_ONCE or taken(n) <= limit < taken(n + MIN_TOKENS_AT_ONCE)
    )


def test_a_smaller_machine_allows_less(monkeypatch):
    for memory, limit in ((64 << 30, 512 << 20), (16 << 30, 512 << 20), (8 << 30, 256 << 20)):
        monkeypatch.setattr(scores, "this_machine", lambda m=memory: Machine(m, m))
        assert scores_limit() == limit


@pytest.mark.parametrize("size, kind, stored", [
    (64, "GPU", 0), (80, "GPU", 0), (128, "GPU", 0), (192, "GPU", 32), (256, "GPU", 32), (64, "CPU", 32),
])  # fmt: skip
def test_scores_are_stored_without_a_fused_kernel(size, kind, stored, monkeypatch):
    """The layer has 16 heads in half precision."""
    monkeypatch.setattr(scores, "on_gpu", lambda: kind == "GPU")
    assert score_bytes(SimpleNamespace(n_heads=16), None, size, 2) == stored


def test_a_layer_is_planned_to_store_at_most_the_limit():
    """Very long contexts are an exception, because even 32 tokens exceed the limit."""
    shape, limit = LayerShape(100, pair_bytes=32, window=UNLIMITED), 48 << 20
    others = replace(shape, pair_bytes=0)
    for seen, stored in ((512, 32 * 512 * 512), (4000, limit), (1 << 20, 32 * 32 << 20)):
        both = [x.chunk_bytes(512, seen, limit) for x in (shape, others)]
        assert both[0] - both[1] == stored
    assert shape.chunk_bytes(512, 4000) == 512 * (100 + 32 * 4000)
