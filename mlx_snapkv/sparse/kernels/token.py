"""Compute the attention of one token of a sparse answer by the GPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ...entries.queries import Captured
from .launch import MAX_MEANS, Means, attend, choose
from .self_test import why_unused

if TYPE_CHECKING:
    from ..token_ranking import TokenRanking


def why_plain(ranking: TokenRanking, queries: mx.array) -> str | None:
    """Return the reason why MLX's operations compute the attention of these queries; None if the kernels do.

    Args:
        ranking: chooses the entries that the queries read.
        queries: `(B, n_heads, L, head_dim)` of the newest tokens.
    """
    B, n_heads, L, head_dim = queries.shape
    if (B, L) != (1, 1):
        return "the kernels take one token of one request"
    if ranking.prompt_buffers is None:
        return "the kernels read plain entries in memory"
    keys, values = ranking.prompt_buffers
    if keys.shape != values.shape or keys.shape[3] != head_dim:
        return "keys, values and queries differ in size"
    if not keys.dtype == values.dtype == queries.dtype:
        return "keys, values and queries differ in dtype"
    if ranking.n_read == 0:
        return "a token chooses no entries"
    return why_unused(head_dim, n_heads // keys.shape[1], queries.dtype)


def attend_token(ranking: TokenRanking, captured: Captured, position: int) -> mx.array:
    """Compute the attention `(1, n_heads, 1, head_dim)` of one token. `why_plain` must have returned None for it.

    Args:
        ranking: chooses the entries that the token reads.
        captured: the token's queries; `ranking.answer` already holds the token's own entry.
        position: the token's position, counted from the start of the prompt.
    """
    queries, scale, sinks, *_ = captured
    assert ranking.prompt_buffers is not None
    positions, unread = _choose(ranking, captured, position)
    means = None
    if ranking.residual is not None:
        assert unread is not None
        clusters = ranking.residual.clusters
        factors = ranking.residual.log_mass, ranking.residual.temperature
        means = Means(clusters.keys, clusters.values, unread, *factors)
    return attend(
        queries,
        ranking.prompt_buffers,
        ranking.answer_buffers,
        scale,
        n_prompt=ranking.n_prompt,
        n=position + 1,
        first=ranking.n_first,
        stop=ranking.stop,
        positions=positions,
        means=means,
        sinks=sinks,
    )


def _choose(
    ranking: TokenRanking, captured: Captured, position: int
) -> tuple[mx.array, mx.array | None]:
    """Return the positions that the token chooses, and each cluster's number of unread entries (None without means).

    MLX's operations choose if there is no index in memory, or if there are more clusters than the kernels can count.
    """
    queries, scale, *_ = captured
    index, residual = ranking.view.index, ranking.residual
    buffers = None if index is None else index.codes.buffers
    if index is None or buffers is None or ranking.n_means > MAX_MEANS:
        positions = ranking.choose(captured, position)
        return positions, None if residual is None else residual.unread(positions)
    codes, powers = buffers
    return choose(
        queries,
        scale,
        projection=index.projection,
        codes=codes,
        powers=powers,
        k=ranking.n_read,
        first=ranking.n_first,
        stop=ranking.stop,
        ids=None if residual is None else residual.clusters.ids,
        choosable=None if residual is None else residual.choosable,
    )
