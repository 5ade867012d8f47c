"""Record which entries a request keeps, and what its answer tokens attend to."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..caches.layers import AttentionLayer
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quota import Quota

MAX_RECORDED = 24  # maximum number of prompt tokens recorded per answer token and layer


@dataclass(frozen=True, eq=False)
class Attended:
    """The attention of the query that predicted each answer token, averaged over query heads.

    Attributes:
        positions: int32 `(n_answer, n_layers + 1, n)`, positions of the prompt tokens with the most attention, in
            descending order of attention. The last index of the second axis is the mean over all layers. Unused
            elements are -1.
        weights: float32 `(n_answer, n_layers + 1, n)`, the share (0 to 1) of the attention that each position gets.
        own: float32 `(n_answer, n_layers + 1)`, the share of the attention that earlier answer tokens get.
        n_before: number of answer tokens predicted before compression.
    """

    positions: np.ndarray
    weights: np.ndarray
    own: np.ndarray
    n_before: int


class Recorder:
    """Records which entries a request keeps and what its answer attends to.

    Attention weights are computed from the model's queries.

    Args:
        layers: the model's full-attention layers.
        n_prompt: number of prompt tokens.
        max_tokens: maximum number of tokens in the answer.

    Attributes:
        kept: kept positions `(n_kv_heads, n)`, keyed by `AttentionLayer.number`. Empty if nothing was evicted.
        votes: votes for the kept entries, with the same keys. Empty if the policy has no votes.
        n_heads: number of KV heads in each layer, or 0 before the layer's first recorded query.
        report: the compression report.
    """

    def __init__(self, layers: list[AttentionLayer], n_prompt: int, max_tokens: int):
        """Start with no records."""
        self._n_layers = len(layers)
        self._n_prompt = n_prompt
        self._n_positions = n_prompt + max_tokens + 1
        self._n_recorded = min(MAX_RECORDED, n_prompt)
        # Query position -> layer number -> attention `(n_positions,)`.
        self._pending: dict[int, dict[int, mx.array]] = {}
        # Query position -> `positions`, `weights` and `own` of `Attended`.
        self._recorded: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._n_before: int | None = None
        self.kept: dict[int, np.ndarray] = {}
        self.votes: dict[int, np.ndarray] = {}
        self.n_heads = [0] * len(layers)
        self.report = CompressionReport(NO_POLICY, n_prompt)

    def on_kept(self, layer: AttentionLayer, positions: mx.array, votes: mx.array | None) -> None:
        """Store the positions `(1, n_kv_heads, n)` that a layer keeps, and their votes.

        For the arguments, see `KeptCallback` (engine/compress.py).
        """
        self.kept[layer.number] = np.array(positions[0]).astype(np.int32)
        if votes is not None:
            self.votes[layer.number] = np.array(votes[0])

    def on_report(self, report: CompressionReport) -> None:
        """Store the report.

        If the prompt was compressed, also store how many answer tokens had been predicted by then.
        """
        self.report = report
        if report.compressed:
            self._n_before = len({*self._recorded, *self._pending})

    def on_queries(self, cache: Any, queries: mx.array) -> None:
        """Compute a query's attention weights, if it predicts an answer token.

        Calls with several queries are ignored. For the arguments, see `entries.queries.on_queries`.
        """
        query_position = cache.offset - 1
        is_single_query = queries.shape[2] == 1
        predicts_answer = self._n_prompt - 1 <= query_position < self._n_positions
        if not is_single_query or not predicts_answer:
            return
        entries = cache.held()
        n_kv_heads, n_entries = entries.keys.shape[1:3]
        query_positions = range(query_position, query_position + 1)
        entries.voting_queries = cache.make_voters(queries, query_positions, entries.keys.shape)
        # (1, n_kv_heads, query heads per KV head, n_entries)
        weights = entries.attention.reshape(1, n_kv_heads, -1, n_entries)
        # Average over query heads in two steps, because KV heads may keep different positions.
        weights_by_kv_head = weights.mean(axis=2) / n_kv_heads
        entry_positions = entries.positions.reshape(-1)
        weights_by_position = mx.zeros(self._n_positions)
        weights_by_position = weights_by_position.at[entry_positions].add(
            weights_by_kv_head.reshape(-1)
        )
        layer_number = cache.layer.number
        self.n_heads[layer_number] = n_kv_heads
        self._pending.setdefault(query_position, {})[layer_number] = weights_by_position

    def record(self) -> None:
        """Evaluate the attention weights from `on_queries`, and store the largest ones for each answer token.

        A token is left out if the weights of any layer are missing.
        """
        pending = self._pending
        self._pending = {}
        mx.eval([list(weights_by_layer.values()) for weights_by_layer in pending.values()])
        for position, weights_by_layer in pending.items():
            all_layers_called = len(weights_by_layer) == self._n_layers
            if all_layers_called:
                weights = np.stack([np.array(weights_by_layer[n]) for n in range(self._n_layers)])
                weights_and_mean = np.vstack([weights, weights.mean(axis=0)])
                self._recorded[position] = self._largest_weights(weights_and_mean)

    def _largest_weights(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `positions`, `weights` and `own` of `Attended` for one answer token.

        Args:
            weights: `(n_layers + 1, n_positions)`, attention weights of prompt and answer tokens.
        """
        n_largest = self._n_recorded
        prompt_weights = weights[:, : self._n_prompt]
        # Partition first, so that only a few weights have to be sorted.
        unsorted = np.argpartition(-prompt_weights, n_largest - 1, axis=1)[:, :n_largest]
        unsorted_weights = np.take_along_axis(prompt_weights, unsorted, axis=1)
        order = np.argsort(-unsorted_weights, axis=1, kind="stable")
        positions = np.take_along_axis(unsorted, order, axis=1)
        largest = np.take_along_axis(prompt_weights, positions, axis=1)
        answer_share = weights[:, self._n_prompt :].sum(axis=1)
        return np.where(largest > 0, positions, -1), largest, answer_share

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
            if query_position in self._recorded:
                positions[i], weights[i], own[i] = self._recorded[query_position]
        n_before = n_answer  # if nothing was compressed
        if self._n_before is not None:
            n_before = min(self._n_before, n_answer)
        return Attended(positions=positions, weights=weights, own=own, n_before=n_before)

    @property
    def positions(self) -> np.ndarray:
        """Return the kept positions `(n_layers, n_kv_heads, n)`, padded with -1.

        If nothing was evicted, each head has all positions.
        """
        all_positions = np.arange(self._n_prompt, dtype=np.int32)
        by_layer = [
            self.kept.get(i, np.tile(all_positions, (n_heads, 1)))
            for i, n_heads in enumerate(self.n_heads)
        ]
        max_heads, max_kept = np.max(
            [layer_positions.shape for layer_positions in by_layer], axis=0
        )
        padded = np.full((len(by_layer), max_heads, max_kept), -1, np.int32)
        for padded_layer, layer_positions in zip(padded, by_layer, strict=True):
            n_heads, n_kept = layer_positions.shape
            padded_layer[:n_heads, :n_kept] = layer_positions
        return padded

    def counts(self, quota: Quota) -> np.ndarray:
        """Return the `counts` argument of `sentences.rank_sentences`, `(5, n_tokens)`.

        A head always keeps the sink and the recent window, whose sizes are in `quota`. It chooses among the entries in
        between.
        """
        n_tokens = self._n_prompt
        # 1 for tokens that a head can choose, 0 for tokens in the sink or the recent window.
        is_choice = np.ones(n_tokens)
        is_choice[: quota.n_sink] = 0
        is_choice[max(0, n_tokens - quota.n_window) :] = 0
        counts = np.zeros((5, n_tokens))
        for layer, n_heads in enumerate(self.n_heads):
            positions = self.kept[layer].ravel()
            votes = self.votes.get(layer, np.zeros(positions.size)).ravel()
            heads_keeping = np.bincount(positions, minlength=n_tokens)
            votes_by_token = np.bincount(positions, votes, minlength=n_tokens)
            all_heads = np.full(n_tokens, n_heads)
            counts += np.stack(
                [
                    heads_keeping,
                    all_heads,
                    heads_keeping * is_choice,
                    all_heads * is_choice,
                    votes_by_token * is_choice,
                ]
            )
        return counts
