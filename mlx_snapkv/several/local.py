"""What a projection that several ranks add up makes of the heads of this one."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear


def of_heads_here(output: Any) -> Callable[[mx.array], mx.array]:
    """An output projection without what other ranks add to it, and without its bias if they do."""
    if isinstance(output, ShardedToAllLinear):
        return lambda x: x @ output["weight"].T
    if isinstance(output, QuantizedShardedToAllLinear):
        return lambda x: mx.quantized_matmul(
            x,
            output["weight"],
            scales=output["scales"],
            biases=output.get("biases"),
            transpose=True,
            group_size=output.group_size,
            bits=output.bits,
            mode=output.mode,
        )
    return output
