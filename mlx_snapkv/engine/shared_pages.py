"""What all heads read beyond the trained length: pages that some head points at, whose tokens are read again."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..caches.adapter import full_cache
from ..caches.full_view import FullView
from ..caches.layers import AttentionLayer
from ..caches.reread import Reread
from ..entries.entries import Entries
from ..policies.budgets import Quota
from ..policies.snapkv import pool_votes

PAGE, PAGES = 16, 48  # entries of a page, and how many pages at most
POOLED = 3  # pages, of which the most attended one counts for the one in the middle: a fact lies across edges
NEARLY = 0.99  # of what it counts for itself, so that a page comes before those beside it
SHARE = 4 / 5  # of what a token reads beside sink and window, that these pages are at most


def most_attended(
    layers: list[AttentionLayer], quota: Quota, n: int, voted: Callable[[AttentionLayer], Entries]
) -> mx.array | None:
    """Positions of the pages that get the largest share of any head's attention by the prompt's last queries, and
    of those beside: ascending uint32 `(m,)`; None if there are too few pages.

    Some heads point at what a question asks for (Wu et al., 2024, arXiv:2404.15574). The others need to read it
    there, too, and beyond the trained length they don't find it by themselves.

    Args:
        quota: what a token of the answer reads.
        n: entries that an answer's cache begins with; the window is the last of these.
        voted: gives a layer's entries with the queries that vote.
    """
    room = quota.entries - quota.n_sink - quota.n_window
    n_pages = min(PAGES, int(SHARE * room) // PAGE)
    first, last = -(-quota.n_sink // PAGE), (n - quota.n_window) // PAGE
    if n_pages < 1 or (last - first) * PAGE <= quota.entries:
        return None
    most = mx.zeros(last - first)
    for layer in layers:
        votes = voted(layer).votes[..., first * PAGE : last * PAGE]
        pages = mx.unflatten(votes, -1, (-1, PAGE)).sum(axis=-1)
        shares = pages / mx.maximum(pages.sum(axis=-1, keepdims=True), 1e-9)
        most = mx.maximum(most, shares.max(axis=(0, 1)))
        mx.eval(most)
    most = layers[0].shard.ranks.max(most)  # all read the same tokens again
    most = mx.maximum(most, NEARLY * pool_votes(most, "max", POOLED))
    best = mx.sort(mx.argpartition(-most, n_pages - 1)[:n_pages]) + first
    return (best[:, None] * PAGE + mx.arange(PAGE)).flatten().astype(mx.uint32)


def reread(
    model, views: list[FullView], ids: mx.array | None, positions: mx.array, n_sink: int
) -> list[Reread | None]:
    """What the tokens at these positions leave in each layer when they are read again, those that are known; None of
    every layer if none is.

    An entry that was computed behind all of a long text says less than that of the same words in a short one. So they
    are read together, in order and without gaps, right behind the sink.

    Args:
        views: all entries of the layers.
        ids: of the prompt's tokens, -1 where one is not known; None if none is.
        n_sink: entries of the sink.
    """
    asked = _looked_up(mx.zeros(0, mx.int32) if ids is None else ids, positions)
    which = mx.array(np.flatnonzero(np.array(asked) >= 0).astype(np.uint32))
    if which.size == 0:
        return [None] * len(views)
    caches = make_prompt_cache(model)
    for view in views:
        heads = view.blocks().shape[:2]
        sink = mx.broadcast_to(mx.arange(n_sink, dtype=mx.uint32), (*heads, n_sink))
        view.layer.put(caches, full_cache(view.gather(sink)))
    model(asked[which][None], cache=caches)
    mx.eval([cache.state for cache in caches])
    found = (view.layer.entries_in(caches).held() for view in views)
    return [Reread(which, entries.between(n_sink, len(entries))) for entries in found]


def _looked_up(ids: mx.array, positions: mx.array) -> mx.array:
    """Ids at these positions, -1 where there is none."""
    ended = mx.concatenate([ids, mx.array([-1])])
    return ended[mx.minimum(positions, ids.size)]
