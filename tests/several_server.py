"""`mlx-snapkv` whose rank 1 fails at requests for 77 tokens and in a step of one for 78; steps for 79 are slow."""

import os
import time

from mlx_snapkv.cli.app import main
from mlx_snapkv.server import shared_engine
from mlx_snapkv.server.shared_engine import SharedEngine

from_message, step = shared_engine.from_message, SharedEngine._step


def failing_from_message(message, *args):
    if message["max_tokens"] == 77:
        raise MemoryError("no room to hear")
    return from_message(message, *args)


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
    shared_engine.from_message = failing_from_message
    SharedEngine._step = failing_step
main()
