"""`mlx-snapkv` whose rank 1 fails in a step of a request for 78 tokens; steps for 79 are slow."""

import os
import time

from mlx_snapkv.cli.app import main
from mlx_snapkv.server.shared_engine import SharedEngine

step = SharedEngine._step


def slow_step(engine):
    if is_wanted(engine, 79):
        time.sleep(1)
    step(engine)


def failing_step(engine):
    if is_wanted(engine, 78):
        raise MemoryError("no room to step")
    slow_step(engine)


def is_wanted(engine, max_tokens):
    return any(running.asked.max_tokens == max_tokens for running in engine._running.values())


SharedEngine._step = slow_step
if os.environ["MLX_RANK"] == "1":
    SharedEngine._step = failing_step
main()
