"""Run one model on several Macs: detect how it is split, and share values from rank 0.

mlx-lm splits the model and MLX sums the shards' results, so all ranks see the same logits. Each rank compresses the
entries of its own heads or layers.
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

# mlx.launch and mpirun set one of these variables in each process that they start.
RANK_IN = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
TENSOR = "tensor"  # each rank has some of the heads of every layer
PIPELINE = "pipeline"  # each rank has some of the layers
SPLIT = (ShardedToAllLinear, QuantizedShardedToAllLinear)
# Maximum number of nested models, and of layers, to inspect when detecting how a model is split.
LOOKED_AT = 8


@functools.cache
def world() -> Any:
    """Return MLX's process group, or None if this process runs alone.

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
    """Return the number of processes, which is 1 without a group."""
    return 1 if (group := world()) is None else group.size()


def rank() -> int:
    """Return this process's rank, starting at 0."""
    return 0 if (group := world()) is None else group.rank()


def from_first_rank(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only and return its result on every rank. All ranks must call this function.

    Raises: SnapKVError: `work` raised this error on rank 0.
    """
    if world() is None:
        return work()
    outcome: Any = None  # (result, error message)
    if rank() == 0:
        try:
            outcome = work(), None
        except SnapKVError as error:
            _shared((None, str(error)))  # so that the other ranks raise it too
            raise
    result, sentence = _shared(outcome)
    if sentence is not None:
        raise SnapKVError(sentence)
    return result


def _shared(value: Any) -> Any:
    """Broadcast rank 0's `value` by summing over all ranks, with zeros on the others."""
    # mlx-lm computes ahead in its own stream, and its sums could be mixed up with ours.
    mx.synchronize(generation_stream)
    is_first = rank() == 0
    data = np.frombuffer(pickle.dumps(value) if is_first else b"", np.uint8)
    size: Any = mx.distributed.all_sum(mx.array(data.size), stream=mx.cpu).item()
    # np.resize fills the other ranks' empty arrays with zeros.
    addend = mx.array(np.resize(data, size) * is_first)
    summed = mx.distributed.all_sum(addend, stream=mx.cpu)
    mx.eval(summed)  # rank 0 must evaluate it too: the other ranks wait for its summand
    return value if is_first else pickle.loads(np.array(summed).tobytes())


def split_of(model: Any) -> str | None:
    """Return how mlx-lm has split a model across ranks: TENSOR, PIPELINE or None.

    mlx-lm splits models in `sharded_load`, `shard` and `pipeline`.
    """
    if world() is None:
        return None
    # The model and its nested models. The loop appends to this list.
    trunk = [model]
    for module in itertools.islice(trunk, LOOKED_AT):
        inner = (getattr(module, name, None) for name in ("language_model", "model"))
        trunk += [x for x in inner if x is not None]
    if any(getattr(module, "pipeline_size", 1) > 1 for module in trunk):
        return PIPELINE
    modules = (module for layer in model.layers[:LOOKED_AT] for module in layer.modules())
    splits = any(isinstance(x, SPLIT) and x.group.size() > 1 for x in modules)
    return TENSOR if splits else None


def require_on_one_mac(model: Any, what: str) -> None:
    """Check that the whole model is on this Mac.

    Args:
        model: a model loaded by mlx-lm.
        what: beginning of the error message, such as "prompt caches can't be saved".

    Raises: SnapKVError: several Macs share the model.
    """
    if split_of(model) is not None:
        raise SnapKVError(f"{what} on several Macs: start it without mlx.launch")
