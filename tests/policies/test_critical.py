"""CriticalKV's second stage, against float64 NumPy, and through a whole request."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import steps
from tiny_models import make_llama

from mlx_snapkv import KeyDiff, SnapKV, SnapKVError, Stages, prefill
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.policies import critical

T, SINK, WINDOW, BUDGET = 90, 3, 8, 40
OPTIONS = {"n_sink": SINK, "n_window": WINDOW, "obs_window": 6, "lookahead": 0}
POLICY = SnapKV(budget=BUDGET, critical=True, pool_kernel=3, **OPTIONS)


@pytest.fixture(scope="module")
def layer():
    model = make_llama(hidden_size=48)
    return attention_layers(model, make_prompt_cache(model))[1]


def make_entries(layer, seed=0):
    rng = np.random.default_rng(seed)
    keys, values = (mx.array(rng.normal(size=(2, 2, T, 12)).astype(np.float32)) for _ in range(2))
    values = values * mx.array(rng.exponential(size=(2, 2, T, 1)).astype(np.float32)) ** 2
    queries = mx.array(rng.normal(size=(2, 4, 6, 12)).astype(np.float32))
    return Entries(keys, values, Queries(queries, range(T - 6, T), 12**-0.5), layer=layer)


@pytest.mark.parametrize("budget", [40, 30, 20, 12])
@pytest.mark.parametrize("n_bytes", [critical.WRITTEN_BYTES, 1])  # 1: blocks of 64 entries
@pytest.mark.parametrize("pool", ["avg", "forward"])
def test_the_second_half_is_ranked_by_what_it_writes(layer, pool, budget, n_bytes, monkeypatch):
    monkeypatch.setattr(critical, "WRITTEN_BYTES", n_bytes)
    policy = dataclasses.replace(POLICY, pool=pool)
    entries = make_entries(layer)
    entries.budget = budget
    scores = np.asarray(policy.score(entries))[..., SINK:-WINDOW]
    raw = reference.votes(
        entries.queries, entries.keys, entries.observed.places, entries.observed.scale
    )
    n_certain = budget // 2 - SINK - WINDOW
    for b in range(2):
        for head in range(2):
            plain = raw[b, head, SINK:-WINDOW] / 6
            weights = reference.pool(plain, pool, 3)
            if pool == "forward":
                weights = np.maximum(weights, plain)
            values = entries.values[b, head, SINK:-WINDOW]
            output, readers = layer.attention.o_proj.weight, (2 * head, 2 * head + 1)
            order, second = reference.critical(weights, values, output, readers, n_certain)
            assert np.argsort(-scores[b, head]).tolist() == order
            later = order[max(0, n_certain) :]
            assert np.allclose(scores[b, head, later], second[later], rtol=1e-4)


def test_it_changes_what_is_kept_and_plain_snapkv_does_not_need_the_layer(layer):
    entries = make_entries(layer)
    plain = SnapKV(budget=BUDGET, pool_kernel=3, **OPTIONS)
    entries.budget = BUDGET
    kept = [p.quotas(T, 1)[0].select(p.score(entries)) for p in (plain, POLICY)]
    assert not mx.array_equal(*kept)
    entries.layer = None
    plain.score(entries)


def with_bias(model):
    for layer in model.layers:
        layer.self_attn.o_proj.bias = 10 * mx.random.normal((64,))


def quantised(model):
    nn.quantize(model, group_size=32, bits=8)


@pytest.mark.parametrize("change, within", [(with_bias, 1e-5), (quantised, 2e-2)])
def test_the_projection_is_what_the_module_does(change, within):
    """A bias is left out, and quantised weights are asked by calling them."""
    model = make_llama(hidden_size=64)
    found = attention_layers(model, make_prompt_cache(model))[0]
    weight = np.array(found.attention.o_proj.weight)
    change(model)
    values = mx.zeros((1, 2, 5, 16))
    for head in range(2):
        made = found.output_weights(head, 4, values)
        expected = weight.reshape(64, 4, 16).transpose(1, 2, 0)[2 * head : 2 * head + 2]
        assert made.shape == (2, 16, 64)
        assert np.allclose(made, expected, atol=within)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"critical": 1}, "critical must be true or false, got 1"),
        ({"critical": True, "heads": "shared"}, "heads must be per_head with critical"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(SnapKVError, match=message):
        SnapKV(**options)


def test_a_projection_of_another_name_is_refused_by_name():
    model = make_llama(hidden_size=64)
    found = attention_layers(model, make_prompt_cache(model))[0]
    del found.attention.o_proj
    with pytest.raises(
        SnapKVError, match=r"Attention of 'llama' has no output projection .*o_proj"
    ):
        found.output_weights(0, 4, mx.zeros((1, 2, 5, 16)))


KEYDIFF = KeyDiff(budget=60, block=16)
WAYS = {
    "once": {"policy": POLICY},
    "block": {
        "policy": SnapKV(budget=BUDGET, critical=True, schedule="block", block=16, **OPTIONS)
    },
    "adaptive": {"policy": SnapKV(budget=f"adaptive:{BUDGET}", critical=True, **OPTIONS)},
    "pyramid": {"policy": SnapKV(budget=f"pyramid:{BUDGET}", critical=True, **OPTIONS)},
    "reselect": {
        "policy": SnapKV(
            budget=BUDGET, critical=True, on_full="reselect", **OPTIONS | {"n_window": 12}
        )
    },
    "second stage": {"policy": Stages(KEYDIFF, POLICY)},
    "8 bits": {"policy": POLICY, "kv_bits": 8, "kv_group_size": 32},
    "recalled": {"policy": POLICY, "memory": "recall", "verify": "all"},
    "a book": {"policy": Stages(KEYDIFF, POLICY), "memory": "recall:file"},
    "a quantised book": {"policy": Stages(KEYDIFF, POLICY), "memory": "recall:4bit"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_served(way, tokens):
    model = make_llama(hidden_size=128)
    cache = make_prompt_cache(model)
    items = steps(model, tokens, n=20, prompt_cache=cache, **WAYS[way])
    assert len(items) == 20 and all(np.isfinite(np.asarray(p)).all() for _, p in items)
    if "memory" not in WAYS[way]:
        assert sum(c.size() for c in cache) <= 2 * (BUDGET + 20)  # a block, or the answer


def kept_by(model, tokens, policy):
    return [c.positions for c in prefill(model, tokens, policy)[0]]


def test_the_last_stage_chooses_by_its_own_budget(tokens):
    """Of what an earlier stage left, as many are certain as of the whole prompt."""
    model = make_llama()
    everything = KeyDiff(budget=len(tokens) + 16, block=16)
    for both in zip(
        kept_by(model, tokens, POLICY), kept_by(model, tokens, Stages(everything, POLICY))
    ):
        assert mx.array_equal(*both)
