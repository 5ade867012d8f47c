"""Expected Attention: the entries that queries to come will attend to, if they are like those so far."""

import math
from dataclasses import dataclass

import mlx.core as mx

from ...entries.attention import BLOCK_BYTES
from ...entries.entries import Entries
from ...entries.spans import spans
from ..policy import Policy

FUTURE = 512  # positions whose mean rotation stands for that of the queries to come


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """Score entries by the attention that a normally distributed query would give, times the norm of the value.

    Its mean and covariance are those of the pre-RoPE queries of all tokens read except the first `n_sink`, rotated by
    the mean rotation of the next 512 positions. (If the prompt has no more tokens, those of its last token are used.)
    The expected weight of a key then has a closed form. Weights are a softmax over the keys after the sink, averaged
    over the query heads of a GQA group.

    Attributes:
        n_sink: number of first entries, which are always kept; their queries are left out of the statistics.
    """

    name = "expected_attention"
    summary = "the attention that queries like those so far would give, times the value's size"
    paper = "Devoto et al. 2025, arXiv:2510.00636"

    n_sink: int = 4

    @property
    def query_statistics(self) -> int:  # type: ignore[override]
        return self.n_sink

    def score(self, entries: Entries) -> mx.array:
        """`(B, n_kv_heads, T)` float32: logarithms, since many weights are too small for float32; the sink on top."""
        one = entries.read_keys(0, 1)
        if len(entries) <= self.n_sink:
            return mx.zeros((*one.shape[:2], len(entries)))
        mean, covariance = self._queries_to_come(entries, one)
        B, H, _, width = covariance.shape

        def logits_and_sizes(start: int, stop: int, after: list[mx.array]) -> mx.array:
            keys = entries.read_keys(start, stop, after).astype(mx.float32)
            spread = mx.unflatten(keys @ covariance, 3, (-1, keys.shape[3]))
            logits = keys @ mean + (spread * keys[:, :, :, None]).sum(axis=-1)
            values = entries.read_values(start, stop, [logits]).astype(mx.float32)
            sizes = mx.linalg.norm(values, axis=-1, keepdims=True)
            return mx.concatenate([logits, sizes], axis=-1)

        size = max(64, BLOCK_BYTES // (4 * B * H * width))
        found = entries.by_block(logits_and_sizes, spans(self.n_sink, len(entries), size))
        logits, sizes = found[..., :-1], found[..., -1]
        each = logits - mx.logsumexp(logits, axis=2, keepdims=True)
        weights = mx.logsumexp(each, axis=-1) - math.log(each.shape[-1])
        scores = weights + mx.log(sizes)
        top = scores.max(axis=(1, 2), keepdims=True) + 1
        return mx.concatenate([mx.broadcast_to(top, (B, H, self.n_sink)), scores], axis=-1)

    def _queries_to_come(self, entries: Entries, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Moments of what a key is multiplied by, scale and turn included, for the query heads of each KV head.

        The mean `(B, n_kv_heads, head_dim, group)`, and half the covariance, side by side for the group.
        """
        B, H, _, D = keys.shape
        layer, found = entries.layer, entries.statistics
        turn = layer.mean_rotation(D, found.stop, FUTURE)
        mean = found.scale * (found.mean @ turn.T)
        covariance = found.scale**2 / 2 * (turn @ found.covariance @ turn.T)
        mean = layer.grouped(mean, H).reshape(B, H, -1, D)
        covariance = layer.grouped(covariance, H).reshape(B, H, -1, D, D)
        return mean.swapaxes(2, 3), covariance.transpose(0, 1, 3, 2, 4).flatten(3)
