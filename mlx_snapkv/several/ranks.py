"""The processes that `mlx.launch` has started together, and how they exchange values."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from .._version import __version__
from ..errors import SnapKVError, brief, sentence
from . import launched
from .heartbeat import Heartbeat, connected

T = TypeVar("T")


class Ranks:
    """All processes of mlx's `group`; None is this process alone, which exchanges nothing.

    MLX's collectives exchange the values, so all ranks must make the same calls in the same order. The `heartbeat`
    ends the others when one fails.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.size: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()
        self.heartbeat = Heartbeat(self.rank, {})

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank: anything that JSON can hold."""
        if self.size == 1:
            return [value]
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self._gathered(mx.array([data.size], mx.uint32))[:, 0]
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: data.size] = data
        rows = self._gathered(mx.array(padded))
        return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes)]

    def first(self, value: T) -> T:
        return self.gather(value if self.rank == 0 else None)[0]

    def agreed(self, work: Callable[[], T], expected: type[Exception] = Exception) -> T:
        """The result of `work`, once it has succeeded on all ranks; `expected` errors may occur on some of them only.

        Raises:
            SnapKVError: it failed on another rank, with that rank's message. This rank's own error takes precedence.
        """
        try:
            found = work()
        except expected as error:
            self.gather(sentence(error))
            raise
        for rank, why in enumerate(self.gather(None)):
            if why is not None:
                raise SnapKVError(f"rank {rank}: {why}")
        return found

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of `work`, which only rank 0 does; its error is raised on all ranks."""
        return self.first(self.agreed(work if self.rank == 0 else lambda: None))  # type: ignore[arg-type, return-value]

    def require_same(self, **values: Any) -> None:
        """Raises: SnapKVError: a rank's value differs from rank 0's."""
        first, *others = self.gather(values)
        for rank, theirs in enumerate(others, start=1):
            for name in first:
                if theirs[name] != first[name]:
                    got = f"{theirs[name]} on rank {rank} and {first[name]} on rank 0"
                    raise SnapKVError(f"{name} must be the same on all ranks, got {got}")

    def sum(self, x: mx.array) -> mx.array:
        """The element-wise sum over all ranks; lazy."""
        return x if self.size == 1 else mx.distributed.all_sum(x, group=self._group)

    def max(self, x: mx.array) -> mx.array:
        """The element-wise maximum over all ranks; lazy."""
        return x if self.size == 1 else mx.distributed.all_max(x, group=self._group)

    def mean_of_heads(self, x: mx.array) -> mx.array:
        """The mean over all ranks' heads, `(B, 1, T)`, of `(B, n_kv_heads, T)`; lazy."""
        return self.sum(x.sum(axis=1, keepdims=True)) / (x.shape[1] * self.size)

    def synchronize(self) -> None:
        """Wait for what mlx-lm's loop computes ahead: in its stream, collectives could mix with the next ones."""
        if self.size > 1:
            mx.synchronize(importlib.import_module("mlx_lm.generate").generation_stream)
            mx.synchronize()

    def _gathered(self, x: mx.array) -> np.ndarray:
        """`(size, n)` of `(n,)`."""
        self.synchronize()
        found = mx.distributed.all_gather(x[None], group=self._group, stream=mx.cpu)
        mx.eval(found)
        return np.array(found)

    def _join(self) -> Ranks:
        """Check that all ranks run the same versions, connect their heartbeats and seed them alike."""
        versions = {"mlx_snapkv": __version__, "mlx_lm": version("mlx-lm"), "mlx": version("mlx")}
        self.require_same(**{f"version of {name}": text for name, text in versions.items()})
        self.heartbeat = Heartbeat(self.rank, connected(self))
        state: Any = mx.random.state
        high, low = self.first(state[0].tolist())
        mx.random.seed(high << 32 | low)
        return self


ALONE = Ranks()
_here: list[Ranks] = []


def here() -> Ranks:
    """All processes started with this one; `ALONE` if there are no others. All ranks must make the first call.

    Raises: SnapKVError: their versions differ.
    """
    if not launched():
        return ALONE
    if not _here:
        try:
            group = mx.distributed.init()
        except RuntimeError as error:
            raise SnapKVError(f"the other processes can't be reached: {brief(error)}") from error
        _here.append(Ranks(group)._join() if group.size() > 1 else ALONE)
    return _here[0]


def leave_all(why: str) -> str:
    """Tell the other ranks that this one ends; the message to print, another rank's if that one failed first."""
    return next(filter(None, [ranks.heartbeat.leave(why) for ranks in _here]), why)
