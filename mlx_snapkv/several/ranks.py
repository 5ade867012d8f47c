"""The processes that `mlx.launch` has started together, and what they tell each other."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from .._version import __version__
from ..errors import SnapKVError, brief, sentence
from .launched import launched
from .links import connected
from .watch import Watch

T = TypeVar("T")


class Ranks:
    """All processes of a group, of which this one is `rank`.

    What is said here goes by MLX's own collectives, so that all ranks have to say it at the same point. A group of one
    says nothing to anybody.

    Args:
        group: mlx's group; None is this process alone.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.size: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()
        self._watch: Watch | None = None

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
        """Rank 0's value."""
        return self.gather(value if self.rank == 0 else None)[0]

    def agreed(self, work: Callable[[], T], expected: type[Exception] = Exception) -> T:
        """What `work` gives, when it has succeeded on all ranks.

        Args:
            expected: what it may raise on some ranks only, not having talked to the others since they talked to it.

        Raises:
            SnapKVError: it has failed on another rank, whose sentence this is; what it raises here goes before.
        """
        if self.size == 1:
            return work()
        problem, found = None, None
        try:
            found = work()
        except expected as error:
            problem = error
        said = self.gather(None if problem is None else sentence(problem))
        if problem is not None:
            raise problem
        for rank, told in enumerate(said):
            if told is not None:
                raise SnapKVError(f"rank {rank}: {told}")
        return found  # type: ignore[return-value]

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, where alone it is done; what it raises there, it does on all."""
        if self.size == 1:
            return work()
        return self.first(self.agreed(work if self.rank == 0 else lambda: None))  # type: ignore[arg-type, return-value]

    def require_same(self, **values: Any) -> None:
        """Raises: SnapKVError: a rank has another value than rank 0 has."""
        if self.size == 1:
            return
        first, *others = self.gather(values)
        for rank, theirs in enumerate(others, start=1):
            for name in first:
                if theirs[name] != first[name]:
                    raise SnapKVError(
                        f"rank {rank} has another {name.replace('_', ' ')} than rank 0, {theirs[name]} and not "
                        f"{first[name]}: start all alike"
                    )

    def sum(self, x: mx.array) -> mx.array:
        """The sum over all ranks, element by element; lazy."""
        return x if self.size == 1 else mx.distributed.all_sum(x, group=self._group)

    def max(self, x: mx.array) -> mx.array:
        """The largest over all ranks, element by element; lazy."""
        return x if self.size == 1 else mx.distributed.all_max(x, group=self._group)

    def settle(self) -> None:
        """Wait for what mlx-lm's loop has begun ahead of time, whose collectives could come between those to follow.

        It computes on a stream of its own, and on a CPU collectives go by the stream they are asked for on.
        """
        if self.size > 1:
            mx.synchronize(importlib.import_module("mlx_lm.generate").generation_stream)
            mx.synchronize()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that all ranks go through together: what is raised in one of them ends it for all.

        Raises:
            SnapKVError: another rank has failed, whose sentence this is. A rank that can't even raise it, since it
                waits in the middle of the model for one that has gone, prints it and exits with status 1.
        """
        if self._watch is None:
            yield
            return
        with self._watch.section():
            yield

    def require_all_here(self) -> None:
        """Raises: SnapKVError: another rank has gone."""
        if self._watch is not None:
            self._watch.require_all_here()

    def call(self) -> None:
        """Let the other ranks know that there is something to do, for which they `await_call`."""
        if self._watch is not None:
            self._watch.call()

    def await_call(self) -> None:
        """Wait for a call: rank 0 for one of any other rank, those for rank 0's; SnapKVError if a rank has gone."""
        if self._watch is not None:
            self._watch.await_call()

    def leaves(self, why: str) -> None:
        """Let the other ranks know that this one ends, and why."""
        if self._watch is not None:
            self._watch.tell(why)

    def _gathered(self, x: mx.array) -> np.ndarray:
        """`(size, n)` of `(n,)`."""
        with self.together():
            self.settle()
            found = mx.distributed.all_gather(x[None], group=self._group, stream=mx.cpu)
            mx.eval(found)
        return np.array(found)

    def _join(self) -> Ranks:
        """Find out that all ranks run the same, and let them sample alike."""
        versions = {"mlx_snapkv": __version__, "mlx_lm": version("mlx-lm"), "mlx": version("mlx")}
        self.require_same(**{f"version of {name}": text for name, text in versions.items()})
        self._watch = Watch(self.rank, connected(self))
        state: Any = mx.random.state
        high, low = self.first(state[0].tolist())
        mx.random.seed(high << 32 | low)
        return self


ALONE = Ranks()
_here: list[Ranks] = []


def here() -> Ranks:
    """All processes that were started with this one; `ALONE` if it was started by itself.

    The first call is one that all ranks have to make.

    Raises:
        SnapKVError: their versions differ.
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


def leave_all(why: str) -> None:
    """Let the ranks that this one has joined know that it ends, and why."""
    for ranks in _here:
        ranks.leaves(why)
