"""Two stages: one policy while the prompt is read, another when it has been read."""

from dataclasses import dataclass

from ..errors import SnapKVError
from .base import Policy
from .budgets import Quota, require_room

THEN = " then "


@dataclass(frozen=True)
class Stages:
    """Keep the prompt within a fixed budget, block by block, by one policy, and let another choose from what is left.

    Attributes:
        prefill_policy: who chooses while the prompt is read, with schedule="block"; `min_ctx` is its own. It keeps
            at least the sink and the recent entries that the other one wants.
        decode_policy: who chooses when it has been read. Who votes then, and what decodes, is its matter.

    Raises:
        SnapKVError: `prefill_policy` is not a block policy, or has no room for what `decode_policy` always keeps, or
            that one needs all entries.
    """

    prefill_policy: Policy
    decode_policy: Policy

    def __post_init__(self):
        if self.prefill_policy.schedule != "block":
            raise SnapKVError(
                f"only a policy with schedule=block can be followed by another, not {self.prefill_policy}"
            )
        if self.decode_policy.repeats is not None:
            raise SnapKVError(
                f"{self.decode_policy.name} reads all of a prompt again, so no policy can come before it: give it alone"
            )
        if all(isinstance(stage.budget, int) for stage in self.stages):
            self.prefill_quotas(1, 1)  # the same for every prompt

    @property
    def stages(self) -> tuple[Policy, Policy]:
        return self.prefill_policy, self.decode_policy

    reads_in_blocks = True

    @property
    def min_ctx(self) -> int:
        return self.prefill_policy.min_ctx

    def fits(self, n_prompt: int) -> bool:
        return self.prefill_policy.fits(n_prompt) and self.decode_policy.fits(n_prompt)

    def prefill_quotas(self, n_prompt: int, n_layers: int) -> list[Quota]:
        """What each full-attention layer keeps while the prompt is read.

        Raises:
            SnapKVError: the budget has no room for the sink and recent entries of both.
        """
        wanted = self.decode_policy.quotas(n_prompt, n_layers)
        quotas = [
            Quota(mine.entries, max(mine.n_sink, then.n_sink), max(mine.n_window, then.n_window))
            for mine, then in zip(self.prefill_policy.quotas(n_prompt, n_layers), wanted)
        ]
        for quota in quotas:
            kept = quota.n_sink + quota.n_window
            why = f"what {self.decode_policy.name} always keeps"
            require_room(self.prefill_policy.name, quota.entries, kept, why)
        return quotas

    def __str__(self) -> str:
        return f"{self.prefill_policy}{THEN}{self.decode_policy}"
