"""Record which entries a request keeps, and what its answer tokens attend to."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..caches.layers import AttentionLayer
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.attention import attention_weights
from ..entries.quota import Quota

MAX_RECORDED = 24  # number of prompt tokens recorded per answer token and layer


@dataclass(frozen=True, eq=False)
class Attended:
    """The attention that predicted each answer token, averaged over the query heads of each layer.

    Attributes:
        positions: int32 `(n_answer, n_layers + 1, n)`, prompt tokens with the most attention, in descending order.
            Index `n_layers` is the mean of all layers. Missing tokens are -1.
        weights: float32, same shape, attention share (0 to 1) of each of these tokens.
        own: float32 `(n_answer, n_layers + 1)`, attention share of earlier answer tokens.
        n_before: number of answer tokens predicted before the compression.
    """

    positions: np.ndarray
    weights: np.ndarray
    own: np.ndarray
    n_before: int


class Recorder:
    """Records which entries a request keeps, and what its answer attends to, from the model's own queries.

    Args:
        layers: the model's full-attention layers.
        n_prompt: number of prompt tokens.
        max_tokens: maximum number of tokens in the answer.

    Attributes:
        kept: kept positions `(n_kv_heads, n)`, by layer number; empty if no entry was evicted.
        votes: votes for `kept`, by layer number; empty if the policy has no votes.
        n_heads: number of KV heads in each layer; 0 before the layer's first call.
        report: report on the compression.
    """

    def __init__(self, layers: list[AttentionLayer], n_prompt: int, max_tokens: int):
        """Start without records."""
        self._n_layers = len(layers)
        self._n_prompt = n_prompt
        self._n_positions = n_prompt + max_tokens + 1
        self._n_recorded = min(MAX_RECORDED, n_prompt)
        # Query position -> layer number -> attention `(n_positions,)`.
        self._pending: dict[int, dict[int, mx.array]] = {}
        # Query position -> positions, weights and own share, as in `Attended`.
        self._rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._n_before: int | None = None
        self.kept: dict[int, np.ndarray] = {}
        self.votes: dict[int, np.ndarray] = {}
        self.n_heads = [0] * len(layers)
        self.report = CompressionReport(NO_POLICY, n_prompt)

    def on_kept(self, layer: AttentionLayer, positions: mx.array, votes: mx.array | None) -> None:
        """Store the positions `(1, n_kv_heads, n)` that a layer keeps, and their votes; see `Request`."""
        self.kept[layer.number] = np.array(positions[0]).astype(np.int32)
        if votes is not None:
            self.votes[layer.number] = np.array(votes[0])

    def on_report(self, report: CompressionReport) -> None:
        """Store the report. Later tokens are predicted from the kept entries."""
        self.report = report
        if report.compressed:
            self._n_before = len({*self._rows, *self._pending})

    def on_queries(self, cache: Any, queries: mx.array) -> None:
        """Compute the attention weights of a single query, if it is the prompt's last query or a later one.

        See `entries.queries.on_queries`.
        """
        position = cache.offset - 1
        if queries.shape[2] != 1 or not self._n_prompt - 1 <= position < self._n_positions:
            return
        entries = cache.held()
        n_kv_heads, n_entries = entries.keys.shape[1:3]
        query = cache.make_voters(queries, range(position, position + 1), entries.keys.shape)
        weights = attention_weights(entries.keys, query).reshape(1, n_kv_heads, -1, n_entries)
        # Average over query heads in two steps, because KV heads may keep different positions.
        weights = weights.mean(axis=2) / n_kv_heads
        by_position = mx.zeros(self._n_positions)
        by_position = by_position.at[entries.positions.reshape(-1)].add(weights.reshape(-1))
        layer = cache.layer.number
        self.n_heads[layer] = n_kv_heads
        self._pending.setdefault(position, {})[layer] = by_position

    def record(self) -> None:
        """Evaluate the attention weights of the latest calls and keep the largest ones for each token.

        Tokens for which a layer has not been called are dropped.
        """
        pending = self._pending
        self._pending = {}
        mx.eval([list(by_layer.values()) for by_layer in pending.values()])
        for position, by_layer in pending.items():
            if len(by_layer) == self._n_layers:
                weights = np.stack([np.array(by_layer[n]) for n in range(self._n_layers)])
                with_mean = np.vstack([weights, weights.mean(axis=0)])
                self._rows[position] = self._largest(with_mean)

    def _largest(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `positions`, `weights` and `own` of `Attended` for one answer token.

        Args:
            weights: `(n_layers + 1, n_positions)`, attention weights of prompt and answer tokens.
        """
        n = self._n_recorded
        prompt_weights = weights[:, : self._n_prompt]
        unordered = np.argpartition(-prompt_weights, n - 1, axis=1)[:, :n]
        unordered_weights = np.take_along_axis(prompt_weights, unordered, axis=1)
        order = np.argsort(-unordered_weights, axis=1, kind="stable")
        positions = np.take_along_axis(unordered, order, axis=1)
        largest = np.take_along_axis(prompt_weights, positions, axis=1)
        own = weights[:, self._n_prompt :].sum(axis=1)
        return np.where(largest > 0, positions, -1), largest, own

    def attended(self, n_answer: int) -> Attended:
        """Return what the first `n_answer` answer tokens attended to.

        Tokens without a record have position -1 and weight 0.
        """
        n_rows = self._n_layers + 1  # one row per layer, and one for their mean
        positions = np.full((n_answer, n_rows, self._n_recorded), -1, np.int32)
        weights = np.zeros((n_answer, n_rows, self._n_recorded), np.float32)
        own = np.zeros((n_answer, n_rows), np.float32)
        for i in range(n_answer):
            # Answer token i is predicted from the token before it.
            query_position = self._n_prompt - 1 + i
            if query_position in self._rows:
                positions[i], weights[i], own[i] = self._rows[query_position]
        n_before = n_answer  # if nothing was compressed
        if self._n_before is not None:
            n_before = min(self._n_before, n_answer)
        return Attended(positions=positions, weights=weights, own=own, n_before=n_before)

    @property
    def positions(self) -> np.ndarray:
        """Return the kept positions `(n_layers, n_kv_heads, n)`, padded with -1.

        If no entry was evicted, these are all positions.
        """
        all_positions = np.arange(self._n_prompt, dtype=np.int32)
        by_layer = [
            self.kept.get(i, np.tile(all_positions, (n_heads, 1)))
            for i, n_heads in enumerate(self.n_heads)
        ]
        max_heads, max_kept = np.max([kept.shape for kept in by_layer], axis=0)
        padded = np.full((len(by_layer), max_heads, max_kept), -1, np.int32)
        for layer, kept in zip(padded, by_layer, strict=True):
            layer[: kept.shape[0], : kept.shape[1]] = kept
        return padded

    def counts(self, quota: Quota) -> np.ndarray:
        """Return `counts` for `sentences.rank_sentences`, `(5, n_tokens)`, if every layer kept `quota`.

        A head always keeps the sink and the recent window, and chooses among the entries in between.
        """
        n = self._n_prompt
        # 1 for tokens that a head can choose, 0 for tokens in the sink or the recent window.
        is_choice = np.ones(n)
        is_choice[: quota.n_sink] = 0
        is_choice[max(0, n - quota.n_window) :] = 0
        counts = np.zeros((5, n))
        for number, n_heads in enumerate(self.n_heads):
            positions = self.kept[number].ravel()
            votes_kept = self.votes.get(number, np.zeros(positions.size)).ravel()
            kept = np.bincount(positions, minlength=n)
            votes = np.bincount(positions, votes_kept, minlength=n)
            heads = np.full(n, n_heads)
            counts += np.stack(
                [kept, heads, kept * is_choice, heads * is_choice, votes * is_choice]
            )
        return counts
