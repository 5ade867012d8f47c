"""Documents with questions, as the evaluations ask them, and the methods that answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat.prompts import common_prefix
from ..engine.prompt_plan import gate
from ..errors import SnapKVError
from .headwise import HeadWise
from .reading import AnyPolicy, shares_reading

FULL = "full cache"
BY_MASK = ", by mask"  # ends the names of methods that hide entries instead of dropping them
KNOWN, LATER = "known", "later"
SETTINGS = (KNOWN, LATER)

Place = dict[str, Any]  # a document's `task`, `length` (a number, or None) and `document`, and more


@dataclass(frozen=True)
class Question:
    """A document with a question.

    Attributes:
        prompt: token ids.
        expected: what a right answer contains, for the records.
        score: 0 to 1, of an answer's text as it was decoded.
        max_tokens: of the answer.
    """

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
    """Documents, each of which is made when it is asked about.

    Attributes:
        setting: what the prompts depend on besides the tokenizer, as a JSON object with the `task`.
    """

    tokenizer: Any
    setting: dict[str, Any]
    places: Sequence[Place]
    make: Callable[[Place], Document]


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Tokens that a prompt shares with others about the same document: at least one, never all of them."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))


@dataclass(frozen=True)
class Method:
    """How answers come about.

    Attributes:
        policy: None is the full cache; head-wise methods answer by mask.
        options: of `stream_generate`, such as `memory` and `verify`.
    """

    policy: AnyPolicy | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.policy is None:
            return FULL
        named = (f", {k} {v}" for k, v in self.options.items() if v not in ("drop", "token", None))
        by_mask = BY_MASK if isinstance(self.policy, HeadWise) else ""
        return f"{self.policy}{''.join(named)}{by_mask}"

    @property
    def scores(self) -> AnyPolicy | None:
        """The policy that scores entries."""
        return self.policy.scores if isinstance(self.policy, HeadWise) else self.policy

    @property
    def shares_reading(self) -> bool:
        return not self.options and (self.scores is None or shares_reading(self.scores))

    @property
    def memory(self) -> str:
        return self.options.get("memory", "drop")


def require_compression(methods: Iterable[Method], lengths: Sequence[int]) -> None:
    """Raises: SnapKVError: a policy would leave prompts of all these lengths as they are, or has no room for them."""
    for method in methods:
        policy = method.scores
        reasons = [None if policy is None else gate(policy, length, None) for length in lengths]
        if lengths and all(reasons):
            raise SnapKVError(f"{method.name} would compress nothing here: {reasons[-1]}")
