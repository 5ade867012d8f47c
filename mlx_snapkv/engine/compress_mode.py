"""The part of a request with a policy that reads the prompt's chunks and compresses their entries."""

from typing import Any, final

import mlx.core as mx

from ..caches.layers import AttentionLayer
from ..planning.prompt_plan import fits_reason
from ..planning.request_plan import Plan
from .compress import KeptCallback, choose_entries, note_choices, put_chosen
from .pieces import Pieces
from .read import require_unchanged
from .report import CompressionReport


@final
class PolicyMode:
    """Reads a prompt with a policy, whole or in blocks between evictions, and keeps the best of its entries.

    Args:
        model: the mlx-lm model.
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: empty, or the entries of earlier turns.
        pieces: calls the model for a chunk in pieces whose scores fit in memory.
        on_kept: receives the entries that the policy keeps of each layer.
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
        """Note the request's parts; nothing is read yet."""
        self.plan = plan
        self.layers = layers
        self._prompt_cache = prompt_cache
        self._on_kept = on_kept
        # A block is as long as what fits between two evictions, and not split any further.
        self._call: Any = model if plan.options.evicts_in_blocks else pieces

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model for a chunk `(1, L)`, and return its logits."""
        return self._call(inputs, cache=cache)

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Keep the entries that the policy chooses, and note them. The caller's prompt cache changes at the end.

        Each layer chooses and is compressed while the device computes the layers before it. Python waits once, when it
        notes the choices.
        """
        plan = self.plan
        layers = self.layers
        require_unchanged(plan, layers, self._prompt_cache)
        choices = []
        for layer in layers:
            choice = choose_entries(layer, caches, plan)
            put_chosen(layer, caches, plan, choice, self._on_kept)
            choices.append(choice)
        note_choices(choices, layers, caches, report)
        self._prompt_cache[:] = caches
        report.reason = _fits_still(plan, report)


def _fits_still(plan: Plan, report: CompressionReport) -> str | None:
    """Return why no entry of the prompt was evicted under schedule="block"; None if some were."""
    if plan.decode_policy.schedule != "block" or report.entries < plan.n_prompt:
        return None
    return f"{fits_reason(plan.n_prompt, plan.prefill_policy)}; the answer is kept within it"
