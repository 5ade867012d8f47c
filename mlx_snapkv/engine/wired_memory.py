"""MLX memory settings for commands that run a model."""

import atexit
import contextlib
import sys
from typing import Any

import mlx.core as mx

from ..errors import SnapKVError
from ..planning.machine import this_machine
from ..prerequisites import complaint_here
from .prefill import mlx_generate

_WIRED_LIMIT = contextlib.ExitStack()
atexit.register(_WIRED_LIMIT.close)


def hold_memory(model: Any) -> None:
    """Wire GPU memory for the model, as mlx-lm does during generation, and limit MLX's memory and buffer cache.

    The memory stays wired until the process exits, or this function is called for another model.

    Raises: SnapKVError: the package can't run on this machine, for example because MLX finds no GPU on a Mac.
    """
    complaint = complaint_here(has_metal=mx.metal.is_available())
    if complaint is not None:
        raise SnapKVError(complaint)
    machine = this_machine()
    mx.set_cache_limit(machine.buffer_limit)
    # Once this limit is reached, MLX frees unused buffers before it allocates new ones.
    mx.set_memory_limit(machine.usable)
    _WIRED_LIMIT.close()
    # mlx-lm prints a warning to stdout if the model is large, but stdout is reserved for answers.
    with contextlib.redirect_stdout(sys.stderr):
        _WIRED_LIMIT.enter_context(mlx_generate.wired_limit(model))
