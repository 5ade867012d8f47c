"""Work on entries, shared out to the threads of a CPU. On a GPU there is one, and it is done as a whole."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import cycle, pairwise
from typing import TypeVar

import mlx.core as mx

from . import device

T = TypeVar("T")

# Entries of all heads below which to wake a thread costs more than it saves:
SCANNED = 1 << 18  # if they are read in line,
GATHERED = 1 << 13  # or each from a place of its own


def by_heads(function: Callable[..., mx.array], n: int, *arrays: mx.array) -> mx.array:
    """`function(*arrays)` of arrays `(B, n_kv_heads, ...)`, some heads of one sequence on each thread.

    The heads of a batch are not shared out: MLX would copy them, since they do not lie together.

    Args:
        n: entries of each head.
    """
    B, H, *_ = arrays[0].shape
    n_parts = min(device.used.threads, H)
    if B > 1 or H * n < SCANNED or n_parts == 1:
        return function(*arrays)
    found = []
    edges = pairwise(i * H // n_parts for i in range(n_parts + 1))
    for thread, (start, stop) in zip(_threads(n_parts), edges):
        with thread:
            found.append(function(*(x[:, start:stop] for x in arrays)))
    return mx.concatenate(found, axis=1)


def at_once(n: int, calls: Sequence[Callable[[], T]]) -> list[T]:
    """What the calls return, as one for keys and one for values, made on threads in turn.

    Args:
        n: entries of all heads that each call gathers.
    """
    n_threads = min(device.used.threads, len(calls)) if n >= GATHERED else 1
    found = []
    for thread, call in zip(cycle(_threads(n_threads)), calls):
        with thread:
            found.append(call())
    return found


def _threads(n: int) -> list[AbstractContextManager]:
    """In which MLX computes on `n` threads: on that of the stream in use, and on others."""
    return [nullcontext(), *map(mx.stream, _others(n - 1))]


@lru_cache
def _others(n: int) -> list[mx.ThreadLocalStream]:
    """Streams of the CPU: MLX computes each on a thread of its own."""
    return [mx.new_thread_local_stream(mx.cpu) for _ in range(n)]
