"""A request's eviction options: one policy, or one for the prompt and one for the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..entries.quota import Quota
from ..errors import SnapKVError
from .policies import policy_named
from .policy import Policy

THEN = " then "  # separates two policies in a string


@dataclass(frozen=True)
class Compress:
    """Evicts entries with one policy, or with one for the prompt and another for the answer.

    If `policy` has schedule="block", it evicts entries while the prompt is read, and keeps the larger of the two
    policies' sinks and the larger of their windows. `decode_policy` evicts at the end of the prompt and, unless it
    `grows`, during the answer. At the end of the prompt, the prompt's last queries vote, at most
    `decode_policy.obs_window` of them. If `decode_policy` accumulates attention, all of the prompt's queries vote.

    `decode_policy` defaults to `policy`. If it is set, `policy` must have schedule="block".

    Raises: SnapKVError: `decode_policy` is set, but `policy` has schedule="once".
    """

    policy: Policy
    decode_policy: Policy = None  # type: ignore[assignment]  # defaults to `policy`

    def __post_init__(self):
        """Default `decode_policy` to `policy`."""
        if self.decode_policy is None:
            object.__setattr__(self, "decode_policy", self.policy)
        elif self.policy.schedule != "block":
            raise SnapKVError(
                f"only a policy with schedule=block can be followed by another, not {self.policy}"
            )

    @classmethod
    def from_string(cls, text: str) -> Compress:
        """Parse a string such as `"keydiff:budget=8192"`, or two such strings joined by " then ".

        Raises: SnapKVError: the string is invalid.
        """
        # Pad the text so that a "then" at its start or end is found too.
        parts = [part.strip() for part in f" {text} ".split(THEN)]
        if len(parts) > 1 and "" in parts:
            place = "after" if parts[0] else "before"
            raise SnapKVError(f"a policy is missing {place} 'then' in {text!r}: name one")
        policies = [policy_named(part) for part in parts]
        if len(policies) > 2:
            raise SnapKVError(
                f"policy must be one policy or two joined by 'then', got {len(policies)} in {text!r}"
            )
        return cls(*policies)

    @property
    def evicts_in_blocks(self) -> bool:
        """Return whether entries are evicted while the prompt is still being read."""
        return self.policy.schedule == "block"

    @property
    def policies(self) -> tuple[Policy, Policy]:
        """Return the prompt's policy and the answer's policy."""
        return self.policy, self.decode_policy

    @property
    def accumulates_attention(self) -> bool:
        """Return whether either policy needs the attention of all queries."""
        return any(policy.accumulates_attention for policy in self.policies)

    @property
    def observes(self) -> bool:
        """Return whether either policy needs queries or their statistics."""
        return any(policy.observes for policy in self.policies)

    @property
    def statistics_from(self) -> int | None:
        """Return the position where query statistics start, or None if neither policy needs them."""
        positions = [policy.query_statistics for policy in self.policies]
        return min((position for position in positions if position is not None), default=None)

    def fits(self, n_prompt: int) -> bool:
        """Return whether a prompt of `n_prompt` tokens fits both policies' budgets."""
        return all(policy.fits(n_prompt) for policy in self.policies)

    def prefill_quota(self, n_prompt: int) -> Quota:
        """Return each full-attention layer's quota while the prompt is read.

        With schedule="once", the quota covers the whole prompt.
        """
        quota = self.policy.quota(n_prompt)
        if not self.evicts_in_blocks:
            return replace(quota, entries=max(quota.entries, n_prompt))
        decode_quota = self.decode_policy.quota(n_prompt)
        return Quota(
            entries=quota.entries,
            n_sink=max(quota.n_sink, decode_quota.n_sink),
            n_window=max(quota.n_window, decode_quota.n_window),
        ).shrunk_to_fit()

    def __str__(self) -> str:
        """Return a string such as "keydiff then snapkv:top_k=2048"."""
        if self.decode_policy is self.policy:
            return str(self.policy)
        return f"{self.policy}{THEN}{self.decode_policy}"
