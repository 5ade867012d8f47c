"""The source that MLX generates for the GPU kernels on a Mac. Any build of MLX prints it when exporting a function."""

import os
import tempfile

import mlx.core as mx
from kernel_shim import INPUT_DTYPES

from mlx_snapkv.sparse.kernels import launch


def metal_source(name, head_dim, group, dtype, few=()):
    """Return a kernel's source as Metal's compiler gets it, after MLX's own header.

    `few` names inputs with fewer than 8 numbers, which small models have.
    """
    kernel = launch.kernel.__wrapped__(name, head_dim, group, dtype)
    outputs = [of or dtype for of in launch.OUTPUTS[name].values()]
    threads = launch.THREADS[name], 1, 1

    def call(*inputs):
        return kernel(
            inputs=list(inputs), grid=threads, threadgroup=threads, output_shapes=[(16,)] * len(outputs),
            output_dtypes=outputs, verbose=True,
        )  # fmt: skip

    inputs = [
        mx.zeros(4 if label in few else 16, INPUT_DTYPES.get(label, dtype))
        for label in launch.INPUTS[name]
    ]
    return printed_by(lambda folder: mx.export_function(f"{folder}/kernel.mlxfn", call, *inputs))


def printed_by(export):
    """Return the source that MLX prints while `export(folder)` runs."""
    with tempfile.TemporaryFile("w+") as file, tempfile.TemporaryDirectory() as folder:
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            export(folder)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        return file.read().split("```")[1]
