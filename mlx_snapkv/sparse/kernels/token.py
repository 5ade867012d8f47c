"""Compute the sparse attention of one answer token with the GPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ...entries.queries import CapturedQueries
from .launch import MAX_MEANS, Means, attend, choose
from .self_test import why_unused

if TYPE_CHECKING:
    from ..token_ranking import TokenRanking


def why_plain_path(ranking: TokenRanking, queries: mx.array) -> str | None:
    """Return why the kernels can't compute the attention of these queries, or None if they can.

    Args:
        ranking: chooses the entries that the queries read.
        queries: queries of the newest tokens, `(B, n_heads, L, head_dim)`.
    """
    B, n_heads, L, head_dim = queries.shape
    if (B, L) != (1, 1):
        return "the kernels take one token of one request"
    if ranking.prompt.buffers is None:
        return "the kernels read plain entries in memory"
    keys, values = ranking.prompt.buffers
    n_kv_heads = keys.shape[1]
    if keys.shape != values.shape or keys.shape[3] != head_dim:
        return "keys, values and queries differ in size"
    if not keys.dtype == values.dtype == queries.dtype:
        return "keys, values and queries differ in dtype"
    if ranking.n_chosen == 0:
        return "a token chooses no entries"
    return why_unused(head_dim, n_heads // n_kv_heads, queries.dtype)


def attend_token(ranking: TokenRanking, captured: CapturedQueries, position: int) -> mx.array:
    """Compute one token's attention, `(1, n_heads, 1, head_dim)`. Call this only if `why_plain_path` returns None.

    Args:
        ranking: chooses the entries that the token reads.
        captured: the token's queries. The token's own entry is already in `ranking.answer`.
        position: position of the token, counted from the start of the prompt.
    """
    assert ranking.prompt.buffers is not None
    positions, n_unread = _choose(ranking, captured, position)
    means = None
    if ranking.residual is not None:
        assert n_unread is not None
        means = Means.of(ranking.residual, n_unread)
    return attend(
        captured.queries,
        ranking.prompt.buffers,
        ranking.answer_buffers,
        captured.scale,
        n_prompt=ranking.n_prompt,
        n_entries=position + 1,
        n_sink=ranking.n_sink,
        choice_stop=ranking.choice_stop,
        positions=positions,
        means=means,
        sinks=captured.sinks,
    )


def _choose(
    ranking: TokenRanking, captured: CapturedQueries, position: int
) -> tuple[mx.array, mx.array | None]:
    """Return the positions of the token's chosen entries, and the number of unread entries in each cluster.

    The second result is None if there are no means. If there is no index in memory, or if there are more clusters than
    the kernels can count, plain MLX operations are used.
    """
    index, residual = ranking.view.index, ranking.residual
    code_buffers = None if index is None else index.codes.buffers
    has_too_many_means = ranking.n_means > MAX_MEANS
    if index is None or code_buffers is None or has_too_many_means:
        positions = ranking.choose(captured, position)
        n_unread = None if residual is None else residual.count_unread(positions)
        return positions, n_unread
    codes, powers = code_buffers
    return choose(
        captured.queries,
        captured.scale,
        projection=index.query_projection,
        codes=codes,
        powers=powers,
        n_chosen=ranking.n_chosen,
        n_sink=ranking.n_sink,
        choice_stop=ranking.choice_stop,
        ids=None if residual is None else residual.clusters.ids,
        choosable=None if residual is None else residual.choosable,
    )
