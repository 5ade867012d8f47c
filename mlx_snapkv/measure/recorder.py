"""What a request keeps and attends to, recorded while it is served."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..caches.layers import AttentionLayer
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.attention import attention_weights
from ..entries.quota import Quota

MAX_RECORDED = 24  # prompt tokens recorded for each of the answer's, by layer


@dataclass(frozen=True, eq=False)
class Attended:
    """What the answer's tokens attended to: the attention that predicted each, averaged over a layer's query heads.

    Attributes:
        positions: int32 `(n_answer, n_layers + 1, n)`, the prompt's tokens with most attention first; the last of
            the layers is the mean of all. -1 where there are fewer.
        weights: float32, the same shape, their shares of the attention, 0 to 1.
        own: float32 `(n_answer, n_layers + 1)`, the share that went to the answer's own tokens before.
        n_before: so many first tokens of the answer were predicted before the compression, from all entries held then.
    """

    positions: np.ndarray
    weights: np.ndarray
    own: np.ndarray
    n_before: int


class Recorder:
    """Records what a request keeps, and what its answer's tokens attend to, at the attention's own calls."""

    def __init__(self, layers: list[AttentionLayer], n_prompt: int, most: int):
        self._n_layers, self._n_prompt, self._size = len(layers), n_prompt, n_prompt + most + 1
        self._n_most = min(MAX_RECORDED, n_prompt)
        self._pending: dict[int, dict[int, mx.array]] = {}
        self._rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._n_before: int | None = None
        # Positions `(n_kv_heads, n)` by layer, if any were dropped, and the votes for them, if there were any.
        self.kept: dict[int, np.ndarray] = {}
        self.votes: dict[int, np.ndarray] = {}
        self.n_heads = [0] * len(layers)  # of each layer; 0 of one that has not been called
        self.report = CompressionReport(NO_POLICY, n_prompt)  # or why there was no compression

    def on_kept(self, layer: AttentionLayer, positions: mx.array, votes: mx.array | None) -> None:
        """What a layer keeps: positions `(1, n_kv_heads, n)`, and their votes."""
        self.kept[layer.number] = np.array(positions[0]).astype(np.int32)
        if votes is not None:
            self.votes[layer.number] = np.array(votes[0])

    def on_report(self, report: CompressionReport) -> None:
        """The compression's report; the tokens to come are predicted from what was kept."""
        self.report = report
        if report.compressed:
            self._n_before = len({*self._rows, *self._pending})

    def on_queries(self, cache: Any, queries: mx.array) -> None:
        """An attention's call: of the prompt's last token, and of every one behind it, the weights."""
        position = cache.offset - 1
        if queries.shape[2] != 1 or not self._n_prompt - 1 <= position < self._size:
            return
        entries = cache.held()
        H, T = entries.keys.shape[1:3]
        asked = cache.voters(queries, range(position, position + 1), entries.keys.shape)
        weights = attention_weights(entries.keys, asked).reshape(1, H, -1, T).mean(axis=2) / H
        places = entries.positions.reshape(-1)
        by_position = mx.zeros(self._size).at[places].add(weights.reshape(-1))
        self.n_heads[cache.layer.number] = H
        self._pending.setdefault(position, {})[cache.layer.number] = by_position

    def record(self) -> None:
        """Evaluate the attention of the last calls, and keep the largest of it."""
        pending, self._pending = self._pending, {}
        mx.eval([list(layers.values()) for layers in pending.values()])
        for position, layers in pending.items():
            if len(layers) == self._n_layers:
                weights = np.stack([np.array(layers[n]) for n in range(self._n_layers)])
                self._rows[position] = self._most(np.vstack([weights, weights.mean(axis=0)]))

    def _most(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of weights `(n_layers + 1, size)`: where the largest of the prompt's are, these, and the answer's share."""
        prompt = weights[:, : self._n_prompt]
        places = np.argpartition(-prompt, self._n_most - 1, axis=1)[:, : self._n_most]
        order = np.argsort(-np.take_along_axis(prompt, places, axis=1), axis=1, kind="stable")
        places = np.take_along_axis(places, order, axis=1)
        found = np.take_along_axis(prompt, places, axis=1)
        return np.where(found > 0, places, -1), found, weights[:, self._n_prompt :].sum(axis=1)

    def attended(self, n_answer: int) -> Attended:
        """What the tokens of an answer attended to."""
        shape = n_answer, self._n_layers + 1, self._n_most
        positions, weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        own = np.zeros(shape[:2], np.float32)
        for i in range(n_answer):
            if (row := self._rows.get(self._n_prompt - 1 + i)) is not None:
                positions[i], weights[i], own[i] = row
        n_before = n_answer if self._n_before is None else min(self._n_before, n_answer)
        return Attended(positions, weights, own, n_before)

    @property
    def positions(self) -> np.ndarray:
        """What the layers keep `(n_layers, n_kv_heads, n)`, -1 where there is nothing; all, if nothing was dropped."""
        everything = np.arange(self._n_prompt, dtype=np.int32)
        kept = [self.kept.get(i, np.tile(everything, (h, 1))) for i, h in enumerate(self.n_heads)]
        shape = len(kept), *np.max([rows.shape for rows in kept], axis=0)
        found = np.full(shape, -1, np.int32)
        for layer, rows in zip(found, kept, strict=True):
            layer[: rows.shape[0], : rows.shape[1]] = rows
        return found

    def counts(self, quota: Quota) -> np.ndarray:
        """Return what `ranked` needs of every token, `(5, n_tokens)`, if the layers were to keep `quota`.

        A head has the choice unless it keeps the token anyway, as one of the first or most recent entries.
        """
        n = self._n_prompt
        counts = np.zeros((5, n))
        for number, n_heads in enumerate(self.n_heads):
            positions = self.kept[number].ravel()
            weights = self.votes.get(number, np.zeros(positions.size)).ravel()
            kept, votes = (np.bincount(positions, w, minlength=n) for w in (None, weights))
            heads, free = np.full(n, n_heads), np.ones(n)
            free[: quota.n_sink] = free[max(0, n - quota.n_window) :] = 0
            counts += np.stack([kept, heads, kept * free, heads * free, votes * free])
        return counts
