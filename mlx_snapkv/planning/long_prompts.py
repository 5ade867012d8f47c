"""What is said of prompts that are too long for this machine's memory, or for the model."""

from __future__ import annotations

from typing import Any

from ..engine.far import beyond
from ..engine.recalling import Recall
from ..policies import Policy, Stages
from .fit import Fit


class LongPrompts:
    """Sentences about prompts before they are read, with what would help.

    Args:
        model: an mlx-lm model.
        policy, memory, verify, far, options: as of `generate_step`.
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
        self._recall = Recall(memory, verify, far=far)
        self._is_rotating = options.get("max_kv_size") is not None
        self._fit = Fit(model, policy, **options)

    def warnings(self, n_prompt: int, n_before: int = 0) -> list[str]:
        """What is wrong with a prompt of so many tokens, after those that have been read already."""
        said = [self._fit.warning(n_prompt)]
        if not self._is_rotating:
            said.append(beyond(self._model, self._policy, self._recall, n_before + n_prompt))
        return [sentence for sentence in said if sentence is not None]
