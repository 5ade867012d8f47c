"""Splits prompt chunks into pieces whose attention scores fit in memory.

The longer the context, the shorter the pieces.
"""

from typing import Any

import mlx.core as mx

from ..caches.layers import AttentionLayer, token_caches
from ..entries.quota import UNLIMITED
from ..models.counts import n_query_heads
from ..models.distributed import n_ranks
from ..planning.request_plan import Plan
from ..planning.scores import MIN_TOKENS_AT_ONCE, scores_limit, tokens_at_once
from ..planning.shapes import layer_shapes

# Upper bound on score bytes per (query, entry) pair and head: three float32 scores.
MAX_PAIR_BYTES = 3 * 4


class Pieces:
    """Calls a model on a chunk piece by piece, and returns the logits of the last piece.

    With sparse prefill, each piece chooses the entries that it reads.

    Args:
        model: the mlx-lm model.
        layers: the model's full-attention layers.
        plan: the request's plan.
    """

    def __init__(self, model: Any, layers: list[AttentionLayer], plan: Plan):
        """Find out whether chunks may have to be split, and if so, how large their scores are."""
        self._model = model
        self._layers = layers
        self._pair_bytes = 0  # bytes of scores per (query, entry) pair; if 0, chunks are not split
        n_heads = max(n_query_heads(layer.attention) for layer in layers)
        n_pairs = max(MIN_TOKENS_AT_ONCE, plan.n_new) * plan.n_prompt
        score_bytes_bound = MAX_PAIR_BYTES * n_heads * n_pairs
        self._score_limit = scores_limit()
        # All ranks must make the same calls, but each rank's limit depends on its memory, so don't split chunks if
        # there are several ranks. A policy that evicts in blocks already limits both the chunk size and the number of
        # entries before a chunk, so don't split its chunks either.
        may_split = n_ranks() == 1 and not plan.config.evicts_in_blocks
        if may_split and score_bytes_bound > self._score_limit:
            # Looking up the shapes takes time, so do it only when needed.
            shapes = layer_shapes(model, token_caches(model))
            self._pair_bytes = max(shape.pair_bytes for shape in shapes)

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model on tokens `(1, L)`, and return the logits of the last piece."""
        while inputs.shape[1] > MIN_TOKENS_AT_ONCE:
            piece_size = self.max_piece_size(cache)
            if inputs.shape[1] <= piece_size:
                break
            self._model(inputs[:, :piece_size], cache=cache)
            mx.eval([layer_cache.state for layer_cache in cache])
            mx.clear_cache()  # the freed buffers are too small for the next piece's scores
            inputs = inputs[:, piece_size:]
        return self._model(inputs, cache=cache)

    def max_piece_size(self, cache: list) -> int:
        """Return the maximum number of tokens in the next piece, or `UNLIMITED` if chunks are not split.

        The limit depends on how many tokens are already in `cache`.
        """
        if not self._pair_bytes:
            return UNLIMITED
        n_before = max(layer.layer_cache_in(cache).n_entries for layer in self._layers)
        return tokens_at_once(n_before, self._pair_bytes, self._score_limit)
