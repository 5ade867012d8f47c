"""What suits the device that computes: how much is made at a time, and what MLX's own kernels do better there.

Everything that depends on the device is a field of `used`, read when it is needed, so that a test can run the branches
of one device on another.
"""

import os
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class Device:
    """What suits a device.

    Attributes:
        block_bytes: of float32 logits made at a time. On a GPU every operation on a block is a launch, and of blocks as
            small as a CPU's the launches would be most of a vote: with these it takes a fifth of the time, and 200 to
            700 MB more.
        held_bytes: of logits and float32 keys, below which one pass over all keys will do.
        scales_logits: logits are scaled, not queries. Matrix units of GPUs may round float32 factors to TensorFloat-32,
            which has as many digits as float16: products of half-precision queries and keys are exact then, those of
            scaled queries would not be.
        largest_chunk: tokens of a prompt to read at a time at most. A chunk's attention also computes what the causal
            mask hides: on a CPU a prompt is read faster in smaller chunks (docs/benchmarks.md), which would leave a
            large GPU idle.
        exact_votes: entries whose exact votes for a token cost no more than those by an index. A GPU waits for memory,
            and a float32 copy of half-precision keys is several times what attention itself reads.
        quantised: keys that an index quantises at a time. On a CPU MLX takes some 50 bytes for each of their numbers; a
            GPU would wait for each block.
        threads: that a product's KV heads are shared out to. MLX computes a stream of the CPU on one thread.
        fused: head sizes whose attention MLX computes, for many queries, without storing their scores (MLX 0.32). A CPU
            has no such kernel.
    """

    block_bytes: int
    held_bytes: int
    scales_logits: bool
    largest_chunk: int
    exact_votes: int
    quantised: int
    threads: int
    fused: tuple[int, ...]

    def ranks_by_index(self, n: int) -> bool:
        """Whether a token ranks `n` entries by an index of their keys, or by its exact votes."""
        return n > self.exact_votes


CPU = Device(
    block_bytes=3 << 19,
    held_bytes=8 << 20,
    scales_logits=False,
    largest_chunk=512,
    exact_votes=8192,
    quantised=1 << 10,
    threads=min(4, os.cpu_count() or 1),
    fused=(),
)
GPU = Device(
    block_bytes=8 << 20,
    held_bytes=64 << 20,
    scales_logits=True,
    largest_chunk=2048,
    exact_votes=1024,
    quantised=1 << 14,
    threads=1,
    fused=(64, 80, 128),
)
used = GPU if mx.default_device().type == mx.gpu else CPU
