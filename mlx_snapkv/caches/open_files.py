"""How many files a process may open: by default 256 on a Mac, where a book takes two or more a layer."""

import contextlib
import errno
import os
import resource

WANTED = 10_240  # the most that macOS lets a process ask for, whatever its hard limit


def many_are_open() -> bool:
    """Whether half of the files that the process may open are open: sockets and libraries want the others."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return most != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) > most / 2
    except OSError:  # the list is a file, too
        return True


def allow_more_files() -> None:
    """Raise the process's own limit as far as the system's allows, once half of it is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted and many_are_open():
        with contextlib.suppress(OSError, ValueError):  # whoever opens more is told
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_open_files_limit(error: BaseException) -> bool:
    """Whether an error is that no more files may be opened."""
    return isinstance(error, OSError) and error.errno == errno.EMFILE


def limit_reached() -> str:
    """Says that no more files may be opened, and what to do."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"all {most} files that this process may open are open; run ulimit -n {WANTED} before it"
