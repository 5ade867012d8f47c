"""Two stages: one policy while the prompt is read, another when it has been read."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SnapKVError
from .base import Policy
from .budgets import Quota, require_room

THEN = " then "


@dataclass(frozen=True)
class Stages:
    """`reading` keeps the prompt within a fixed budget, block by block; `answering` chooses from what is left.

    Who votes at the end, and what decodes, is `answering`'s matter; `min_ctx` is `reading`'s. While reading, at
    least the sink and the recent rows that `answering` wants are kept.

    Raises:
        SnapKVError: `reading` is not a block policy.
    """

    reading: Policy
    answering: Policy

    def __post_init__(self):
        if self.reading.schedule != "block":
            raise SnapKVError(
                f"only a policy with schedule=block can be followed by another, not {self.reading}"
            )

    @property
    def stages(self) -> tuple[Policy, Policy]:
        return self.reading, self.answering

    @property
    def min_ctx(self) -> int:
        return self.reading.min_ctx

    def fits(self, n_prompt: int) -> bool:
        return self.reading.fits(n_prompt) and self.answering.fits(n_prompt)

    def reading_quotas(self, n_prompt: int, n_layers: int) -> list[Quota]:
        """What each full-attention layer keeps while the prompt is read.

        Raises:
            SnapKVError: the budget has no room for the sink and recent rows of both.
        """
        wanted = self.answering.quotas(n_prompt, n_layers)
        quotas = [
            Quota(mine.rows, max(mine.n_sink, then.n_sink), max(mine.n_window, then.n_window))
            for mine, then in zip(self.reading.quotas(n_prompt, n_layers), wanted)
        ]
        for quota in quotas:
            kept = quota.n_sink + quota.n_window
            why = f"what {self.answering.name} always keeps"
            require_room(self.reading.name, quota.rows, kept, why)
        return quotas

    def __str__(self) -> str:
        return f"{self.reading}{THEN}{self.answering}"
