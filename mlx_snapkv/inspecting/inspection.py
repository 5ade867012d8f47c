"""What is known of a prompt that was compressed and answered."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..engine.report import CompressionReport
from .sentences import Sentence
from .spans import Span


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


@dataclass(frozen=True, eq=False)
class Inspection:
    """What a policy kept of a prompt, and what the answer attended to.

    Attributes:
        policy: as its command-line string.
        tokens: the prompt's ids.
        text: what they say.
        spans: of each token in the text; tokens that only make a character together share theirs.
        layers: the model's layers with entries, by their number from 0; the rows of `positions`.
        layers_without: those without: linear or state-space layers, and sliding windows, which forget by themselves.
        heads: KV heads of each of `layers`.
        positions: int32 `(n_layers, n_kv_heads, n_kept)`, the tokens whose entries each head keeps, in order. -1 behind
            them where a layer keeps fewer, or has fewer heads.
        sentences: those of which anything is kept, the most kept first (see `Sentence`); none if nothing was dropped.
        report: what the compression did, or why nothing was dropped: then all positions are kept.
        answer: its text.
        answer_tokens: its tokens' texts, one after the other.
        attended: what these attended to.
    """

    policy: str
    tokens: tuple[int, ...]
    text: str
    spans: tuple[Span, ...]
    layers: tuple[int, ...]
    layers_without: tuple[int, ...]
    heads: tuple[int, ...]
    positions: np.ndarray
    sentences: tuple[Sentence, ...]
    report: CompressionReport
    answer: str
    answer_tokens: tuple[str, ...]
    attended: Attended

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def kept(self) -> np.ndarray:
        """Bool `(n_layers, n_kv_heads, n_tokens)`: which head keeps which token's entry."""
        kept = np.zeros((*self.positions.shape[:2], self.n_tokens + 1), bool)
        # What is none falls off the end.
        np.put_along_axis(kept, self.positions.astype(np.int64), True, axis=-1)
        return kept[..., :-1]

    @property
    def shares(self) -> list[float | None]:
        """Of each of `layers`, the share (0 to 1) of the voters' attention that went to what is kept, if known."""
        known = self.report.attention_share
        return [known[layer] if known else None for layer in self.layers]

    def density(self, n_columns: int) -> np.ndarray:
        """`(n_layers, n_columns)`, 0 to 1: of the entries in each part of the prompt, the share that is kept."""
        edges = np.linspace(0, self.n_tokens, min(n_columns, self.n_tokens) + 1).round().astype(int)
        counts = np.add.reduceat(self.kept.sum(axis=1), edges[:-1], axis=1)
        return counts / np.diff(edges) / np.array(self.heads)[:, None]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it; positions are lists without their -1."""
        each = zip(self.layers, self.positions, self.heads, self.shares, strict=True)
        layers = [
            {
                "layer": layer,
                "attention_share": share,
                "positions": [row[row >= 0].tolist() for row in rows[:n_heads]],
            }
            for layer, rows, n_heads, share in each
        ]
        return {
            "policy": self.policy,
            "report": self.report.to_dict(),
            "layers": layers,
            "layers_without_entries": list(self.layers_without),
            "sentences": [asdict(sentence) for sentence in self.sentences],
            "answer": {
                "text": self.answer,
                "predicted_before_compression": self.attended.n_before,
                "tokens": [self._token(i) for i in range(len(self.answer_tokens))],
            },
        }

    def _token(self, i: int) -> dict[str, Any]:
        """An answer's token, and what it attended to, over all layers."""
        found = self.attended
        n = int((found.positions[i, -1] >= 0).sum())
        return {
            "text": self.answer_tokens[i],
            "positions": found.positions[i, -1, :n].tolist(),
            "weights": [round(float(x), 6) for x in found.weights[i, -1, :n]],
            "own": round(float(found.own[i, -1]), 6),
        }
