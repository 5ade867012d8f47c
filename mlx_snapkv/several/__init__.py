"""Several Macs that hold one model together: the shard that is here, and what its ranks tell each other."""

import os

# One of these is set for every process that mlx.launch or mpirun starts.
RANK_IN = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def launched() -> bool:
    """Whether this process was started as one of several. Asks no backend and does not import MLX."""
    return any(name in os.environ for name in RANK_IN)
