"""Helpers that make files fail: a full disk, truncated files, unreadable files."""

import os
import resource
from contextlib import contextmanager


@contextmanager
def full_disk(n_bytes):
    """Keep files from growing beyond `n_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def cut_short(number):
    """Truncate a descriptor's file to 100 bytes. Return a function that restores its contents."""
    whole = os.pread(number, os.fstat(number).st_size, 0)
    os.ftruncate(number, 100)
    return lambda: os.pwrite(number, whole, 0)


def unreadable(number):
    """Make a descriptor write-only. Return a function that restores it."""
    before, blind = os.dup(number), os.open(f"/proc/self/fd/{number}", os.O_WRONLY)
    os.dup2(blind, number)
    os.close(blind)

    def back():
        os.dup2(before, number)
        os.close(before)

    return back
