"""For machines without measurements, the attention of one layer is timed instead of whole answers."""

import pytest
from model_configs import make_model
from speed_helpers import WINS_LATER, remember

from mlx_snapkv import SnapKVError, Sparse
from mlx_snapkv.caches.layers import attention_layers, sparse_layers
from mlx_snapkv.measure import layer_speed as module
from mlx_snapkv.measure.layer_speed import layer_speed, sparse_pays
from mlx_snapkv.planning.break_even import BreakEven
from mlx_snapkv.planning.speed_record import DECODE_FULL, DECODE_SPARSE
from mlx_snapkv.sparse.prompt_caches import make_caches

LENGTHS = (1200, 2400)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(module, "LENGTHS", LENGTHS)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt_oss", "gemma3n"])
def test_every_layer_counts(name, monkeypatch):
    monkeypatch.setattr(
        module, "_seconds_per_call", lambda attend: 1.0 if attend().ndim == 4 else 0.0
    )
    model = make_model(name)
    found = layer_speed(model)
    n = len(sparse_layers(attention_layers(model, make_caches(model, Sparse()))))
    assert set(found.lines) == {DECODE_FULL, DECODE_SPARSE}
    assert all(
        line.upper_bound(x) == pytest.approx(n) for line in found.lines.values() for x in LENGTHS
    )


def test_times_are_measured():
    assert all(line.sum_y > 0 for line in layer_speed(make_model("llama")).lines.values())


def test_a_model_that_cant_be_served_is_refused():
    with pytest.raises(SnapKVError, match="sparse attention is not possible"):
        layer_speed(make_model("gemma2"))


UNKNOWN = BreakEven()


def test_only_a_gpu_estimates_what_was_not_measured(record, monkeypatch):
    model = make_model("llama")
    assert sparse_pays(model) == UNKNOWN
    monkeypatch.setattr(module, "on_gpu", lambda: True)
    assert sparse_pays(model).basis == "estimated"
    assert sparse_pays(make_model("gemma2")) == UNKNOWN
    remember(model, WINS_LATER)
    monkeypatch.setattr(module, "layer_speed", None)
    assert sparse_pays(model).basis == "measured"
