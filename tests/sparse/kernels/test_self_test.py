"""The self-test passes only for correct kernels, and says in one line why kernels are not used."""

import mlx.core as mx
import pytest
from kernel_cases import VARIANTS

from mlx_snapkv.sparse.kernels import launch, self_test
from mlx_snapkv.sparse.kernels.self_test import describe_difference, why_unused


@pytest.mark.parametrize("variant", VARIANTS)
def test_correct_kernels_pass(shim, variant):
    assert describe_difference(*variant) is None
    assert [launched.name for launched in shim.launches] == ["score", "select", "attend", "merge"]


@pytest.mark.parametrize(
    "name, output, words",
    [("score", 1, "choose different entries"), ("select", 0, "choose different entries"),
     ("select", 1, "count unread entries differently"), ("attend", 0, "attention differs"),
     ("merge", 0, "attention differs")],
)  # fmt: skip
def test_a_wrong_output_of_any_kernel_is_found(shim, monkeypatch, name, output, words):
    def wrong(kernel, *choice):
        run = shim.kernel(kernel, *choice)
        if kernel != name:
            return run

        def run_wrongly(**arguments):
            outputs = run(**arguments)
            flat = outputs[output].flatten()
            half = flat.size // 2
            flat[:half] = flat[half : 2 * half]
            outputs[output] = flat.reshape(outputs[output].shape)
            return outputs

        return run_wrongly

    monkeypatch.setattr(launch, "kernel", wrong)
    assert words in describe_difference(*VARIANTS[1])


def test_nan_is_a_difference(shim, monkeypatch):
    monkeypatch.setattr(launch, "NO_SINK", -1e30)
    attend = self_test.attend
    monkeypatch.setattr(self_test, "attend", lambda *a, **k: attend(*a, **k) * mx.nan)
    assert "differs from the plain path by nan" in describe_difference(*VARIANTS[1])


def test_without_a_gpu_the_kernels_are_not_used():
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        assert why_unused(128, 4, mx.float16) == "there is no GPU"


@pytest.fixture
def gpu(monkeypatch):
    """Make the self-test see a machine with Metal on which the kernels fail."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    self_test._self_test_failure.cache_clear()
    yield
    self_test._self_test_failure.cache_clear()


@pytest.mark.parametrize(
    "choice, words",
    [((72, 4, mx.float16), "72 channels"), ((128, 17, mx.float16), "17 query heads"),
     ((128, 4, mx.int32), "do not support int32")],
)  # fmt: skip
def test_unsupported_shapes_are_named(gpu, choice, words):
    assert words in why_unused(*choice)


def test_any_exception_is_a_reason(gpu, monkeypatch):
    def broken(*_):
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: no")

    monkeypatch.setattr(launch, "kernel", broken)
    reason = why_unused(64, 1, mx.float32)
    assert reason.startswith("the self-test failed: [metal::Device] Unable to build metal library")
    assert reason.endswith("source error: no")


def test_the_self_test_runs_once(gpu, shim):
    assert why_unused(*VARIANTS[0]) is None and len(shim.launches) == 4
    assert why_unused(*VARIANTS[0]) is None and len(shim.launches) == 4


def test_the_default_device_may_be_the_cpu_of_a_mac(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert why_unused(128, 4, mx.float16) == "MLX computes on the CPU"
