"""What the caches have in common that give entries way: who decides, and how that is taken back."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from ..entries.entries import Entries
from ..entries.quantization import (
    Quantised,
    Quantization,
    Stored,
    arrays,
    n_bytes,
    n_rows,
    pack,
    rows,
)
from ..entries.queries import Queries, Recorder
from ..errors import SnapKVError, TrimError
from ..policies import Policy, resolve_policy
from . import validation
from .contract import LayerCache
from .pull import Pull
from .snapshot import snapshot


class EvictingCache(Recorder, Quantised, LayerCache, _BaseCache):
    """A cache whose entries give way when it is full.

    Attributes:
        keys, values: the buffers, `(B, n_kv_heads, rows, head_dim)` or their quantised parts.
        quantization: how entries are stored, those to come too.
        policy: who gives way: what it scores lowest; None is the oldest.
        block: tokens between two evictions.
        layer: the layer of the model, for what the policy asks; None if it asks for keys and values only.
        pull: how far apart queries and keys may be, if entries are moved when others give way; None leaves them.
    """

    keys: Any
    values: Any
    policy: Policy | None
    pull: Pull | None = None
    is_compressed = True
    _n = 0  # entries held: the first rows of the buffers
    _uniform: bool  # all layers of the model hold equally many
    _marked = False
    _before: dict[str, Any] | None = None  # the state before an eviction since the mark

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; the entries the attention is to see."""
        self.append(pack(keys, self.quantization), pack(values, self.quantization))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """The entries as they lie in the buffers."""
        stored = self.keys, self.values
        # A slice would keep an eviction from writing in place.
        return stored if n_rows(stored) == self._n else rows(stored, 0, self._n)

    @property
    @abstractmethod
    def positions(self) -> mx.array:
        """uint32 `(B, n_kv_heads, size())`: the original position of every entry, as they lie in the buffers."""

    @property
    def rotations(self) -> mx.array | None:
        """Positions that the keys are turned to, as `positions` are; None if to those."""
        return None

    @abstractmethod
    def append(self, keys: Stored, values: Stored) -> None:
        """Add tokens' keys and values as they are to be stored."""

    @abstractmethod
    def settle(self) -> None:
        """Have the entries in the first `n_entries` rows, none of them to be taken back, as `place` wants it."""

    @property
    def is_due(self) -> bool:
        """Whether entries give way before the next single token."""
        return self._must_evict(1)

    @property
    @abstractmethod
    def n_after_next(self) -> int:
        """Entries held once a single token more has come."""

    @abstractmethod
    def place(self) -> int:
        """Count a single token in, of a cache that is settled; the row for its entry, which the caller writes."""

    @abstractmethod
    def _must_evict(self, L: int) -> bool:
        """Whether entries give way before the next `L` tokens."""

    @abstractmethod
    def _evict(self) -> None:
        """Let entries give way now."""

    @abstractmethod
    def _free(self) -> int:
        """Tokens that can be taken back without undoing an eviction."""

    @abstractmethod
    def _take_back(self, n: int) -> None:
        """Take back the newest `n` tokens, at most `_free()`."""

    def evict(self) -> None:
        """Let entries give way now; since a mark, so that it can be taken back."""
        before = None
        if self._marked and self._before is None:
            before = snapshot(vars(self))
        self._evict()
        if before is not None:
            self._before = before

    def mark(self) -> None:
        self.commit()
        self._marked = True

    def commit(self) -> None:
        self._marked, self._before = False, None

    def way_back(self) -> Any:
        return self._before

    def way_nbytes(self, way: Any) -> int:
        return 0 if way is None else n_bytes((way["keys"], way["values"]))

    def take_way_back(self, way: Any) -> None:
        self._before = way

    def rollback(self, n: int) -> None:
        """Take back the newest `n` tokens, exactly: those since `mark`, or since it was last fed or evicted.

        Raises:
            TrimError: some of them are older, or the oldest came between two evictions since `mark`; the cache is then
                as it was.
        """
        free = self._free()
        before = self._before
        if before is not None and 0 < self.offset - before["offset"] <= n:
            now = dict(vars(self))
            n -= self.offset - before["offset"]
            # Queries stay: they vote although their tokens are taken back, until others come in their place.
            vars(self).update(before, _queries=self._queries, _stop=self._stop)
            try:
                self.rollback(n)
            except TrimError:
                vars(self).update(now)
                raise
        elif 0 <= n <= free:
            if n:
                self._take_back(n)
        else:
            raise TrimError(f"this cache can take back 0 to {free} tokens, not {n}")

    def is_trimmable(self) -> bool:
        """Only since a mark: mlx-lm takes true for "any number of tokens"."""
        return self._marked

    def trim(self, n: int) -> int:
        """`rollback`, for mlx-lm's loops; how many tokens it took back."""
        self.rollback(n)
        return n

    @property
    def uniform(self) -> bool:
        """Whether all layers of the model hold equally many entries."""
        return self._uniform

    def _require_uniform(self) -> None:
        """Raises: SnapKVError: this cache's mask fits no other layer's."""
        if not self._uniform:
            raise SnapKVError(
                "this model makes one mask for all layers, so they must keep equally many entries: "
                "give budget as a number or a share"
            )

    @property
    def observes(self) -> bool:  # type: ignore[override]
        return self.policy is not None and self.policy.observes_answer

    @property
    def recorded(self) -> list[mx.array]:
        """What is known of the queries so far, which somebody has to compute as the answer goes on."""
        return [*self._queries, *self._sums]

    def inherit(self, recorder: Any) -> None:
        """Let the queries that another cache has recorded vote, as those of the newest tokens, until others come."""
        if isinstance(recorder, Recorder):
            self._queries, self._stop = list(recorder._queries), self.offset
            self.scale, self.sinks = recorder.scale, recorder.sinks
            self.inherit_statistics(recorder)

    def inherit_statistics(self, recorder: Recorder) -> None:
        """Let what another cache has counted of the prompt's queries stand for those to come."""
        self._sums, self._n_counted = list(recorder._sums), recorder._n_counted

    def adopt(self, layer: Any) -> None:
        self.layer = layer

    def size(self) -> int:
        """Entries held."""
        return self._n

    @property
    def n_entries(self) -> int:
        return self._n

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, with the room for more."""
        return 0 if self.keys is None else n_bytes((self.keys, self.values))

    @property
    def kv_nbytes(self) -> int:
        return self.nbytes

    def empty(self) -> bool:
        return self.keys is None

    @property
    def _heads(self) -> tuple[int, ...]:
        """`(B, n_kv_heads)`."""
        return arrays(self.keys)[0].shape[:2]

    def _rows(self, **more: Any) -> Entries:
        """The entries as they lie in the buffers, and what more is known of them."""
        return Entries(
            *self.keys_and_values(),
            given_positions=self.positions,
            given_rotations=self.rotations,
            quantization=self.quantization,
            layer=self.layer,
            statistics=self.statistics,
            **more,
        )

    def _observed(self, n: int) -> Queries | None:
        """The last `n` queries recorded, to vote for the entries held.

        Raises:
            SnapKVError: tokens were fed since, and their queries were not recorded.
        """
        if not n:
            return None
        asked = self.query_positions[-n:]
        if not asked or asked.stop < min(self.last, self.offset):
            name = self.policy.name if self.policy else "a policy"
            raise SnapKVError(
                f"{name} lets the answer's own queries vote, and they were not recorded: use mlx_snapkv's "
                "generate_step, or call patch_for_snapkv(model) before mlx-lm's"
            )
        return self.voters(self.queries[:, :, -n:], asked, (*self._heads, self._n))

    def validate(self, like: Any) -> str | None:
        found = validation.entries_problem(self.keys, self.values, like, self.quantization)
        return found or validation.unless(self._is_sound(like))

    def _is_sound(self, like: Any) -> bool:
        """Whether the numbers and arrays of a loaded state go together, and with a plain cache of the same layer."""
        count = validation.is_count
        return (
            count(self.offset, 1)
            and count(self.block, 1)
            and count(self._stop)
            and (self.newest is None or count(self.newest))
            and isinstance(self._uniform, bool)
            and (self.pull is None or count(self.pull.length, 1))
            and (self.pull is None or self.pull.farthest in range(self.offset + 1))
            and all(validation.are_queries(q, like) for q in self._queries)
        )

    @property
    def _pulled(self) -> str | None:
        """`pull` as a state holds it, which knows no pairs of numbers."""
        return None if self.pull is None else f"{self.pull.length} {self.pull.farthest}"

    @_pulled.setter
    def _pulled(self, text: str | None) -> None:
        self.pull = None if text is None else Pull(*map(int, text.split()))

    def _decision_state(self) -> tuple:
        """The end of a cache's state: how it is stored and evicts, and the queries that wait to vote."""
        how = self.quantization
        # A number would be saved in single precision, and an empty list not at all.
        return (
            None if self.policy is None else str(self.policy),
            self.block,
            repr(self.scale),
            self.sinks,
            self.newest,
            self._stop,
            self._queries or None,
            self._sums or None,
            self._n_counted,
            None if how is None else how.bits,
            None if how is None else how.group_size,
        )

    def _take_decision_state(self, state: Iterable) -> list:
        """Set what `_decision_state` tells; what comes before it in the state."""
        *before, policy, block, scale, sinks, newest, stop, queries, sums, n, bits, group = state
        self.policy = None if policy is None else resolve_policy(policy=policy)  # type: ignore[assignment]
        self.block = block
        self.quantization = None if bits is None else Quantization(bits, group)
        self.start_recording(newest=newest)
        self.scale, self.sinks = float(scale), sinks
        self._stop, self._queries = stop, queries or []
        self._sums, self._n_counted = sums or [], n
        self.layer = None
        return before

    def _take(self, names: Iterable[str], values: Iterable) -> None:
        """Set attributes of a loaded state, where parts of quantised entries are in lists."""
        for name, value in zip(names, values, strict=True):
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
