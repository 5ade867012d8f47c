"""Caches in files: what their state holds, and whether a loaded one is sound and a model's.

mlx-lm saves arrays, numbers and strings, numbers in single precision. So a state is a cache's arrays, and one string
with all the rest.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten

from ..entries.quantization import Quantization, Stored
from ..entries.queries import Recorder
from ..policies import Policy, resolve_policy
from ..policies.budgets import Quota
from .compaction import Compaction

_DECODERS = {
    "policy": lambda text: resolve_policy(policy=text),
    "quantization": lambda how: Quantization(*how),
    "compaction": lambda how: Compaction(*how),
    "quota": lambda numbers: Quota(*numbers),
    "_steady": lambda ends: range(*ends),
}


class SavedState(Recorder):
    """mlx-lm's `state` of a recording cache, made of the attributes named here; the others are as in a new one.

    Attributes:
        ARRAYS: arrays, tuples of arrays, or None.
        LISTS: lists of arrays.
        COUNTS: whole numbers, and the least that each may be.
        NUMBERS, OTHERS: numbers, and whatever else JSON or `_DECODERS` know.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("sinks",)
    LISTS: ClassVar[tuple[str, ...]] = ("_queries", "_sums")
    COUNTS: ClassVar[Mapping[str, int]] = {"_stop": 0, "_n_counted": 0}
    NUMBERS: ClassVar[tuple[str, ...]] = ("scale",)
    OTHERS: ClassVar[tuple[str, ...]] = ("newest",)

    @property
    def state(self) -> tuple:
        names = (*self.COUNTS, *self.NUMBERS, *self.OTHERS)
        fields = {name: _encoded(getattr(self, name)) for name in names}
        lists = (getattr(self, name) or None for name in self.LISTS)  # no empty list would be saved
        return (*(getattr(self, name) for name in self.ARRAYS), *lists, json.dumps(fields))

    @state.setter
    def state(self, v: Sequence) -> None:
        self.start_recording()
        *found, fields = v
        arrays, lists = found[: len(self.ARRAYS)], found[len(self.ARRAYS) :]
        for name, value in zip(self.ARRAYS, arrays, strict=True):
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        for name, value in zip(self.LISTS, lists, strict=True):
            setattr(self, name, value or [])
        for name, value in json.loads(fields).items():
            decode = _DECODERS.get(name)
            setattr(self, name, value if decode is None or value is None else decode(value))

    @property
    def has_numbers(self) -> bool:
        """Whether all that should be a number is one."""
        return all(
            is_count(getattr(self, name), least) for name, least in self.COUNTS.items()
        ) and all(isinstance(getattr(self, name), (int, float)) for name in self.NUMBERS)


def _encoded(value: Any) -> Any:
    if isinstance(value, Policy):
        return str(value)
    if isinstance(value, range):
        return value.start, value.stop
    return dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def unless(sound: bool) -> str | None:
    return None if sound else "has numbers that contradict each other"


def entries_problem(
    keys: Stored, values: Stored, like: Any, quantization: Quantization | None
) -> str | None:
    """What is wrong with a cache's keys and values, compared with those of mlx-lm's plain cache of one token."""
    if quantization is not None:
        like = like.to_quantized(quantization.group_size, quantization.bits)
    found = difference((keys, values), (like.keys, like.values))
    if found is not None:
        return found
    numbers = {array.shape[2] for array in _arrays((keys, values)).values()}
    return None if len(numbers) == 1 else f"has {sorted(numbers)} rows of keys and values"


def difference(found: Any, wanted: Any, exact: bool = False) -> str | None:
    """Arrays that differ in place, dtype or shape; unless `exact`, the number of rows may."""
    have, want = _arrays(found), _arrays(wanted)
    if have.keys() != want.keys():
        return "holds other arrays than the model's"
    for name, array in have.items():
        other = want[name]
        if array.dtype != other.dtype:
            return f"holds {array.dtype}, the model {other.dtype}".replace("mlx.core.", "")
        rows = None if exact else array.ndim - 2
        sizes = enumerate(zip(array.shape, other.shape))
        if array.ndim != other.ndim or any(n != m and axis != rows for axis, (n, m) in sizes):
            return f"holds an array of shape {array.shape}, the model {other.shape}"
    return None


def _arrays(tree: Any) -> dict[str, mx.array]:
    """The arrays of a state by their place in it."""
    leaves = dict(tree_flatten(tree))
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, mx.array)}


def is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_queries(queries: mx.array, like: Any) -> bool:
    """Whether queries `(B, n_heads, n, head_dim)` go with a plain cache's keys, or with latents and positional keys."""
    keys, values = like.keys, like.values
    B, n_heads, _, D = queries.shape
    return (
        keys.shape[0] == B
        and n_heads % keys.shape[1] == 0
        and D in (keys.shape[3], keys.shape[3] + values.shape[3])
        and queries.dtype == keys.dtype
    )
