"""Documents with questions, as the evaluations ask them, and the methods that answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat.prompts import common_prefix
from ..errors import SnapKVError
from ..planning.prompt_plan import gate
from .headwise import HeadWise
from .loop import Record
from .reading import AnyPolicy, shares_reading

FULL = "full cache"
BY_MASK = ", by mask"  # ends the names of methods that hide entries instead of dropping them
KNOWN, LATER = "known", "later"
SETTINGS = (KNOWN, LATER)


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, what a right answer contains, and the score (0 to 1) of an answer's text."""

    prompt: list[int]
    expected: Any
    score: Callable[[str], float]
    max_tokens: int


@dataclass(frozen=True)
class Document:
    """A document's questions, whose prompts share their first `n_shared` tokens: at least one, never all."""

    questions: list[Question]
    n_shared: int


@dataclass(frozen=True)
class Dataset:
    """Documents, each of which is made when it is asked about."""

    tokenizer: Any
    # What the prompts depend on besides the tokenizer, as a JSON object with the `task`.
    setting: dict[str, Any]
    places: Sequence[Record]  # each document's `task`, `length` (or None), `document`, and more
    make: Callable[[Record], Document]


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Tokens that a prompt shares with others about the same document: at least one, never all of them."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))


@dataclass(frozen=True)
class Method:
    """How answers come about: by a policy, or from the full cache (None)."""

    policy: AnyPolicy | None = None
    # Of `stream_generate`; if there are any, a `memory` is.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.policy is None:
            return FULL
        default = "drop" if self.policy.evicts else "recall"
        named = (f", {k} {v}" for k, v in self.options.items() if v not in (default, None))
        by_mask = BY_MASK if isinstance(self.policy, HeadWise) else ""
        return f"{self.policy}{''.join(named)}{by_mask}"

    @property
    def scores(self) -> AnyPolicy | None:
        """The policy that scores entries."""
        return self.policy.scores if isinstance(self.policy, HeadWise) else self.policy

    @property
    def shares_reading(self) -> bool:
        return not self.options and shares_reading(self.scores)


def require_compression(methods: Iterable[Method], lengths: Sequence[int]) -> None:
    """Raises: SnapKVError: a policy would leave prompts of all these lengths as they are, or has no room for them."""
    for method in methods:
        if (policy := method.scores) is not None:
            reasons = [gate(policy, length, None) for length in lengths]
            if lengths and all(reasons):
                raise SnapKVError(
                    f"{method.name} would compress none of the prompts: {reasons[-1]}"
                )
