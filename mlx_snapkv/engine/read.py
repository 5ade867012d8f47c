"""Creates the caches that a request uses during prefill."""

from ..caches.contract import LayerCache
from ..caches.layers import AttentionLayer, copies_sharing_entries
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
    """Create the caches that mlx-lm's loop reads a prompt into. They continue the earlier turns in `prompt_cache`.

    With a policy, these are new caches, so the caller's caches stay unchanged until compression. With sparse attention,
    the caller's caches store all entries, and sparse chunks choose from them.

    Args:
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: the caller's caches, which are empty or contain earlier turns.
        pace: decides which chunks are sparse, if the plan has `sparse_reading`.
    """
    if plan.sparse is None:
        return _evicting_caches(plan, layers, prompt_cache)
    caches = list(prompt_cache)
    for layer in layers:
        stored_cache = layer.cache_in(prompt_cache)
        stored_cache.observe(plan.first_voter, plan.end_of_voters, plan.capacity)
        stored_cache.layer = layer
        reading = plan.sparse_reading
        if reading is not None and pace is not None and not layer.borrowers:
            view = FullView([stored_cache.store], layer)
            # Computing page means reads all keys. If the keys are in files, store the means for later turns.
            means = stored_cache.page_means if stored_cache.in_files else PageMeans()
            ranking = PageRanking(
                view, means, reading.reach, reading.last_reach, reading.last_from, pace.chooses
            )
            layer.put(caches, SparsePrefillKVCache(stored_cache, ranking))
    return caches


def require_unchanged(plan: Plan, layers: list[AttentionLayer], prompt_cache: list) -> None:
    """Check that the prompt cache has not changed since planning. Raises: SnapKVError."""
    if any(layer.layer_cache_in(prompt_cache).offset != plan.n_earlier for layer in layers):
        raise SnapKVError("another request has filled this prompt cache: give each request its own")


def _evicting_caches(plan: Plan, layers: list[AttentionLayer], prompt_cache: list) -> list:
    """Create the prefill caches for a request that uses a policy, including the entries of earlier turns."""
    caches = copies_sharing_entries(prompt_cache, layers)
    earlier_caches = [layer.layer_cache_in(prompt_cache) for layer in layers]
    earlier_are_full = not any(
        cache.is_compressed or cache.quantization for cache in earlier_caches
    )
    n_new = plan.n_prompt + plan.n_decoded_before_compression - plan.n_earlier
    # If prefill neither evicts nor accumulates attention, it is enough to record the voters' queries.
    only_records = not plan.config.evicts_in_blocks and not plan.accumulates_attention
    for layer in layers:
        cache: LayerCache
        if only_records and earlier_are_full:
            cache = RecordingKVCache(plan.first_voter, plan.end_of_voters, n_new, layer)
            cache.statistics_from = plan.statistics_from
            if plan.n_earlier:
                cache.fill(layer.layer_cache_in(prompt_cache).held())
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
    """Create a cache that evicts, accumulates attention or continues a compressed turn, for `n_new` tokens."""
    policy = plan.prefill_policy
    quota = plan.prefill_quota
    evicts_once = not plan.config.evicts_in_blocks
    earlier_entries = layer.layer_cache_in(prompt_cache).held() if plan.n_earlier else None
    n_expected = n_new
    earlier_are_quantised = False
    if earlier_entries is not None:
        n_expected += len(earlier_entries)
        earlier_are_quantised = earlier_entries.quantization is not None
        if evicts_once:
            # Keep all entries while the prompt is read.
            quota = Quota(n_expected, quota.n_sink, quota.n_window)
    # If entries are evicted only once, they are quantised at that point, unless they already are.
    is_quantised_later = evicts_once and not earlier_are_quantised
    block_cache = BlockKVCache(
        policy,
        quota,
        policy.block,
        layer=layer,
        last=plan.end_of_voters,
        newest=max(policy.obs_window, plan.n_voters),
        quantization=None if is_quantised_later else plan.config.quantization,
        counts_attention=plan.accumulates_attention,
    )
    block_cache.expected_size = n_expected
    block_cache.steady = range(plan.n_prompt, plan.n_prompt + plan.n_fed_before_compression)
    block_cache.statistics_from = plan.statistics_from
    if earlier_entries is not None:
        block_cache.offset = plan.n_earlier
        block_cache.replace_entries(earlier_entries)
        block_cache.inherit_queries(layer.cache_in(prompt_cache))
    return block_cache
