"""If any one of their barriers is removed, the kernels give different results on the shim."""

import faulthandler
import os
import shutil
import warnings

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import VARIANTS
from kernel_shim import BODIES, Shim, ShimError

from mlx_snapkv.sparse.kernels import launch, self_test

SEEDS = range(8)


@pytest.fixture
def launches(shim, monkeypatch):
    """Return the launches of the four kernels for a token, with several iterations of every loop."""
    monkeypatch.setattr(launch, "MAX_SPLITS", 1)
    monkeypatch.setattr(launch, "SCORE_GROUPS", 2)
    assert self_test.describe_difference(*VARIANTS[1]) is None
    return {launched.name: launched for launched in shim.launches}


def barriers(name):
    """Return the lines of a kernel body with threadgroup memory barriers. The shim does not order device memory."""
    lines = (BODIES / f"{name}.metal").read_text().splitlines()
    return [i for i, line in enumerate(lines, 1) if "mem_flags::mem_threadgroup" in line]


def differs(launched, line, expected):
    """Return whether a run without one barrier gives a different result.

    Such a run may read anywhere in memory, so it is a separate process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:  # the child uses neither MLX nor threads
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            same = all(
                np.array_equal(x, y)
                for seed in SEEDS
                for x, y in zip(launched.run(seed, line), expected)
            )
        except ShimError:
            same = False
        os._exit(0 if same else 1)
    return os.waitpid(child, 0)[1] != 0


def test_every_barrier_is_needed(launches):
    for name, launched in launches.items():
        expected = launched.run(seed=9)
        assert not differs(launched, -1, expected), f"{name} depends on the order of its threads"
        for line in barriers(name):
            assert differs(launched, line, expected), f"{name}.metal works without line {line}"


def test_a_barrier_that_diverges_is_an_error(shim, tmp_path, monkeypatch):
    shutil.copytree(BODIES, tmp_path, dirs_exist_ok=True)
    body = tmp_path / "merge.metal"
    body.write_text(
        body.read_text().replace("  threadgroup_barrier", "  if (tid < 40) threadgroup_barrier")
    )
    monkeypatch.setattr(launch, "kernel", Shim(tmp_path, bodies=tmp_path).kernel)
    query, entries = mx.zeros((1, 1, 1, 64)), [mx.zeros((1, 1, 1, 64))] * 2
    with pytest.raises(ShimError, match="wait at different places"):
        launch.attend(
            query, entries, entries, 1.0, n_prompt=1, n_entries=1, n_sink=0, choice_stop=0
        )
