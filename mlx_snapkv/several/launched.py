"""Whether this process was started as one of several, told by its environment alone."""

import os

# One of these is set for every process that mlx.launch or mpirun starts.
RANK_IN = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def launched() -> bool:
    """Whether it was; no backend is asked, and MLX not imported."""
    return any(name in os.environ for name in RANK_IN)
