"""What the caches have in common that evict by themselves, whoever drives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.queries import Queries, Recorder
from ..errors import SnapKVError, TrimError
from ..models import AttentionFamily
from ..policies import Policy, resolve_policy


class SelfEvicting(Recorder, ABC):
    """Mixed into a cache: a policy scores its rows, and what that did can be taken back.

    Attributes:
        policy: who chooses. If it votes, the attention class must be patched while tokens are fed.
        block: tokens to be fed at a time, at most.
    """

    policy: Policy
    block: int
    _family: AttentionFamily | None = None
    _before: dict[str, Any] | None = None  # the state before an eviction made for now

    @property
    @abstractmethod
    def room(self) -> int:
        """Tokens that fit in before the next eviction."""

    @abstractmethod
    def evict(self) -> None:
        """Evict now."""

    def evict_for_now(self) -> None:
        """`evict`, so that `trim` can take it back, until `settle` is called; the rows are held twice as long."""
        before = {name: _copied(value) for name, value in vars(self).items() if name != "_before"}
        self.evict()
        self._before = before

    def settle(self) -> None:
        """Make an eviction for now one for good."""
        self._before = None

    def attach(self, family: AttentionFamily) -> None:
        """Tell a cache that was loaded from a file its layer's attention family."""
        self._family = family

    def _choice_state(self) -> tuple:
        """The end of a cache's state: how it chooses, and the queries that wait to vote."""
        # A number would be saved in single precision, and an empty list not at all.
        return str(self.policy), repr(self.scale), self._queries or None

    def _take_choice_state(self, policy: str, scale: str, queries: list[mx.array] | None) -> None:
        self.policy, _ = resolve_policy(policy=policy).stages  # type: ignore[union-attr]
        self.scale = float(scale)
        self._queries = queries or []
        self._family = self._before = None

    def _trim_behind_eviction(self, n: int) -> int:
        """Take back the eviction made for now with the tokens since then, and of those before it what is missing."""
        assert self._before is not None
        now = dict(vars(self))
        since = self.offset - self._before["offset"]
        vars(self).update(self._before, _before=None)
        try:
            return since + self.trim(n - since)  # type: ignore[attr-defined]  # the cache's own
        except TrimError:
            vars(self).update(now)
            raise

    def _ask(self, rows: Entries, n_queries: int) -> None:
        """Let the last `n_queries` queries vote for rows that end with the newest.

        Raises:
            SnapKVError: tokens were fed since, and their queries were not recorded.
        """
        if not n_queries:
            return
        asked = self.query_positions[-n_queries:]
        if not asked or asked.stop < min(self.last, self.offset):
            raise SnapKVError(
                f"{self.policy.name} lets the answer's own queries vote, and they were not recorded: use mlx_snapkv's "
                "generate_step, or call patch_for_snapkv(model) before mlx-lm's"
            )
        rows.observed = self._observed(self.queries[:, :, -n_queries:], asked, rows)

    def _observed(self, queries: mx.array, positions: range, rows: Entries) -> Queries:
        """The queries of recent tokens; those taken back since are beyond the last row."""
        gone = self.offset - len(rows)
        return Queries(
            self._grouped(queries, rows),
            range(positions.start - gone, positions.stop - gone),
            self.scale,
            self.sinks,
            positions.start,
        )

    def _grouped(self, queries: mx.array, rows: Entries) -> mx.array:
        n_kv_heads = rows.positions.shape[1]
        return queries if self._family is None else self._family.grouped(queries, n_kv_heads)


def _copied(value: Any) -> Any:
    """A value that later changes in place of the original leave alone."""
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, tuple) and all(isinstance(part, mx.array) for part in value):
        return tuple(mx.array(part) for part in value)
    return list(value) if isinstance(value, list) else value
