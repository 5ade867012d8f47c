"""Support for one model on several Macs: how the model is split, and values that rank 0 shares with the other ranks.

mlx-lm splits the model and MLX sums what the shards compute, so all ranks see the same logits. Each rank compresses the
entries of its own heads, or of its own layers.
"""

import functools
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx_lm.generate import generation_stream

from ..errors import SnapKVError, brief

T = TypeVar("T")

# Environment variables; mlx.launch or mpirun sets one of them for every process.
RANK_IN = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
TENSOR = "tensor"  # each rank has a slice of every layer's heads
PIPELINE = "pipeline"  # each rank has some of the layers
SPLIT = (ShardedToAllLinear, QuantizedShardedToAllLinear)
LOOKED_AT = 8  # most modules, and most layers, to look at for whether a model is split


@functools.cache
def world() -> Any:
    """Return MLX's group of the processes that were started together; None if this process was started alone.

    Raises: SnapKVError: the other processes can't be reached.
    """
    if not any(name in os.environ for name in RANK_IN):
        return None
    try:
        group = mx.distributed.init()
    except RuntimeError as error:
        raise SnapKVError(f"the other processes can't be reached: {brief(error)}") from error
    return group if group.size() > 1 else None


def n_ranks() -> int:
    """Return the number of processes that were started together."""
    return 1 if (group := world()) is None else group.size()


def rank() -> int:
    """Return this process's rank, from 0."""
    return 0 if (group := world()) is None else group.rank()


def from_first(work: Callable[[], T]) -> T:
    """Return on every rank the result of `work`, which only rank 0 does. All ranks must make the same calls.

    Raises: SnapKVError: `work` raised it on rank 0.
    """
    if world() is None:
        return work()
    outcome: Any = None  # the result, and an error sentence
    if rank() == 0:
        try:
            outcome = work(), None
        except SnapKVError as error:
            _shared((None, str(error)))  # so that the other ranks raise it, too
            raise
    result, sentence = _shared(outcome)
    if sentence is not None:
        raise SnapKVError(sentence)
    return result


def _shared(value: Any) -> Any:
    """Return rank 0's `value`, pickled and summed with the zeros of the other ranks."""
    # Sums that mlx-lm's loop computes ahead in its own stream could mix with these.
    mx.synchronize(generation_stream)
    is_first = rank() == 0
    data = np.frombuffer(pickle.dumps(value) if is_first else b"", np.uint8)
    size: Any = mx.distributed.all_sum(mx.array(data.size), stream=mx.cpu).item()
    addend = mx.array(np.resize(data, size) * is_first)  # np.resize makes zeros of an empty array
    summed = mx.distributed.all_sum(addend, stream=mx.cpu)
    mx.eval(summed)  # on rank 0, too: the other ranks wait for its part of the sum
    return value if is_first else pickle.loads(np.array(summed).tobytes())


def split_of(model: Any) -> str | None:
    """Return how mlx-lm's `sharded_load`, `shard` or `pipeline` has split a model: TENSOR, PIPELINE or None."""
    if world() is None:
        return None
    # The model and the models inside it; the loop also visits what it appends.
    trunk = [model]
    for module in itertools.islice(trunk, LOOKED_AT):
        inner = (getattr(module, name, None) for name in ("language_model", "model"))
        trunk += [x for x in inner if x is not None]
    if any(getattr(module, "pipeline_size", 1) > 1 for module in trunk):
        return PIPELINE
    modules = (module for layer in model.layers[:LOOKED_AT] for module in layer.modules())
    splits = any(isinstance(x, SPLIT) and x.group.size() > 1 for x in modules)
    return TENSOR if splits else None


def require_whole(model: Any, what: str) -> None:
    """Check that this Mac holds the whole model.

    Args:
        model: a model that mlx-lm has loaded.
        what: the beginning of the error's sentence, such as "prompt caches can't be saved".

    Raises: SnapKVError: several Macs share the model.
    """
    if split_of(model) is not None:
        raise SnapKVError(f"{what} on several Macs: start it without mlx.launch")
