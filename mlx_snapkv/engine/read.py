"""The caches that a request's prompt is read on, made by its plan."""

from ..caches.contract import LayerCache
from ..caches.layers import AttentionLayer, copies_sharing_entries
from ..compress.attention_count import AttentionCount
from ..compress.block import BlockKVCache
from ..compress.recording import RecordingKVCache
from ..entries.quota import Quota
from ..errors import SnapKVError
from ..planning.request_plan import Plan
from ..sparse.full_view import FullView
from ..sparse.page_means import PageMeans
from ..sparse.page_ranking import PageRanking
from ..sparse.prefill_cache import SparsePrefillKVCache
from .reading_pace import ReadingPace


def reading_caches(
    plan: Plan, layers: list[AttentionLayer], prompt_cache: list, pace: ReadingPace | None = None
) -> list:
    """Return the caches that mlx-lm's loop reads a prompt on, after the earlier turns in `prompt_cache`.

    With a policy they are new caches: the caller's list and caches do not change before the request compresses. With
    sparse attention the caller's caches hold all entries, and chunks that are read sparsely choose among them.

    Args:
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: the caller's caches, empty or with the entries of earlier turns.
        pace: says which chunks choose, if the plan has `sparse_reading`.
    """
    if plan.sparse is None:
        return _evicting_caches(plan, layers, prompt_cache)
    caches = list(prompt_cache)
    for layer in layers:
        everything = layer.cache_in(prompt_cache)
        everything.observe(plan.first, plan.last, plan.capacity)
        everything.layer = layer
        reading = plan.sparse_reading
        if reading is not None and pace is not None and not layer.borrowers:
            view = FullView([everything.store], layer)
            # Page means of entries in files are kept for later turns, which would read all keys again.
            means = everything.page_means if everything.in_files else PageMeans()
            ranking = PageRanking(
                view, means, reading.reach, reading.last, reading.last_from, pace.chooses
            )
            layer.put(caches, SparsePrefillKVCache(everything, ranking))
    return caches


def require_unchanged(plan: Plan, layers: list[AttentionLayer], prompt_cache: list) -> None:
    """Raise SnapKVError if a prompt cache holds other tokens than when the plan was made."""
    if any(layer.entries_in(prompt_cache).offset != plan.n_held for layer in layers):
        raise SnapKVError("another request has filled this prompt cache: give each request its own")


def _evicting_caches(plan: Plan, layers: list[AttentionLayer], prompt_cache: list) -> list:
    """Return caches that begin with the entries of earlier turns, over which the new tokens' queries vote, too."""
    caches = copies_sharing_entries(prompt_cache, layers)
    held = [layer.entries_in(prompt_cache) for layer in layers]
    are_full = not any(cache.is_compressed or cache.quantization for cache in held)
    n_new = plan.n_prompt + plan.n_ahead + 1 - plan.n_held
    accumulates = plan.accumulates_attention
    once = not plan.options.evicts_in_blocks
    for layer in layers:
        cache: LayerCache
        if once and not accumulates and are_full:
            cache = RecordingKVCache(plan.first, plan.last, n_new, layer)
            cache.statistics_from = plan.statistics_from
            if plan.n_held:
                cache.fill(layer.entries_in(prompt_cache).held())
        else:
            cache = _block_cache(plan, layer, prompt_cache, n_new)
        layer.put(caches, cache)
    return caches


def _block_cache(
    plan: Plan,
    layer: AttentionLayer,
    prompt_cache: list,
    n_new: int,
) -> BlockKVCache:
    """Return a cache for `n_new` tokens that evicts, sums up attention, or continues an earlier turn."""
    policy = plan.prefill_policy
    quota = plan.prefill_quota
    once = not plan.options.evicts_in_blocks
    before = layer.cache_in(prompt_cache)
    entries = layer.entries_in(prompt_cache).held() if plan.n_held else None
    expected = n_new
    if entries is not None:
        expected += len(entries)
        quota = Quota(expected, quota.n_sink, quota.n_window) if once else quota
    plain = entries is None or entries.quantization is None
    block = BlockKVCache(
        policy,
        quota,
        policy.block,
        layer=layer,
        last=plan.last,
        newest=max(policy.obs_window, plan.n_voters),
        # Entries are quantised once: at the compression, unless they are quantised already.
        quantization=None if once and plain else plan.options.quantization,
        counting=AttentionCount() if plan.accumulates_attention else None,
    )
    block.expected = expected
    block.steady = range(plan.n_prompt, plan.n_prompt + plan.n_ahead)
    block.statistics_from = plan.statistics_from
    if entries is not None:
        block.offset = plan.n_held
        block.hold(entries)
        block.inherit(before)
    return block
