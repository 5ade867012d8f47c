"""What is not worth keeping apart: the end of a prompt, where all that stands before it is kept for another."""

import numpy as np

SHARE = 16  # one token in so many may have to be read again


def covers(other: np.ndarray, ids: np.ndarray) -> bool:
    """Whether the tokens `other` begin with all of `ids` but a tail."""
    n = len(ids) - len(ids) // SHARE
    return np.array_equal(other[:n], ids[:n])
