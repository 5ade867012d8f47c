"""Creates the caches that a request with a policy uses during prefill."""

from ..caches.contract import LayerCache
from ..caches.layers import AttentionLayer, copies_sharing_entries
from ..compress.block import BlockKVCache
from ..compress.recording import RecordingKVCache
from ..entries.quota import Quota
from ..planning.request_plan import Plan


def prefill_caches(plan: Plan, layers: list[AttentionLayer], prompt_cache: list) -> list:
    """Create the caches that mlx-lm's loop reads a prompt into.

    They start with the entries of earlier turns in `prompt_cache`. The caller's own caches stay unchanged until
    compression.
    """
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
            cache = RecordingKVCache(plan.voters.start, plan.voters.stop, n_new, layer)
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
    """Create a layer's prefill cache, for `n_new` more tokens.

    A `BlockKVCache` is needed if prefill evicts or accumulates attention, or if the earlier entries are compressed or
    quantised.
    """
    policy = plan.prefill_policy
    quota = plan.prefill_quota
    evicts_once = not plan.config.evicts_in_blocks
    earlier_entries = layer.layer_cache_in(prompt_cache).held() if plan.n_earlier else None
    n_expected = n_new
    earlier_quantization = None
    if earlier_entries is not None:
        n_expected += len(earlier_entries)
        earlier_quantization = earlier_entries.quantization
        if evicts_once:
            # Keep all entries while the prompt is read.
            quota = Quota(n_expected, quota.n_sink, quota.n_window)
    # If entries are evicted only once, after prefill, the configured quantisation is applied after that, unless the
    # earlier entries are already quantised.
    is_quantised_later = evicts_once and earlier_quantization is None
    quantization = plan.config.quantization or earlier_quantization
    block_cache = BlockKVCache(
        policy,
        quota,
        policy.block,
        layer=layer,
        last=plan.voters.stop,
        newest=max(policy.obs_window, len(plan.voters)),
        quantization=None if is_quantised_later else quantization,
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
