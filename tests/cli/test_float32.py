"""Without a GPU, half-precision models are computed in float32 if there is enough memory."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from model_folders import demo_with, wide_demo
from tiny_models import make_llama

from mlx_snapkv.cli.loading import _compute_in_float32, load_model

ASK = ["--prompt", "Hello", "-m", "1"]


def dtypes(model):
    return {x.dtype for _, x in tree_flatten(model.parameters())}


def test_a_users_model_is_computed_in_float32_and_a_line_says_so(call, tmp_path):
    half = str(demo_with(tmp_path / "half"))
    code, _, err = call("generate", "--model", half, *ASK)
    said = [line for line in err.splitlines() if "float32" in line]
    assert code == 0 and len(said) == 1
    assert said[0].startswith(
        f"mlx-snapkv: --model {half}: computing in float32, faster than float16"
    )
    assert dtypes(load_model(half)[0]) == {mx.float32}


@pytest.mark.parametrize("wide", [False, True])
def test_float32_models_and_built_in_models_get_no_line(call, tmp_path, wide):
    model = str(wide_demo(tmp_path / "wide")) if wide else "demo"
    code, _, err = call("generate", "--model", model, *ASK)
    assert code == 0 and "float32" not in err


def test_a_model_that_would_take_more_than_half_of_the_memory_keeps_its_dtype():
    model = make_llama()
    model.set_dtype(mx.bfloat16)
    needed = 2 * sum(x.nbytes for _, x in tree_flatten(model.parameters()))
    said = _compute_in_float32("theirs", model, 2 * needed - 2)
    assert dtypes(model) == {mx.bfloat16}
    assert said.startswith("bfloat16 is slow without a GPU, and in float32 the weights would take")
    assert "computing in float32" in _compute_in_float32("theirs", model, 2 * needed)
    assert dtypes(model) == {mx.float32}


def test_quantised_weights_stay_and_their_scales_become_float32():
    model = make_llama(hidden_size=64, intermediate_size=64)
    model.set_dtype(mx.float16)
    from mlx.nn import quantize

    quantize(model, bits=4, group_size=32)
    assert _compute_in_float32("theirs", model, 1 << 40)
    assert dtypes(model) == {mx.uint32, mx.float32}
    assert model(mx.array([[1, 2, 3]])).dtype == mx.float32
