"""Configure MLX's use of memory before a command runs a model."""

import atexit
import contextlib
import sys
from typing import Any

import mlx.core as mx

from ..errors import SnapKVError
from ..planning.machine import this_machine
from ..prerequisites import complaint_here
from .prefill import mlx_generate

_WIRED = contextlib.ExitStack()
atexit.register(_WIRED.close)


def hold_memory(model: Any) -> None:
    """Keep a GPU's memory wired, as mlx-lm does while it generates, and limit MLX's cache of free buffers.

    The memory stays wired until the process ends or another model is loaded.

    Raises: SnapKVError: MLX finds no GPU on a Mac.
    """
    if (complaint := complaint_here(has_metal=mx.metal.is_available())) is not None:
        raise SnapKVError(complaint)
    machine = this_machine()
    mx.set_cache_limit(machine.buffers)
    # At this limit, MLX frees unused buffers before it allocates more.
    mx.set_memory_limit(machine.usable)
    _WIRED.close()
    # MLX may print a warning, and stdout is for answers.
    with contextlib.redirect_stdout(sys.stderr):
        _WIRED.enter_context(mlx_generate.wired_limit(model))
