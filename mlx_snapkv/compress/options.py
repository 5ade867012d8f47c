"""The setting of a request that evicts entries: one policy, or one while the prompt is read and another afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..entries.quota import Quota
from ..errors import SnapKVError
from .policies import policy_named
from .policy import Policy

THEN = " then "  # separates two policies in a string


@dataclass(frozen=True)
class Compress:
    """Evict entries: `policy` chooses while the prompt is read, `decode_policy` once it has been read.

    By default one policy does both. A `policy` that another one follows must have schedule="block". It keeps at least
    the sink and the recent window of the decode policy, which decides who votes at the prompt's end and how the answer
    is decoded.

    Raises: SnapKVError: `policy` has schedule="once" and another policy follows.
    """

    policy: Policy
    decode_policy: Policy = None  # type: ignore[assignment]  # by default `policy`

    def __post_init__(self):
        """Use `policy` for decoding, too, if no `decode_policy` is given."""
        if self.decode_policy is None:
            object.__setattr__(self, "decode_policy", self.policy)
        elif self.policy.schedule != "block":
            raise SnapKVError(
                f"only a policy with schedule=block can be followed by another, not {self.policy}"
            )

    @classmethod
    def from_string(cls, text: str) -> Compress:
        """Return the setting of a string such as `"keydiff:budget=8192"`, or of two policies joined by " then ".

        Raises: SnapKVError: the string can't be read.
        """
        policies = [policy_named(part) for part in text.split(THEN)]
        if len(policies) > 2:
            raise SnapKVError(
                f"policy must be one policy or two joined by 'then', got {len(policies)} in {text!r}"
            )
        return cls(*policies)

    @property
    def evicts_in_blocks(self) -> bool:
        """Return whether entries are evicted while the prompt is read."""
        return self.policy.schedule == "block"

    @property
    def policies(self) -> tuple[Policy, Policy]:
        """Return the policy of the prompt and the policy of the answer."""
        return self.policy, self.decode_policy

    @property
    def accumulates_attention(self) -> bool:
        """Return whether a policy asks for the attention of all queries."""
        return any(policy.accumulates_attention for policy in self.policies)

    @property
    def observes(self) -> bool:
        """Return whether a policy asks for queries, or for statistics computed from them."""
        return any(policy.observes for policy in self.policies)

    @property
    def statistics_from(self) -> int | None:
        """Return the first position that counts in the query statistics; None if no policy asks for statistics."""
        positions = [policy.query_statistics for policy in self.policies]
        return min((position for position in positions if position is not None), default=None)

    def fits(self, n_prompt: int) -> bool:
        """Return whether a prompt of `n_prompt` tokens is within both budgets."""
        return all(policy.fits(n_prompt) for policy in self.policies)

    def prefill_quota(self, n_prompt: int) -> Quota:
        """Return the entries that each full-attention layer keeps while the prompt is read: all, under "once"."""
        quota = self.policy.quota(n_prompt)
        if not self.evicts_in_blocks:
            return replace(quota, entries=max(quota.entries, n_prompt))
        decode_quota = self.decode_policy.quota(n_prompt)
        return Quota(
            entries=quota.entries,
            n_sink=max(quota.n_sink, decode_quota.n_sink),
            n_window=max(quota.n_window, decode_quota.n_window),
        ).shrunk()

    def __str__(self) -> str:
        """Return the setting as a command line takes it, such as "keydiff then snapkv:top_k=2048"."""
        if self.decode_policy is self.policy:
            return str(self.policy)
        return f"{self.policy}{THEN}{self.decode_policy}"
