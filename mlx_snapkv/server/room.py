"""Whether there is memory for one more request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..batch.memory import Memory, under_way
from ..batch.openai_body import Body
from ..batch.openai_request import Asked
from ..engine.decision import PREFILL_STEP_SIZE
from ..entries.quantization import Quantization
from .loaded import Loaded
from .prefixes import Prefixes
from .requests import Running, Waiting

USUAL_ANSWER = 2048  # tokens that room is kept for, where a request does not say


class Room:
    """The KV memory of requests and of prefixes, which give way to them.

    Args:
        generation: keywords of `CompressedBatchGenerator`: policy, memory and so on.
        most_bytes: None is no limit.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        loaded: Loaded,
        generation: dict[str, Any],
        most_bytes: int | None,
    ):
        self._prefixes = prefixes
        self._stays = generation.get("verify") is not None
        self._memory: Memory | None = None
        if most_bytes is not None:
            bits = generation.get("kv_bits")
            how = None if bits is None else Quantization(bits, generation["kv_group_size"])
            step_size = generation.get("prefill_step_size", PREFILL_STEP_SIZE)
            self._memory = Memory(
                loaded.model, generation.get("policy"), how, step_size, most_bytes
            )

    def need(self, body: Body, wanted: Asked) -> Any:
        """What a request will take; None if nobody wants to know.

        Raises:
            SnapKVError: more than there will ever be.
        """
        if self._memory is None:
            return None
        told = body.max_completion_tokens or body.max_tokens
        return self._memory.need(len(wanted.prompt), told or min(wanted.max_tokens, USUAL_ANSWER))

    def make(self, waiting: Waiting, running: Iterable[Running], held: int) -> bool:
        """Whether a request can be read next to those running, whose caches hold `held` bytes; prefixes give way."""
        if self._memory is None or waiting.need is None:
            return True
        active = under_way(running, self._stays)
        if not self._memory.fits(waiting.need, active, held):
            return False
        taken = self._memory.with_another(waiting.need, active, held)
        self._prefixes.trim_to(n_bytes=self._memory.limit - taken)
        return True

    def give_way(self, held: int) -> None:
        """Give up prefixes that the caches of running requests, `held` bytes, leave no room for."""
        if self._memory is not None:
            self._prefixes.trim_to(n_bytes=self._memory.limit - held)
