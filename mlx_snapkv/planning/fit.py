"""Whether a prompt fits this machine, before it is read."""

from __future__ import annotations

import shlex
from typing import Any

from ..engine.decision import PREFILL_STEP_SIZE
from ..engine.footprint import Footprint
from ..engine.report import format_bytes
from ..policies import Policy, Stages
from .blanks import arrays_of
from .machine import this_machine
from .plan import MAX_TOKENS, fitting, plan_memory

DEFAULTS: dict[str, Any] = {
    "max_tokens": MAX_TOKENS,
    "prefill_step_size": PREFILL_STEP_SIZE,
    "kv_bits": None,
    "kv_group_size": 64,
}
_MOST_HEADS = 128  # of any model, so that what is small can be told without counting


class Fit:
    """Tells of prompts that will not fit this machine's memory, and what would.

    Args:
        model: an mlx-lm model.
        policy: that prompts are compressed by, if they are.
        options: of `generate_step`; those that `plan_memory` knows count. With `max_kv_size` nothing is told.
    """

    def __init__(self, model: Any, policy: Policy | Stages | None, **options: Any):
        self._model, self._policy = model, policy
        self._is_rotating = options.get("max_kv_size") is not None
        known = {name: options[name] for name in DEFAULTS if options.get(name) is not None}
        self._options = DEFAULTS | known
        self._machine = this_machine()
        self._fits = 0  # tokens that are known to

    def warning(self, n_prompt: int) -> str | None:
        """A sentence, if a prompt of so many tokens will not fit; None if it will, or if that can't be counted."""
        try:
            if self._is_rotating or n_prompt <= self._fits:
                return None
            if self._is_small(n_prompt):
                self._fits = n_prompt
                return None
            plan = plan_memory(self._model, n_prompt, self._policy, **self._options)
            if plan.peak <= self._machine.usable:
                self._fits = n_prompt
                return None
            other = fitting(self._model, n_prompt, self._machine.usable, [plan], **self._options)
        except Exception:  # it is read all the same
            return None
        said = (
            f"{n_prompt} tokens will take about {format_bytes(plan.peak)}, and this machine has "
            f"{format_bytes(self._machine.usable)} for models"
        )
        if other is None:
            return f"{said}; no policy known here makes them fit"
        how = "--policy " + shlex.quote(other.policy) if other.policy else "the full cache"
        return f"{said}; {how} would take {format_bytes(other.peak)}"

    def _is_small(self, n_prompt: int) -> bool:
        """Whether a prompt fits by far, whatever the model is like."""
        step = self._options["prefill_step_size"]
        need = Footprint(self._model, None, None, step).need(n_prompt, self._options["max_tokens"])
        weights = sum(x.nbytes for x in arrays_of(self._model.parameters()))
        chunk = 4 * _MOST_HEADS * min(step, n_prompt) * n_prompt
        return weights + 3 * need.kv_bytes + need.rest + chunk <= self._machine.usable
