"""Prefill and compression for requests with a policy."""

from typing import Any, final

import mlx.core as mx

from ..caches.layers import AttentionLayer
from ..planning.prompt_plan import uncompressed_reason
from ..planning.request_plan import Plan
from .compress import KeptCallback, choose_entries, note_choices, put_compressed_cache
from .pieces import Pieces
from .read import require_unchanged
from .report import CompressionReport


@final
class PolicyMode:
    """The mode for requests with a policy that evicts entries.

    Args:
        model: the mlx-lm model.
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: the caller's prompt cache, which is empty or contains earlier turns.
        pieces: calls the model, and splits chunks whose scores would not fit in memory.
        on_kept: called for each layer with the kept entries.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        layers: list[AttentionLayer],
        prompt_cache: list,
        pieces: Pieces,
        on_kept: KeptCallback | None = None,
    ):
        """Create the mode."""
        self.plan = plan
        self.layers = layers
        self._prompt_cache = prompt_cache
        self._on_kept = on_kept
        # Chunks fit between evictions if schedule="block", so they are not split.
        self._call_model: Any = model if plan.config.evicts_in_blocks else pieces

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model on a chunk `(1, L)`, and return the logits."""
        return self._call_model(inputs, cache=cache)

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Replace `caches` with compressed caches, then update the caller's prompt cache.

        Layers are queued without waiting for the device. Python blocks only once, in `note_choices`.
        """
        plan = self.plan
        layers = self.layers
        require_unchanged(plan, layers, self._prompt_cache)
        choices = []
        for layer in layers:
            choice = choose_entries(layer, caches, plan)
            put_compressed_cache(layer, caches, plan, choice, self._on_kept)
            choices.append(choice)
        note_choices(choices, layers, caches, report)
        self._prompt_cache[:] = caches
        report.reason = _why_none_evicted(plan, report)


def _why_none_evicted(plan: Plan, report: CompressionReport) -> str | None:
    """With schedule="block", explain why no prompt entries were evicted. In all other cases, return None."""
    if plan.decode_policy.schedule != "block" or report.entries < plan.n_prompt:
        return None
    reason = uncompressed_reason(plan.n_prompt, plan.prefill_policy)
    return f"{reason}; the answer is kept within it"
