"""The methods that are compared: the full cache, policies and sparse attention."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SnapKVError
from ..planning.options import noted
from ..planning.prompt_plan import reason_to_leave
from .reading import AnyPolicy, shares_reading

FULL_CACHE = "full cache"
KNOWN, LATER = "known", "later"
ANSWER_SETTINGS = (KNOWN, LATER)


@dataclass(frozen=True)
class Method:
    """How answers come about: by a policy, or from the full cache (None)."""

    policy: AnyPolicy | None = None
    # Of `stream_generate`; with sparse attention a `store` is among them.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.policy is None:
            return FULL_CACHE
        named = (f", {k} {v}" for k, v in noted(self.options).items() if v not in ("memory", None))
        return f"{self.policy}{''.join(named)}"

    @property
    def shares_reading(self) -> bool:
        return not self.options and shares_reading(self.policy)


def require_compression(methods: Iterable[Method], lengths: Sequence[int]) -> None:
    """Raises: SnapKVError: a policy would leave prompts of all these lengths as they are, or has no room for them."""
    for method in methods:
        if method.policy is not None:
            reasons = [reason_to_leave(method.policy, n, None) for n in lengths]
            if lengths and all(reasons):
                raise SnapKVError(
                    f"{method.name} would compress none of the prompts: {reasons[-1]}"
                )
