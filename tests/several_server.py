"""`mlx-snapkv` whose rank 1 fails at requests for 77 tokens, and in the first step of one for 78."""

import os

from mlx_snapkv.cli.app import main
from mlx_snapkv.server import shared_engine
from mlx_snapkv.server.shared_engine import SharedEngine

heard, step = shared_engine.heard, SharedEngine._step


def failing_heard(said, *args):
    if said["max_tokens"] == 77:
        raise MemoryError("no room to hear")
    return heard(said, *args)


def failing_step(engine):
    if any(running.asked.max_tokens == 78 for running in engine._running.values()):
        raise MemoryError("no room to step")
    step(engine)


if os.environ["MLX_RANK"] == "1":
    shared_engine.heard = failing_heard
    SharedEngine._step = failing_step
main()
