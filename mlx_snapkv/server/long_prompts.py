"""What the log says of prompts that are too long for this machine's memory, or for the model."""

from __future__ import annotations

from typing import Any

from ..engine.far import beyond
from ..engine.recalling import Recall
from ..planning.fit import Fit
from .failures import log


class LongPrompts:
    """The warnings of a server.

    Args:
        generation: keywords of `CompressedBatchGenerator`: policy, memory and so on.
    """

    def __init__(self, model: Any, generation: dict[str, Any]):
        self._model, self._policy = model, generation.get("policy")
        self._fit = Fit(model, **{"policy": None} | generation)
        names = ("memory", "verify", "far")
        self._recall = Recall(**{name: generation[name] for name in names if name in generation})

    def warn(self, n_prompt: int) -> None:
        """Say what is wrong with a prompt of so many tokens, if anything is."""
        said = (
            self._fit.warning(n_prompt),
            beyond(self._model, self._policy, self._recall, n_prompt),
        )
        for sentence in said:
            if sentence is not None:
                log.warning(sentence)
