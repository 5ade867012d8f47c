"""This rank's shard of a model: all of it, a slice of every layer's heads, or some of its layers."""

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear

from ..errors import SnapKVError
from . import launched
from .ranks import ALONE, Ranks, here

TENSOR, PIPELINE = "tensor", "pipeline"
SPLIT = (ShardedToAllLinear, QuantizedShardedToAllLinear)
LOOKED_AT = 8  # modules, and layers, that show whether a model is split


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a model that `ranks` hold together: each has a slice of every layer's heads (TENSOR) or
    some layers, rank 0 the last ones (PIPELINE); None is all of the model."""

    ranks: Ranks = ALONE
    kind: str | None = None
    _counts: dict[int, list[int]] = field(default_factory=dict)

    def sharing(self, attention: Any) -> Ranks:
        """The ranks that share an attention module's heads, in contiguous slices."""
        return self.ranks if self.kind == TENSOR and _n_summed(attention) > 1 else ALONE

    def counts(self, n_here: int) -> list[int]:
        """How many layers of a kind each rank has; this one has `n_here`. All ranks must call it."""
        if self.kind != PIPELINE:
            return [n_here]
        if n_here not in self._counts:
            self._counts[n_here] = self.ranks.gather(n_here)
        return self._counts[n_here]

    def place(self, n_here: int) -> tuple[int, int]:
        """How many of the model's layers come before this rank's `n_here`, and how many there are."""
        counts = self.counts(n_here)
        after = self.ranks.rank + 1 if self.kind == PIPELINE else 1
        return sum(counts[after:]), sum(counts)

    def all_layers(self, values: list[Any]) -> list[Any]:
        """The values of every layer of the model, in order, given those of this rank's layers."""
        if self.kind != PIPELINE:
            return values
        return [value for theirs in reversed(self.ranks.gather(values)) for value in theirs]


WHOLE = Shard()
_shards: dict[int, Shard] = {}


def shard_of(model: Any) -> Shard:
    """This rank's shard of a model that mlx-lm's `sharded_load`, `shard` or `pipeline` has split.

    All ranks must make the first call for a split model.

    Raises: SnapKVError: the ranks run different versions, or hold it with others than those started together.
    """
    if id(model) in _shards:
        return _shards[id(model)]
    kind, size = _split(model)
    shard = WHOLE
    if kind is not None:
        ranks = here()
        if ranks.size != size:
            what = f"split over {size} of {ranks.size} processes"
            raise SnapKVError(
                f"this model is {what}: split it over all processes that were started together"
            )
        shard = Shard(ranks, kind)
    elif launched():
        return shard  # it may be split later
    # Cached, because every step asks.
    _shards[id(model)] = shard
    weakref.finalize(model, _shards.pop, id(model), None)
    return shard


def require_whole(model: Any, what: str) -> None:
    """Raises: SnapKVError: several Macs hold the model, and `what` needs one."""
    if shard_of(model).kind is not None:
        raise SnapKVError(f"{what} on several Macs: start it without mlx.launch")


def _n_summed(module: Any) -> int:
    """Of how many ranks a module sums what they compute from their heads."""
    return max((m.group.size() for m in module.modules() if isinstance(m, SPLIT)), default=1)


def _split(model: Any) -> tuple[str | None, int]:
    """How a model is split, and over how many."""
    trunk = [model]
    for module in itertools.islice(trunk, LOOKED_AT):
        found = (getattr(module, name, None) for name in ("language_model", "model"))
        trunk += [inner for inner in found if inner is not None]
    size = max(getattr(module, "pipeline_size", 1) for module in trunk)
    if size > 1:
        return PIPELINE, size
    size = max(map(_n_summed, model.layers[:LOOKED_AT]))
    return (TENSOR if size > 1 else None), size
