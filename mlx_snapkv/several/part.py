"""The part of a model that is here: all of it, a slice of every layer's heads, or some of its layers."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear

from ..errors import SnapKVError
from .heads import ALL_HERE, Heads
from .launched import launched
from .ranks import ALONE, Ranks, here

T = TypeVar("T")

TENSOR, PIPELINE = "tensor", "pipeline"
SPLIT = (ShardedToAllLinear, QuantizedShardedToAllLinear)
LOOKED_AT = 8  # layers of a model, to find out whether it is split


@dataclass(frozen=True)
class Part:
    """This rank's part of a model.

    Attributes:
        ranks: those that hold it together.
        kind: TENSOR: each has a slice of every layer's heads. PIPELINE: each has some layers, rank 0 the last ones.
            None: all of it is here.
    """

    ranks: Ranks = ALONE
    kind: str | None = None
    _counts: dict[int, list[int]] = field(default_factory=dict)

    def heads_of(self, attention: Any) -> Heads:
        """Which heads of an attention module are here."""
        return Heads(self.ranks) if self.kind == TENSOR and is_split(attention) else ALL_HERE

    def attempt(self, work: Callable[[], T]) -> T:
        """What `work` gives of the layers here; the first time, once it has succeeded for those of all ranks."""
        if self.kind == PIPELINE and not self._counts:
            return self.ranks.agreed(work)
        return work()

    def counts(self, n_here: int) -> list[int]:
        """By rank, how many layers of a kind it has, of which `n_here` are here; all ranks have to ask."""
        if self.kind != PIPELINE:
            return [n_here]
        if n_here not in self._counts:
            self._counts[n_here] = self.ranks.gather(n_here)
        return self._counts[n_here]

    def place(self, n_here: int) -> tuple[int, int]:
        """Of `n_here` layers here, how many of the model come before them, and how many it has."""
        counts = self.counts(n_here)
        after = self.ranks.rank + 1 if self.kind == PIPELINE else 1
        return sum(counts[after:]), sum(counts)

    def all_layers(self, values: list[Any]) -> list[Any]:
        """What every layer of the model has, in order, given what those here have."""
        if self.kind != PIPELINE:
            return values
        return [value for theirs in reversed(self.ranks.gather(values)) for value in theirs]


WHOLE = Part()
F = TypeVar("F", bound=Callable)
_parts: dict[int, Part] = {}


def part_of(model: Any) -> Part:
    """This rank's part of a model that mlx-lm's `sharded_load` has loaded, or its `shard` or `pipeline` has split.

    Of a split one, the first call is one that all ranks have to make.

    Raises:
        SnapKVError: the ranks run different versions, or others than those that were started together hold it.
    """
    if id(model) in _parts:
        return _parts[id(model)]
    kind, size = _split(model)
    part = WHOLE
    if kind is not None:
        ranks = here()
        if ranks.size != size:
            raise SnapKVError(
                f"this model is split over {size} of {ranks.size} processes: split it over all that were started "
                "together"
            )
        part = Part(ranks, kind)
    elif launched():
        return part  # it may be split yet
    # Looked for once: this is asked at every step.
    _parts[id(model)] = part
    weakref.finalize(model, _parts.pop, id(model), None)
    return part


def require_same_prompt(model: Any, tokens: mx.array | Iterable[int], **options: Any) -> None:
    """Check, where several ranks hold a model, that all are to read the same tokens with the same options.

    Raises:
        SnapKVError: they are not.
    """
    ranks = part_of(model).ranks
    if ranks.size > 1:
        ids = np.array(tokens if isinstance(tokens, mx.array) else list(tokens), np.uint32)
        told = f"{len(ids)} tokens ({hashlib.sha256(ids.tobytes()).hexdigest()[:8]})"
        ranks.require_same(prompt=told, **options)


def require_alike(model: Any, error: Exception) -> None:
    """Raise an error of a step unless all ranks that hold the model have it: else they wait in the middle of the model.

    What goes by `Ranks.agreed` is a SnapKVError; of others nobody knows.
    """
    if part_of(model).ranks.size > 1 and not isinstance(error, SnapKVError):
        raise error


def together(function: F) -> F:
    """A function of a model, first, that all ranks which hold it go through together; see `Ranks.together`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs["model"]
        with part_of(model).ranks.together():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def together_through(model: Any, items: Iterator[T]) -> Iterator[T]:
    """The same of what an iterator does with a model; it itself if all of the model is here."""
    ranks = part_of(model).ranks
    return items if ranks.size == 1 else _together_through(ranks, items)


def _together_through(ranks: Ranks, items: Iterator[T]) -> Iterator[T]:
    with ranks.together():
        yield from items


def is_split(module: Any) -> bool:
    """Whether a module adds up what several ranks make of their heads."""
    return any(isinstance(m, SPLIT) and m.group.size() > 1 for m in module.modules())


def _split(model: Any) -> tuple[str | None, int]:
    """How a model is split, and over how many."""
    for module in _trunk(model):
        size = getattr(module, "pipeline_size", 1)
        if size > 1:
            return PIPELINE, size
    for layer in model.layers[:LOOKED_AT]:
        for module in layer.modules():
            if isinstance(module, SPLIT) and module.group.size() > 1:
                return TENSOR, module.group.size()
    return None, 1


def _trunk(model: Any) -> Iterator[Any]:
    """The model, and what it wraps."""
    seen = [model]
    for module in seen:
        yield module
        if len(seen) < LOOKED_AT:
            found = (getattr(module, name, None) for name in ("language_model", "model"))
            seen += [inner for inner in found if inner is not None]
