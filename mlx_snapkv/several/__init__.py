"""Several Macs that hold one model together: this rank's shard, and how ranks exchange values and failures."""

import os

# mlx.launch or mpirun sets one of these for every process.
RANK_IN = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def launched() -> bool:
    """Whether this process was started as one of several. Asks no backend and does not import MLX."""
    return any(name in os.environ for name in RANK_IN)
