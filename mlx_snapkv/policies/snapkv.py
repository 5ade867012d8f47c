"""SnapKV: the queries at the end of the prompt vote for the rows that the answer needs.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024 (arXiv:2404.14469).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..votes import Rows, shared_logits
from .base import Policy


@dataclass(frozen=True)
class SnapKV(Policy):
    """Sink + `top_k` voted rows + recent window, chosen once, when the prompt has been read.

    Attributes:
        top_k: voted rows kept per KV head.
        n_sink: first rows, always kept.
        n_window: most recent rows, always kept; slides while decoding.
        obs_window: prompt queries that vote (the paper's L_obs).
        pool_kernel: odd width of the pooling over the votes; 1 is none (section 4.1). Rows near a voted
            one are kept with it, so it should be about as wide as the values to be found.
        pool: "avg" or "max".
        heads: "per_head" ranks the rows of every KV head on its own, as in the paper; "shared" is the pull
            request's way: the highest logit over heads and queries, one set for all heads.
        last_token: the observation window ends with the prompt's last token, whose query predicts the
            answer's first; False ends it one before, as the pull request does.
        lookahead: answer tokens decoded on the full rows, whose queries vote too, before the cut. None
            is 4 while generating, and none in `prefill`, which is rarely given the whole prompt.
        min_ctx: prompts with fewer tokens are left alone.
        prefill_chunk: tokens a prefill chunk at most; None follows `prefill_step_size`.

    Differs from the paper in what is always kept (its observation window; here a sink and a longer recent
    window), and pooling sees the middle only, so that votes for rows kept anyway don't leak out of them.
    """

    name: ClassVar[str] = "snapkv"

    top_k: int = 4096
    n_sink: int = 128
    n_window: int = 512
    obs_window: int = 32
    pool_kernel: int = 21
    min_ctx: int = 49152
    prefill_chunk: int | None = None
    pool: str = "avg"
    heads: str = "per_head"
    last_token: bool = True
    lookahead: int | None = None

    def __post_init__(self):
        for name in ("top_k", "n_sink", "min_ctx"):
            self._require_count(name)
        self._require_count("obs_window", least=1)
        self._require_count("n_window", least=1)
        self._require(
            "n_window", self.n_window >= self.obs_window, f"at least obs_window={self.obs_window}"
        )
        if self.lookahead is not None:
            self._require_count("lookahead", most=256)
        self._require_count("pool_kernel", least=1, most=255)
        self._require("pool_kernel", self.pool_kernel % 2 == 1, "odd")
        if self.prefill_chunk is not None:
            self._require_count("prefill_chunk", least=1)
        self._require("pool", self.pool in ("avg", "max"), "avg or max")
        self._require("heads", self.heads in ("per_head", "shared"), "per_head or shared")
        self._require("last_token", isinstance(self.last_token, bool), "true or false")
        self._require(
            "lookahead", self.last_token or not self.lookahead, "0 when last_token is false"
        )

    def score(self, rows: Rows) -> mx.array:
        """Pooled votes `(B, n_kv_heads, T)` of the middle; plain votes for sink and window."""
        votes = shared_logits(rows) if self.heads == "shared" else rows.votes
        end = votes.shape[-1] - self.n_window
        if end <= self.n_sink:
            return votes
        middle = pool_votes(votes[..., self.n_sink : end], self.pool, self.pool_kernel)
        return mx.concatenate([votes[..., : self.n_sink], middle, votes[..., end:]], axis=-1)


def pool_votes(votes: mx.array, pool: str, kernel: int) -> mx.array:
    """Pool `(..., T)` votes over `kernel` neighbours, stride 1, same length.

    "avg" pads with zeros and divides by the full kernel, "max" ignores what lies outside.
    """
    if kernel == 1:
        return votes
    T, half = votes.shape[-1], kernel // 2
    widths = [(0, 0)] * (votes.ndim - 1) + [(half, half)]
    padded = mx.pad(votes, widths, constant_values=0.0 if pool == "avg" else -mx.inf)
    shifted = [padded[..., i : i + T] for i in range(kernel)]
    if pool == "avg":
        return sum(shifted[1:], shifted[0]) / kernel
    pooled = shifted[0]
    for other in shifted[1:]:
        pooled = mx.maximum(pooled, other)
    return pooled
