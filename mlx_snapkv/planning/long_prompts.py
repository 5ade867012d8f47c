"""Warnings about prompts that are too long for this machine's memory, or for the model."""

from __future__ import annotations

import shlex
from typing import Any

from ..engine.machine import this_machine
from ..engine.report import format_bytes
from ..engine.retention import RetentionConfig
from ..policies import Policy, Stages
from .plan import Planner

_PLANNED = ("max_tokens", "prefill_step_size", "kv_group_size")


class LongPrompts:
    """Warns about prompts before they are read, and says what would help.

    Args:
        model: an mlx-lm model.
        policy, memory, verify, far, options: as of `generate_step`. With `max_kv_size` there are no warnings.
    """

    def __init__(
        self,
        model: Any,
        *,
        policy: Policy | Stages | None = None,
        memory: str = "drop",
        verify: str | None = None,
        far: str | None = None,
        **options: Any,
    ):
        self._model, self._policy = model, policy
        self._retention = RetentionConfig(memory, verify, far=far)
        self._is_rotating = options.get("max_kv_size") is not None
        self._kv_bits, self._usable = options.get("kv_bits"), this_machine().usable
        self._options = {k: v for k, v in options.items() if k in _PLANNED and v is not None}
        self._planner: Planner | None = None

    def warnings(self, n_prompt: int, n_before: int = 0) -> list[str]:
        """Problems of a prompt of `n_prompt` tokens, after `n_before` that were read already."""
        if self._is_rotating:
            return []
        far = self._retention.warning(self._model, self._policy, n_before + n_prompt)
        return [said for said in (self._too_large(n_prompt), far) if said is not None]

    def _too_large(self, n_prompt: int) -> str | None:
        """A sentence if a prompt will not fit; None if it will, or if it can't be planned."""
        try:
            self._planner = self._planner or Planner(self._model, **self._options)
            plan = self._planner.plan(n_prompt, self._policy, self._kv_bits)
            if plan.peak <= self._usable:
                return None
            other, taken = self._planner.recommended(n_prompt, self._usable, self._kv_bits)
        except Exception:  # it is read all the same
            return None
        said = (
            f"{n_prompt} tokens will take about {format_bytes(plan.peak)}, and this machine has "
            f"{format_bytes(self._usable)} for models"
        )
        if not taken.fits:
            return f"{said}; no policy known here makes them fit"
        how = "--policy " + shlex.quote(other.policy) if other.policy else "the full cache"
        return f"{said}; {how} would take {format_bytes(other.peak)}"
