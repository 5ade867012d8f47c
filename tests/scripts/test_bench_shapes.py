"""The table of `make bench-shapes`, run on this machine with small models of the same types."""

import sys

import bench_shapes
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from model_configs import make_model
from tiny_models import make_llama

from mlx_snapkv.planning.speed_record import PATH_VARIABLE

MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 32, "norm_topk_prob": True, "vocab_size": 128,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Replace the two shapes with small ones."""
    small = {
        "8b": lambda: make_llama(vocab_size=128),
        "30b-a3b": lambda: make_model("qwen3_moe", MIXTURE),
    }
    monkeypatch.setattr(bench_shapes, "SHAPES", small)
    # On a CPU, MLX multiplies by experts in float32 only.
    monkeypatch.setattr(bench_shapes, "with_random_weights", lambda model: model)
    # main() sets the record's path. Undo that after the test, or later tests would use the record.
    monkeypatch.setenv(PATH_VARIABLE, "")


def test_every_method_answers_every_prompt_twice(small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "bench_shapes.py --lengths 300 400 --tokens 8".split())
    bench_shapes.main()
    out, err = capsys.readouterr()
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines())
    assert head == bench_shapes.COLUMNS
    wanted = [
        [shape, length, method, request]
        for shape in ("8b", "30b-a3b")
        for length in ("300", "400")
        for method in bench_shapes.METHODS
        for request in ("1", "2")
    ]
    assert [row[:4] for row in rows] == wanted
    assert all(
        "(1.00x)" in row[4] and "(1.00x)" in row[5] for row in rows if row[2] == "full cache"
    )
    assert err.splitlines() == ["making 8b", "making 30b-a3b"]


@pytest.mark.parametrize("shape, least, most", [("8b", 8.0e9, 8.1e9), ("30b-a3b", 30.4e9, 30.7e9)])
def test_the_shapes_have_as_many_parameters_as_their_names_say(shape, least, most):
    """No array is evaluated."""
    model = bench_shapes.SHAPES[shape]()
    assert least < sum(x.size for _, x in tree_flatten(model.parameters())) < most


def test_random_weights_are_in_half_precision():
    model = bench_shapes.with_random_weights(make_llama())
    assert {x.dtype for _, x in tree_flatten(model.parameters())} == {mx.bfloat16}
