"""The KV memory of requests that decode together, before they are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..engine.footprint import Footprint, Need, total_bytes
from ..engine.report import format_bytes
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..policies import Policy, Stages
from ..policies.budgets import UNLIMITED
from .entries import power_of_two


class NeverFits(SnapKVError):
    """A request needs more memory than there will ever be."""


class Memory:
    """The KV memory of a batch.

    Args:
        policy: None is full caches, in mlx-lm's one batch.
        quantization: of compressed entries.
        step_size: tokens to read at a time, at most.
        limit: bytes.
    """

    def __init__(
        self,
        model,
        policy: Policy | Stages | None,
        quantization: Quantization | None,
        step_size: int,
        limit: int,
    ):
        self._policy, self.limit = policy, limit
        self._footprint = Footprint(model, policy, quantization, step_size)

    def need(self, n_prompt: int, max_tokens: int) -> Need:
        """What a request takes.

        Raises:
            NeverFits: it would not fit alone.
            SnapKVError: the policy can't serve it.
        """
        found = self._footprint.need(n_prompt, max_tokens)
        alone = self.together([found], [found])
        if alone > self.limit:
            raise NeverFits(
                f"its {n_prompt} prompt tokens and {max_tokens} of the answer need {format_bytes(alone)} of KV "
                f"memory, and max_kv_bytes is {format_bytes(self.limit)}: raise it"
            )
        return found

    def together(self, needs: Iterable[Need], unread: Iterable[Need]) -> int:
        """Bytes of requests at once, those `unread` among them still to be read.

        Requests of a group have equally many rows, as many as the longest.
        """
        needs = list(needs)
        longest: dict[bool, list[int]] = {}
        for need in needs:
            before = longest.setdefault(need.fixed, [0] * len(need.entries))
            longest[need.fixed] = list(map(max, before, need.entries))
        held = 0
        for need in needs:
            most = zip(need.entries, longest[need.fixed])
            counts = [min(n, self._padded(own, need.fixed)) for own, n in most]
            held += need.rest + total_bytes(need.row_bytes, counts)
        return held + sum(need.reading for need in unread)

    def fits(self, new: Need, active: Iterable[tuple[Need, bool]], held: int) -> bool:
        """Whether one more request can be admitted; the arguments are those of `with_another`."""
        active = list(active)
        return not active or self.with_another(new, active, held) <= self.limit

    def with_another(self, new: Need, active: Iterable[tuple[Need, bool]], held: int) -> int:
        """Bytes that are taken at most once another request has been admitted.

        Args:
            active: what the others need, and whether each is still to be read.
            held: bytes that their caches have now.
        """
        active = list(active)
        needs = [need for need, _ in active]
        unread = [need for need, is_unread in active if is_unread]
        planned = self.together([*needs, new], [*unread, new])
        return max(held + self.together([new], [new]), planned)

    def _padded(self, n: int, fixed: bool) -> int:
        """Rows that a request of `n` entries has in a group, at most."""
        if self._policy is None:
            return UNLIMITED
        return power_of_two(n) if fixed else 2 * power_of_two(n)


def under_way(requests: Iterable[Any], stays: bool) -> list[tuple[Need, bool]]:
    """What requests with a `need` and a `report` take, and whether each still holds what its prompt is read with.

    Args:
        stays: they hold it until their answers end, which read it again and again.
    """
    return [(r.need, stays or r.report is None) for r in requests if r.need is not None]
