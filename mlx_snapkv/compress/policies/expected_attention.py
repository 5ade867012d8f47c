"""Expected Attention: keep the entries that future queries are expected to attend to."""

import math
from dataclasses import dataclass

import mlx.core as mx

from ...entries.attention import FLOAT_BYTES, entries_per_block
from ...entries.entries import Entries
from ...entries.spans import spans
from ..policy import Policy

FUTURE = 512  # number of future positions to average the rotation over


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """Scores each entry by the attention that future queries are expected to give it, times the norm of its value.

    Future queries are modelled as normally distributed, so that a key's expected weight has a closed form. The mean and
    the covariance are those of the prompt's pre-RoPE queries read so far, except for the first `n_sink`. The answer's
    queries are not added. Mean and covariance are rotated by the mean rotation of the next 512 positions. If the prompt
    has at most `n_sink` tokens, only its last query is used. Weights are normalised with a softmax over the keys after
    the sink, and averaged over the query heads of a GQA group.

    Attributes:
        n_sink: number of initial entries that are always kept. The first `n_sink` queries are left out of the mean and
            the covariance.
    """

    name = "expected_attention"
    summary = "the attention that queries like the prompt's would give, times the value's size"
    paper = "Devoto et al. 2025, arXiv:2510.00636"

    n_sink: int = 4

    @property
    def query_statistics(self) -> int:  # type: ignore[override]
        """Return the position where query statistics start."""
        return self.n_sink

    def score(self, entries: Entries) -> mx.array:
        """Return log scores `(B, n_kv_heads, T)` float32. Sink entries score highest.

        Scores are logarithms because many weights are too small for float32. For a key `k` and queries with mean `m`
        and covariance `C`, the expected weight before normalisation is `exp(k . m + k . C k / 2)`.
        """
        first_key = entries.read_keys(0, 1)
        if len(entries) <= self.n_sink:
            return mx.zeros((*first_key.shape[:2], len(entries)))
        mean, half_covariance = self._future_queries(entries, first_key)
        B, H, _, products_per_key = half_covariance.shape

        def logits_and_value_norms(start: int, stop: int, after: list[mx.array]) -> mx.array:
            """Return a column of logits per query head in a group, and a column of value norms."""
            keys = entries.read_keys(start, stop, after).astype(mx.float32)
            # k C / 2 for each query head: (B, n_kv_heads, n, group, head_dim)
            products = mx.unflatten(keys @ half_covariance, 3, (-1, keys.shape[3]))
            half_variances = (products * keys[:, :, :, None]).sum(axis=-1)
            logits = keys @ mean + half_variances
            values = entries.read_values(start, stop, [logits]).astype(mx.float32)
            value_norms = mx.linalg.norm(values, axis=-1, keepdims=True)
            return mx.concatenate([logits, value_norms], axis=-1)

        block_size = entries_per_block(FLOAT_BYTES * B * H * products_per_key)
        blocks = spans(self.n_sink, len(entries), block_size)
        columns = entries.map_blocks(logits_and_value_norms, blocks)
        logits, value_norms = columns[..., :-1], columns[..., -1]
        log_weights = logits - mx.logsumexp(
            logits, axis=2, keepdims=True
        )  # log-softmax over the keys
        group_size = log_weights.shape[-1]
        log_mean_weight = mx.logsumexp(log_weights, axis=-1) - math.log(group_size)
        scores = log_mean_weight + mx.log(value_norms)
        above_all_scores = scores.max(axis=(1, 2), keepdims=True) + 1
        sink_scores = mx.broadcast_to(above_all_scores, (B, H, self.n_sink))
        return mx.concatenate([sink_scores, scores], axis=-1)

    def _future_queries(self, entries: Entries, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Return the mean and half the covariance of future queries, rotated and scaled.

        Args:
            entries: the layer's entries, including the query statistics.
            keys: any keys of the layer, `(B, n_kv_heads, n, head_dim)`. Only their shape is used.

        Returns:
            The mean, `(B, n_kv_heads, head_dim, group)`, and half the covariance, `(B, n_kv_heads, head_dim, group *
            head_dim)`, with the matrices of a GQA group's query heads side by side.
        """
        B, H, _, D = keys.shape
        layer = entries.layer
        statistics = entries.statistics
        rotation = layer.mean_rotation(D, start=statistics.stop, n=FUTURE)
        mean = statistics.scale * (statistics.mean @ rotation.T)
        half_covariance = statistics.scale**2 / 2 * (rotation @ statistics.covariance @ rotation.T)
        means_by_kv_head = layer.group_heads(mean, H).reshape(B, H, -1, D)
        matrices_by_kv_head = layer.group_heads(half_covariance, H).reshape(B, H, -1, D, D)
        side_by_side = matrices_by_kv_head.transpose(0, 1, 3, 2, 4).flatten(3)
        return means_by_kv_head.swapaxes(2, 3), side_by_side
