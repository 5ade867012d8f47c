"""Where a prompt's entries stay while its answer is decoded, and what the report notes of it."""

from ..caches.layers import AttentionLayer, file_bytes, kv_bytes, kv_dtype
from ..planning.request_plan import Plan
from .report import CompressionReport


def offload(layers: list[AttentionLayer], prompt_cache: list) -> None:
    """Put a prompt's entries to where they are kept; SnapKVError if there is no room, and some stay in memory."""
    for layer in layers:
        layer.cache_in(prompt_cache).offload()


def note_memory(
    plan: Plan,
    layers: list[AttentionLayer],
    prompt_cache: list,
    caches: list,
    report: CompressionReport,
) -> None:
    """Note in the report what the answer reads from `caches`, and what stays of the prompt beside it."""
    if plan.sparse is not None:
        kept = [layer.cache_in(prompt_cache) for layer in layers]
        report.kv_bytes_staying = sum(cache.kv_nbytes for cache in kept)
        # Tokens read the index by which they choose.
        report.kv_bytes_staying -= sum(cache.index_nbytes for cache in kept)
        report.file_bytes = file_bytes(prompt_cache)
    elif plan.decode_policy.schedule == "block":
        report.block = plan.decode_policy.block
    report.kv_bytes_after = kv_bytes(caches) + report.kv_bytes_staying
    report.kv_dtype = kv_dtype(layers[0].entries_in(caches))
