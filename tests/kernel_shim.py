"""Run the GPU kernels on a CPU: compile them as C++ with `kernel_shim.h`, and call them through ctypes."""

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_snapkv.sparse.kernels import launch

HERE = Path(__file__).parent
BODIES = Path(launch.__file__).parent
COMPILER = shutil.which("g++") if sys.platform == "linux" else None
COUNTING = ("-fsanitize=thread", "-DCOUNTS_BYTES")  # see `COUNTS_BYTES` in the header
OF_MODEL = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}
C_TYPES = {**OF_MODEL, mx.uint32: "uint", mx.int32: "int", mx.uint16: "ushort", mx.uint8: "uchar"}
# The dtypes of inputs; `None` is the queries' dtype.
INPUT_DTYPES = {
    "projection": mx.float32, "codes": mx.uint32, "powers": mx.uint8, "params": mx.uint32,
    "block_maxima": mx.float32, "offsets": mx.float16, "ids": mx.uint16, "choosable": mx.int32,
    "unread": mx.uint32, "log_mass": mx.float32, "temperature": mx.float32, "positions": mx.uint32,
    "partial": mx.float32, "top": mx.float32, "total": mx.float32, "sinks": mx.float32,
}  # fmt: skip


class ShimError(Exception):
    """The shim has found an error in a kernel, such as a barrier that not all threads reach."""


@dataclass
class Launch:
    """A repeatable kernel launch, with inputs and outputs as bytes.

    If `counts_bytes`, `moved` has the number of bytes that the last run read from and wrote to each buffer.
    """

    library: ctypes.CDLL
    name: str
    inputs: list[np.ndarray]
    output_sizes: list[int]
    groups: tuple[int, int]
    counts_bytes: bool = False

    def run(self, seed, skipped_line=-1):
        """Run the kernel and return its outputs. If bytes are counted, record the bytes moved per buffer.

        Args:
            seed: seed for the random order in which threads run.
            skipped_line: line of the barrier to leave out of the body, or -1.
        """
        # Bytes that a kernel does not write are NaN.
        outputs = [np.full(size, 0xFF, np.uint8) for size in self.output_sizes]
        buffers = [*self.inputs, *outputs]
        pointers = (ctypes.c_void_p * len(buffers))(*(x.ctypes.data for x in buffers))
        if self.counts_bytes:
            sizes = (ctypes.c_uint64 * len(buffers))(*(x.nbytes for x in buffers))
            self.library.count_bytes_of(len(buffers), pointers, sizes)
        run = getattr(self.library, f"run_{self.name}")
        run.restype = ctypes.c_char_p
        if error := run(pointers, *self.groups, seed, skipped_line):
            raise ShimError(f"{self.name}: {error.decode()}")
        if self.counts_bytes:
            self.library.moved_bytes.restype = ctypes.POINTER(ctypes.c_uint64)
            names = [*launch.INPUTS[self.name], *launch.OUTPUTS[self.name]]
            self.moved = dict(zip(names, self.library.moved_bytes()[: len(buffers)]))
        return outputs


class Shim:
    """A stand-in for a GPU, whose `kernel` returns functions like those of `launch.kernel`.

    Attributes:
        libraries: folder of the compiled kernels.
        bodies: folder of the kernel bodies.
        counts_bytes: whether launches count the bytes that they move.
        launches: all launches so far.
    """

    def __init__(self, libraries, bodies=BODIES, counts_bytes=False):
        self.libraries = libraries
        self.bodies = bodies
        self.counts_bytes = counts_bytes
        self.launches = []

    def kernel(self, name, head_dim, group, dtype):
        options = COUNTING if self.counts_bytes else ()
        library = compiled(head_dim, group, dtype, self.bodies, self.libraries, options)

        def run(*, inputs, output_shapes, output_dtypes, grid, threadgroup):
            assert threadgroup == (launch.THREADS[name], 1, 1) and grid[0] % threadgroup[0] == 0
            for label, x in zip(launch.INPUTS[name], inputs):
                assert fits(x.dtype, INPUT_DTYPES.get(label, dtype)), (label, x.dtype)
            outputs = list(zip(output_shapes, output_dtypes))
            sizes = [math.prod(shape) * of.size for shape, of in outputs]
            groups = grid[0] // threadgroup[0], grid[1]
            data = [as_bytes(x) for x in inputs]
            this = Launch(library, name, data, sizes, groups, self.counts_bytes)
            self.launches.append(this)
            found = this.run(seed=len(self.launches))
            return [
                mx.view(mx.array(x), of).reshape(shape) for x, (shape, of) in zip(found, outputs)
            ]

        return run


def fits(dtype, of_input):
    """Return whether a kernel can read an array of `dtype` as its input. The signs of integer types may differ."""
    both = mx.issubdtype(dtype, mx.integer) and mx.issubdtype(of_input, mx.integer)
    return dtype == of_input or (both and dtype.size == of_input.size)


def as_bytes(array):
    """Return an array's bytes."""
    flat = mx.contiguous(array).flatten()
    return np.array(mx.view(flat, mx.uint8))


@cache
def compiled(head_dim, group, dtype, folder, libraries, options=()):
    """Return the four kernels for a head size, group and dtype, compiled to a shared library in `libraries`.

    Args:
        head_dim: the head size.
        group: number of query heads per KV head.
        dtype: dtype of the queries.
        folder: folder of the kernel bodies.
        libraries: folder of the compiled kernels.
        options: additional compiler options.
    """
    code = source(head_dim, group, dtype)
    bodies = [path.read_text() for path in sorted(folder.glob("*.metal"))]
    text = "\n".join([code, *options, (HERE / "kernel_shim.h").read_text(), *bodies])
    path = libraries / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=libraries) as work:
            Path(work, "kernels.cpp").write_text(code)
            command = [
                COMPILER,
                "-std=c++17",
                "-O1",
                "-shared",
                "-fPIC",
                "-fno-gnu-unique",
                "-fno-strict-aliasing",
                f"-I{HERE}",
                f"-I{folder}",
            ]
            subprocess.run([*command, *options, "-c", "kernels.cpp"], cwd=work, check=True)
            # Linked without the options, which would add the sanitizer's library.
            subprocess.run([*command, "kernels.o", "-o", "kernels.so"], cwd=work, check=True)
            os.replace(Path(work, "kernels.so"), path)
    return ctypes.CDLL(str(path))


def source(head_dim, group, dtype):
    """Return C++ with one function per kernel, with the parameters that MLX writes."""
    parts = ['#include "kernel_shim.h"', f"typedef {OF_MODEL[dtype]} T;"]
    parts.append(f"constexpr int D = {head_dim}, GROUP = {group};")
    for name in launch.INPUTS:
        inputs = {label: INPUT_DTYPES.get(label, dtype) for label in launch.INPUTS[name]}
        outputs = {label: of or dtype for label, of in launch.OUTPUTS[name].items()}
        parameters = [f"const {C_TYPES[of]}* {label}" for label, of in inputs.items()]
        parameters += [f"{C_TYPES[of]}* {label}" for label, of in outputs.items()]
        types = [f"const {C_TYPES[of]}*" for of in inputs.values()]
        types += [f"{C_TYPES[of]}*" for of in outputs.values()]
        arguments = ", ".join(f"({of})shim::buffers[{i}]" for i, of in enumerate(types))
        parts.append(
            f"""
{launch.header(name)}
static void {name}({", ".join(parameters)}) {{
#include "{name}.metal"
}}
extern "C" const char* run_{name}(void** buffers, uint x, uint y, uint seed, long skipped_line) {{
  shim::seed = seed;
  shim::skipped_line = skipped_line;
  return shim::launch([] {{ {name}({arguments}); }}, buffers, x, y, THREADS);
}}
"""
            + "".join(f"#undef {line.split()[1]}\n" for line in launch.header(name).splitlines())
        )
    return "\n".join(parts)
