"""Run one model on several Macs: detect how it is split, and share values from rank 0.

mlx-lm splits the model into shards, one per rank, and MLX exchanges their results. All ranks therefore see the same
logits. Each rank compresses the entries of its own heads or layers.
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
RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
TENSOR = "tensor"  # each rank has some of the heads of every layer
PIPELINE = "pipeline"  # each rank has some of the layers
SHARDED_CLASSES = (ShardedToAllLinear, QuantizedShardedToAllLinear)
# Maximum number of nested models, and of layers, to inspect when detecting how a model is split.
MAX_INSPECTED = 8


@functools.cache
def world() -> Any:
    """Return MLX's process group, or None if this process runs alone.

    Raises: SnapKVError: the other processes can't be reached.
    """
    is_launched_with_others = any(name in os.environ for name in RANK_VARIABLES)
    if not is_launched_with_others:
        return None
    try:
        group = mx.distributed.init()
    except RuntimeError as error:
        raise SnapKVError(f"the other processes can't be reached: {brief(error)}") from error
    return group if group.size() > 1 else None


def n_ranks() -> int:
    """Return the number of processes, or 1 if this process runs alone."""
    group = world()
    return 1 if group is None else group.size()


def rank() -> int:
    """Return this process's rank, which is 0 if the process runs alone."""
    group = world()
    return 0 if group is None else group.rank()


def from_first_rank(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only and return its result on every rank. All ranks must call this function.

    Raises: SnapKVError: `work` raised this error on rank 0.
    """
    if world() is None:
        return work()
    result_and_error: Any = None  # stays None on all ranks except rank 0
    if rank() == 0:
        try:
            result_and_error = work(), None
        except SnapKVError as error:
            _broadcast((None, str(error)))  # the other ranks must also raise the error
            raise
    result, error_message = _broadcast(result_and_error)
    if error_message is not None:
        raise SnapKVError(error_message)
    return result


def _broadcast(value: Any) -> Any:
    """Send rank 0's `value` to all ranks, by summing its bytes with zeros from the other ranks."""
    # mlx-lm computes ahead in its own stream, where a split model also sums across ranks. Wait for that stream, because
    # sums in both streams at once could be mixed up.
    mx.synchronize(generation_stream)
    is_rank_0 = rank() == 0
    pickled = np.frombuffer(pickle.dumps(value) if is_rank_0 else b"", np.uint8)
    n_bytes: Any = mx.distributed.all_sum(mx.array(pickled.size), stream=mx.cpu).item()
    # np.resize fills the other ranks' empty arrays with zeros.
    summand = mx.array(np.resize(pickled, n_bytes) * is_rank_0)
    byte_sum = mx.distributed.all_sum(summand, stream=mx.cpu)
    # Even rank 0 must evaluate the sum, because the other ranks wait for its summand.
    mx.eval(byte_sum)
    return value if is_rank_0 else pickle.loads(np.array(byte_sum).tobytes())


def split_of(model: Any) -> str | None:
    """Return how mlx-lm has split a model across ranks: TENSOR, PIPELINE or None.

    mlx-lm splits models in `sharded_load`, `shard` and `pipeline`.
    """
    if world() is None:
        return None
    if any(getattr(module, "pipeline_size", 1) > 1 for module in _nested_models(model)):
        return PIPELINE
    for layer in model.layers[:MAX_INSPECTED]:
        for module in layer.modules():
            if isinstance(module, SHARDED_CLASSES) and module.group.size() > 1:
                return TENSOR
    return None


def _nested_models(model: Any) -> list[Any]:
    """Return a model and the models inside it."""
    models = [model]
    for outer_model in itertools.islice(models, MAX_INSPECTED):  # `models` grows in the loop
        inner_models = [getattr(outer_model, name, None) for name in ("language_model", "model")]
        models += [inner_model for inner_model in inner_models if inner_model is not None]
    return models


def require_on_one_mac(model: Any, problem: str) -> None:
    """Check that the whole model is on this Mac.

    Args:
        model: a model loaded by mlx-lm.
        problem: beginning of the error message, such as "prompt caches can't be saved".

    Raises: SnapKVError: several Macs share the model.
    """
    is_shared_by_macs = split_of(model) is not None
    if is_shared_by_macs:
        raise SnapKVError(f"{problem} on several Macs: start it without mlx.launch")
