"""`doctor` prints figures that agree with MLX, the system and the installed packages."""

import json
import os
import platform
import shutil
import tempfile
from importlib.metadata import version

import mlx.core as mx
import pytest
from tiny_models import make_llama

from mlx_snapkv.measure import environment
from mlx_snapkv.planning import scores
from mlx_snapkv.planning.machine import this_machine
from mlx_snapkv.planning.units import format_bytes


def test_the_figures_are_of_this_machine(call, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, out, err = call("doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["mlx"], found["mlx-lm"]) == (version("mlx"), version("mlx-lm"))
    assert found["Python"] == platform.python_version()
    assert f"{os.cpu_count()} cores" in found["machine"] and platform.machine() in found["machine"]
    assert found["memory"].startswith(format_bytes(this_machine().memory))
    assert f"in {tmp_path}" in found["free disk"]
    gigabytes = float(found["free disk"].split()[0])
    assert gigabytes == pytest.approx(shutil.disk_usage(tmp_path).free / 1e9, rel=0.2)
    if mx.default_device() == mx.Device(mx.cpu):
        assert "CPU" in found["MLX computes with"] and "without Metal" in found["wired limit"]
        assert found["GPU kernels"] == "not used: there is no GPU"
    else:
        assert found["GPU kernels"] == "pass their self-test"


def test_the_table_gets_a_row_for_a_models_attention(call, refused):
    out = call("doctor")[1]
    assert "For a bug report" in out and "wired limit" in out and "attention of" not in out
    assert "attention of demo" in call("doctor", "--model", "demo")[1]
    assert "no such folder" in refused("doctor", "--model", "nowhere")


@pytest.mark.parametrize(
    "size, words", [(64, "heads of 64, fused"), (48, "not fused for a prompt's chunks with 48")]
)
def test_head_sizes_without_a_fused_metal_kernel_are_named(monkeypatch, size, words):
    monkeypatch.setattr(scores, "on_gpu", lambda: True)
    assert words in environment.fused_attention_text(make_llama(head_dim=size))
