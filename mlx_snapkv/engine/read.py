"""Make the caches on which a request's prompt is read."""

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


def prefill_caches(
    plan: Plan, layers: list[AttentionLayer], prompt_cache: list, pace: ReadingPace | None = None
) -> list:
    """Return the caches on which mlx-lm's loop reads a prompt, after the earlier turns in `prompt_cache`.

    With a policy, these are new caches, so the caller's caches do not change before the compression. With sparse
    attention, the caller's caches store all entries; chunks that are read sparsely choose among them.

    Args:
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: the caller's caches, which are empty or contain earlier turns.
        pace: decides which chunks choose, if the plan has `sparse_reading`.
    """
    if plan.sparse is None:
        return _evicting_caches(plan, layers, prompt_cache)
    caches = list(prompt_cache)
    for layer in layers:
        stored = layer.cache_in(prompt_cache)
        stored.observe(plan.first, plan.last, plan.capacity)
        stored.layer = layer
        reading = plan.sparse_reading
        if reading is not None and pace is not None and not layer.borrowers:
            view = FullView([stored.store], layer)
            # For entries in files, later turns reuse the page means, because computing them reads all keys.
            means = stored.page_means if stored.in_files else PageMeans()
            ranking = PageRanking(
                view, means, reading.reach, reading.last, reading.last_from, pace.chooses
            )
            layer.put(caches, SparsePrefillKVCache(stored, ranking))
    return caches


def require_unchanged(plan: Plan, layers: list[AttentionLayer], prompt_cache: list) -> None:
    """Check that a prompt cache has not changed since the plan was made. Raises: SnapKVError: it has."""
    if any(layer.entries_in(prompt_cache).offset != plan.n_held for layer in layers):
        raise SnapKVError("another request has filled this prompt cache: give each request its own")


def _evicting_caches(plan: Plan, layers: list[AttentionLayer], prompt_cache: list) -> list:
    """Return caches with the entries of earlier turns, among which the new prompt's queries will vote."""
    caches = copies_sharing_entries(prompt_cache, layers)
    earlier = [layer.entries_in(prompt_cache) for layer in layers]
    are_full = not any(cache.is_compressed or cache.quantization for cache in earlier)
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
    """Return a cache for `n_new` tokens that evicts, accumulates attention, or continues an earlier turn."""
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
        # Entries that are still plain are quantised only once, at the compression.
        quantization=None if once and plain else plan.options.quantization,
        counting=AttentionCount() if plan.accumulates_attention else None,
    )
    block.expected_size = expected
    block.steady = range(plan.n_prompt, plan.n_prompt + plan.n_ahead)
    block.statistics_from = plan.statistics_from
    if entries is not None:
        block.offset = plan.n_held
        block.replace_entries(entries)
        block.inherit(before)
    return block
