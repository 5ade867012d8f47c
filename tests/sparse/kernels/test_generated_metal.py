"""The Metal source that MLX generates for each kernel has the right names, signature and address spaces.

If clang is installed, its types are checked as well.
"""

import importlib.util
import io
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from generated_kernels import metal_source
from kernel_cases import VARIANTS

from mlx_snapkv.sparse.kernels import launch
from mlx_snapkv.sparse.kernels.launch import Means

ATTRIBUTES = {
    "thread_position_in_threadgroup", "threadgroup_position_in_grid", "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
}  # fmt: skip
# MLX puts fewer than 8 numbers into constant memory. Small models may have so few of these inputs.
FEW = {
    "block_maxima", "offsets", "ids", "choosable", "unread", "log_mass", "temperature", "positions", "top", "total",
    "sinks",
}  # fmt: skip
METAL_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}
CHOICES = [*((variant, False) for variant in VARIANTS), (VARIANTS[0], True)]
HALF_TYPES = "_Float16 half; __bf16 bfloat16;"
STUB = Path(__file__).parents[2] / "metal_stub.h"


@pytest.mark.parametrize("variant, few", CHOICES)
@pytest.mark.parametrize("name", launch.INPUTS)
def test_the_signature_fits_the_body(name, variant, few):
    source = metal_source(name, *variant, few=FEW if few else ())
    head_dim, group, dtype = variant
    assert (
        "template <typename T, int D, int GROUP>\n[[kernel]] void custom_kernel_snapkv_" + name
        in source
    )
    assert source.rstrip().endswith(f"<{METAL_TYPES[dtype]}, {head_dim}, {group}>;")
    signature, body = re.split(r"\) \{\n", source.split("[[kernel]]", 1)[1], maxsplit=1)
    for label in launch.INPUTS[name]:
        space = "constant" if few and label in FEW else "device"
        assert re.search(rf"const {space} \w+\* {label} \[\[buffer", signature), label
        assert re.search(rf"\b{label}\b", body), label
    for label in launch.OUTPUTS[name]:
        assert re.search(rf"\bdevice \w+\* {label} \[\[buffer", signature), label
    assert set(re.findall(r"(\w+) \[\[\w+\]\]", signature)) <= ATTRIBUTES


@pytest.fixture(scope="module")
def clang():
    """Return a command that runs clang. Skip the test without a clang that knows Metal's half types."""
    commands = [["clang"]] if shutil.which("clang") else []
    if importlib.util.find_spec("ziglang"):
        commands.append([sys.executable, "-m", "ziglang", "clang"])
    for command in commands:
        check = [*command, "-x", "c++", "-std=c++14", "-fsyntax-only", "-"]
        if subprocess.run(check, input=HALF_TYPES, text=True, capture_output=True).returncode == 0:
            return command
    pytest.skip("no clang knows _Float16 and __bf16")


def test_clang_finds_no_wrong_type_or_address_space(clang):
    for name, (variant, few) in itertools.product(launch.INPUTS, CHOICES):
        source = metal_source(name, *variant, few=FEW if few else ())
        assert not complaints(clang, source), (name, variant)


def test_clang_rejects_a_pointer_to_another_address_space(clang):
    source = metal_source("attend", *VARIANTS[0])
    wrong = source.replace("const device T* value = ", "const device T* value = query; value = ")
    assert wrong != source and "address_space" in complaints(clang, wrong)


def complaints(clang, source):
    """Return clang's errors and warnings, with address spaces treated as C++ attributes."""
    instance = re.sub(r"\[\[host_name.*?\]\] \[\[kernel\]\] ", "", source)
    options = [
        "-x",
        "c++",
        "-std=c++14",
        "-fsyntax-only",
        "-Wall",
        "-Wno-unknown-attributes",
        "-Wno-unused",
        "-",
    ]
    done = subprocess.run(
        [*clang, *options, "-Wno-unused-command-line-argument"],
        input=f'#include "{STUB}"\n{instance}', text=True, capture_output=True,
    )  # fmt: skip
    return done.stderr if done.returncode or "warning" in done.stderr else ""


def launches(function, *arrays):
    """Return the operations in a function's graph, as on a Mac."""
    found = []

    def traced(*inputs):
        outputs = function(*inputs)
        dot = io.StringIO()
        mx.export_to_dot(dot, *outputs)
        found.extend(re.findall(r'\[label ="([^"]+)"', dot.getvalue()))
        return outputs

    mx.export_function(lambda _: None, traced, *arrays)
    return found


@pytest.mark.parametrize("with_means", [True, False])
def test_a_token_launches_four_kernels_and_nothing_else(with_means):
    H, group, D, n, k, n_means = 2, 4, 64, 2048, 100, 8

    def token(queries, projection, codes, powers, ids, choosable, keys, own, mean_keys, factors):
        clusters = {"ids": ids, "choosable": choosable} if with_means else {}
        positions, unread = launch.choose(
            queries,
            0.1,
            projection=projection,
            codes=codes,
            powers=powers,
            n_chosen=k,
            n_sink=4,
            choice_stop=2000,
            **clusters,
        )
        means = Means(mean_keys, mean_keys, unread, factors, factors) if with_means else None
        output = launch.attend(
            queries, (keys, keys), (own, own), 0.1, n_prompt=n, n_entries=n + 3, n_sink=4,
            choice_stop=2000, positions=positions, means=means,
        )  # fmt: skip
        return [output]

    arrays = [
        mx.zeros((1, H * group, 1, D), mx.float16), mx.zeros((1, H, D, 32)),
        mx.zeros((1, H, n, 4), mx.uint32), mx.zeros((1, H, n, 1), mx.uint8), mx.zeros((1, H, n), mx.uint16),
        mx.zeros((1, H, n_means), mx.int32), mx.zeros((1, H, n, D), mx.float16),
        mx.zeros((1, H, 256, D), mx.float16), mx.zeros((1, H, n_means, D), mx.float16),
        mx.zeros((1, H, group, 1, 1)),
    ]  # fmt: skip
    assert launches(token, *arrays) == ["CustomKernel"] * 4
