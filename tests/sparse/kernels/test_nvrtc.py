"""NVIDIA's compiler NVRTC, which needs no GPU, accepts the kernels.

`pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12` installs it.
"""

import ctypes
import importlib.util
import re
from pathlib import Path

import mlx.core as mx
import pytest
from kernel_cases import VARIANTS
from kernel_shim import BODIES, INPUT_DTYPES

from mlx_snapkv.sparse.kernels import launch

CUDA_TYPES = {
    mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.uint32: "unsigned int",
    mx.int32: "int", mx.uint16: "unsigned short", mx.uint8: "unsigned char",
}  # fmt: skip
MAX_SHARED_MEMORY = 32 << 10  # bytes; Metal's limit, CUDA's is 48 kB


def libraries():
    """Return the path of NVRTC and the folders of CUDA's headers in pip's packages, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    headers = [
        path.parent for folder in folders for path in Path(folder).glob("*/include/cuda_fp16.h")
    ]
    return (found[0], headers) if found and headers else None


if libraries() is None:
    pytest.skip("NVRTC is not installed", allow_module_level=True)


def source(name, head_dim, group, dtype):
    """Return the source that MLX generates for CUDA, without headers that the kernels do not use."""
    inputs = {label: INPUT_DTYPES.get(label, dtype) for label in launch.INPUTS[name]}
    outputs = {label: of or dtype for label, of in launch.OUTPUTS[name].items()}
    parameters = [f"const {CUDA_TYPES[of]}* {label}" for label, of in inputs.items()]
    parameters += [f"{CUDA_TYPES[of]}* {label}" for label, of in outputs.items()]
    return f"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
{launch.header(name)}
{(BODIES / "cuda.h").read_text()}
namespace mlx::core::cu {{
__global__ void {name}({", ".join(parameters)}) {{
  constexpr int D = {head_dim}, GROUP = {group};
  using T = {CUDA_TYPES[dtype]};
{(BODIES / f"{name}.metal").read_text()}
}}
}}
"""


@pytest.mark.parametrize("variant", [*VARIANTS, (256, 16, mx.float16)])
@pytest.mark.parametrize("name", launch.INPUTS)
def test_nvrtc_compiles_the_kernels(name, variant):
    path, headers = libraries()
    nvrtc = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = source(name, *variant).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, name.encode(), 0, None, None)
    options = [
        b"--gpu-architecture=sm_90",
        b"--device-as-default-execution-space",
        b"--ptxas-options=-v",
    ]
    options += [f"--include-path={folder}".encode() for folder in headers]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.value.decode()
    assert not failed, text
    print(re.findall(r"Used \d+ registers|\d+ bytes smem|\d+ bytes spill stores", text))
    assert int(re.search(r"(\d+) bytes smem", text)[1]) <= MAX_SHARED_MEMORY
    assert re.search(r"\b0 bytes spill stores", text)
