"""The hit rate H of SnapKV's section 3: do the entries that were voted for serve the tokens that follow?"""

import mlx.core as mx

from ..errors import SnapKVError


def hit_rate(attention: mx.array, kept: mx.array, theta: float = 0.05) -> float:
    """Share of the significant attention that falls on kept positions.

    H = sum(O) / sum(1(A_cur > theta)) with O the significant positions that were voted for, summed over
    heads (and queries, if there are several).

    Args:
        attention: A_cur, softmax-normalised, `(..., n_heads, L_prefix)`.
        kept: the voted positions, integer `(..., n_heads, k)`, with the same leading shape.
        theta: what counts as significant, 0 to 1; the paper uses 0.05.

    Returns:
        0 to 1, or NaN if no attention exceeds `theta`.

    Raises:
        SnapKVError: the leading shapes differ.
    """
    if attention.shape[:-1] != kept.shape[:-1]:
        raise SnapKVError(
            f"attention {attention.shape} and kept {kept.shape} must agree in all but their last axis"
        )
    voted = mx.put_along_axis(
        mx.zeros(attention.shape), kept.astype(mx.uint32), mx.array(1.0), axis=-1
    )
    significant = (attention > theta).astype(mx.float32)
    total, hits = significant.sum(), (significant * voted).sum()
    return (hits / total).item() if total.item() else float("nan")  # type: ignore[return-value]
