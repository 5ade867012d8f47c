"""A file's bytes as memory, by the C library: before Python 3.13 a map of Python's keeps a descriptor open."""

import ctypes
import mmap
import os
import weakref
from typing import Any

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64
_C.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_FAILED = ctypes.c_void_p(-1).value


def file_map(descriptor: int) -> Any:
    """All bytes of an open file, to be read only; they go when nobody refers to them. Raises: OSError."""
    size = os.fstat(descriptor).st_size
    address = _C.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(found, _C.munmap, address, size).atexit = False
    return found
