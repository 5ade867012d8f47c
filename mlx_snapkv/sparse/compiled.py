"""Functions of arrays whose graph is made once for arguments, and repeated for others of the same shapes.

A decoded token makes the same graph as the one before it, for every layer. To repeat one takes Python a third of the
time, and fewer operations are left of it: those by elements are fused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from threading import get_ident
from typing import Any, TypeVar

import mlx.core as mx

MAX_GRAPHS = 128  # graphs of a function, of the shapes that were used last

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`mx.compile`, which would hold the graphs for all shapes that there have ever been: prompts differ in length.

    Arguments are arrays, numbers, None, or tuples of these; all but arrays are constants of a graph.
    """

    @lru_cache(MAX_GRAPHS)
    def graph(thread: int, shapes: tuple) -> Callable[..., Any]:
        # MLX holds a graph by thread and by the function's place in memory: the other threads' would stay when it is
        # dropped, for what comes to be in that place.
        return mx.compile(partial(function))

    @wraps(function)
    def call(*args: Any) -> Any:
        return graph(get_ident(), _shapes(args))(*args)

    return call  # type: ignore[return-value]


def _shapes(args: tuple) -> tuple:
    """Those of arrays, and the constants; a decoded token waits for this."""
    found = []
    for x in args:
        is_array = type(x) is mx.array
        found.append(x.shape if is_array else _shapes(x) if isinstance(x, tuple) else x)
    return tuple(found)
