"""A disk that is full, and files that can't be read."""

import os
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


def cut_short(number):
    """Cut the file of a descriptor down to 100 bytes; a function that puts back what it had."""
    whole = os.pread(number, os.fstat(number).st_size, 0)
    os.ftruncate(number, 100)
    return lambda: os.pwrite(number, whole, 0)


def unreadable(number):
    """Let a descriptor be for writing only; a function that lets it be as it was."""
    before, blind = os.dup(number), os.open(f"/proc/self/fd/{number}", os.O_WRONLY)
    os.dup2(blind, number)
    os.close(blind)

    def back():
        os.dup2(before, number)
        os.close(before)

    return back
