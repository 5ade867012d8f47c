"""What an answer is decoded from: what stays beside it, what a token reads, and what verifies it."""

from typing import Any

from ..caches.layers import AttentionLayer, file_bytes, kv_bytes, kv_dtype
from ..planning.request_plan import Plan
from .pieces import Pieces
from .report import CompressionReport, Verified
from .self_speculation import SelfSpeculation


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
    if plan.options.retains:
        kept = [layer.cache_in(prompt_cache) for layer in layers]
        report.kv_bytes_staying = sum(cache.kv_nbytes for cache in kept)
        if plan.options.is_sparse:  # whose tokens read the index by which they choose
            report.kv_bytes_staying -= sum(cache.index_nbytes for cache in kept)
        report.file_bytes = file_bytes(prompt_cache)
    report.kv_bytes_after = kv_bytes(caches) + report.kv_bytes_staying
    report.kv_dtype = kv_dtype(layers[0].entries_in(caches))
    if plan.decode_policy.schedule == "block":
        report.block = plan.decode_policy.block


def verifying(
    model: Any,
    layers: list[AttentionLayer],
    prompt_cache: list,
    caches: list,
    pieces: Pieces,
    report: CompressionReport,
) -> SelfSpeculation:
    """Makes the model's calls for an answer that `caches` draft, and all entries of a prompt verify."""
    full = list(prompt_cache)
    for layer in layers:
        layer.put(full, layer.cache_in(full).growing_cache())
    stored = layers[0].cache_in(prompt_cache).store.quantization
    report.verified = Verified(bits=None if stored is None else stored.bits)
    return SelfSpeculation(model, full, list(caches), report.verified, pieces)
