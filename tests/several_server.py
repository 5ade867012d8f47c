"""`mlx-snapkv` with two changes: rank 1 fails on requests for 78 tokens, and steps for 79 take a second longer."""

import os
import time

from mlx_snapkv.cli.app import main
from mlx_snapkv.server.served_batch import ServedBatch

step = ServedBatch.step


def changed_step(batch):
    for request in batch.running.values():
        if request.completion_request.max_tokens == 79:
            time.sleep(1)
        if request.completion_request.max_tokens == 78 and os.environ["MLX_RANK"] == "1":
            raise MemoryError("no room to step")
    return step(batch)


ServedBatch.step = changed_step
main()
