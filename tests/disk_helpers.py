"""A disk that is full."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(n_bytes):
    """Files can't grow beyond `n_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
