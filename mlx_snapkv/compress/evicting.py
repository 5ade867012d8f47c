"""What the caches that evict entries have in common: how they are restored, and what a file holds of them."""

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import _BaseCache

from ..caches.contract import LayerCache, restorer_of
from ..entries.entries import Entries
from ..entries.quantization import Quantised, Quantization, Stored, n_bytes, n_rows, pack, rows
from ..entries.queries import Queries, Recorder
from ..entries.query_moments import QueryMoments
from ..entries.quota import Quota
from ..errors import SnapKVError
from .policies import policy_named
from .policy import Policy

_DECODERS = {
    "policy": policy_named,
    "quantization": lambda how: Quantization(*how),
    "quota": lambda numbers: Quota(*numbers),
    "steady": lambda ends: range(*ends),
}


class EvictingCache(Recorder, Quantised, LayerCache, _BaseCache):
    """A cache that evicts entries when it is full; its `layer` is None if its policy asks for no more than entries."""

    TRANSIENT: ClassVar[frozenset[str]] = frozenset({"layer", "_by_reader"})
    # Objects whose attributes a file holds as `part.name`.
    PARTS: ClassVar[dict[str, type]] = {"moments": QueryMoments}

    keys: Any  # these and `values` are the buffers, `(B, n_kv_heads, rows, head_dim)` or their quantised parts
    values: Any
    policy: Policy | None = (
        None  # evicts what it scores lowest; None: a window its oldest, a block cache nothing
    )
    is_compressed = needs_layer = stacks = True
    positions: mx.array  # uint32 `(B, n_kv_heads, size())`, of the entries as the buffers have them
    _n = 0  # entries held: the first rows of the buffers

    @abstractmethod
    def append(self, keys: Stored, values: Stored) -> None:
        """Add tokens' keys and values as they are to be stored."""

    def flush(self) -> None:
        """Move all entries into the first `n_entries` rows, as `place` wants it."""

    @abstractmethod
    def place(self) -> int:
        """Count a single token in, of a flushed cache; the row for its entry, which the caller writes."""

    def is_due(self, L: int = 1) -> bool:
        """Whether an eviction precedes the next `L` tokens."""
        return False

    def evict(self) -> None:
        """Let the policy choose what stays."""

    def restorer(self) -> Callable[[], None]:
        return super().restorer() if self.grows else restorer_of(self)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; the entries the attention is to see."""
        self.append(pack(keys, self.quantization), pack(values, self.quantization))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Stored, Stored]:
        stored = self.keys, self.values
        # A slice would keep an eviction from writing in place.
        return stored if n_rows(stored) == self._n else rows(stored, 0, self._n)

    @property
    def state(self) -> tuple:
        """For mlx-lm's files, of strings and arrays: all attributes but the transient, which are as in a new cache."""
        others = {name: x for name, x in vars(self).items() if name not in self.TRANSIENT}
        for part in self.PARTS:
            others |= {f"{part}.{name}": x for name, x in vars(others.pop(part)).items()}
        arrays = {name: others.pop(name) for name, x in list(others.items()) if _is_array(x)}
        kinds = {name: type(x).__name__ for name, x in arrays.items()}
        return json.dumps([kinds, others], default=_encoded), *arrays.values()

    @state.setter
    def state(self, v: Sequence) -> None:
        self.start_recording()
        kinds, others = json.loads(v[0])
        for (name, kind), value in zip(kinds.items(), v[1:], strict=True):
            others[name] = tuple(value) if kind == "tuple" else value
        for name in _DECODERS.keys() & others.keys():
            others[name] = None if others[name] is None else _DECODERS[name](others[name])
        for part, cls in self.PARTS.items():
            names = [name for name in others if name.startswith(f"{part}.")]
            values = {name.removeprefix(f"{part}."): others.pop(name) for name in names}
            others[part] = cls(**values)
        vars(self).update(others)

    def is_trimmable(self) -> bool:
        """False: mlx-lm takes true for "any number of tokens", and the prompt's evicted entries are gone."""
        return False

    @property
    def observes(self) -> bool:  # type: ignore[override]
        return self.policy is not None and self.policy.observes_answer

    def size(self) -> int:
        return self._n

    def validate(self) -> str | None:
        if found := super().validate():
            return found
        positions = np.sort(np.array(self.positions).astype(int), axis=-1)
        ascend = positions.shape[2] == self._n and (np.diff(positions) > 0).all()
        if not ascend or positions.max() >= self.offset:
            return "has positions that can't be"
        return None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return 0 if self.keys is None else n_bytes((self.keys, self.values))

    def empty(self) -> bool:
        return self.keys is None

    @property
    def _heads(self) -> tuple[int, ...]:
        """`(B, n_kv_heads)`."""
        return tree_flatten(self.keys)[0][1].shape[:2]  # type: ignore[index]

    def _rows(self, **more: Any) -> Entries:
        return Entries(
            *self.keys_and_values(),
            given_positions=self.positions,
            quantization=self.quantization,
            layer=self.layer,
            statistics=self.statistics,
            **more,
        )

    def _observed(self, n: int) -> Queries | None:
        """The last `n` queries, to vote for the entries held. Raises: SnapKVError: they were not recorded."""
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


def _is_array(value: Any) -> bool:
    leaves = list(dict(tree_flatten(value)).values())
    return bool(leaves) and all(isinstance(x, mx.array) for x in leaves)


def _encoded(value: Any) -> Any:
    if isinstance(value, Policy):
        return str(value)
    if isinstance(value, range):
        return value.start, value.stop
    return dataclasses.astuple(value)
