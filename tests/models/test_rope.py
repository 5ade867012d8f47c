"""Queries before RoPE, of every RoPE object that mlx-lm has."""

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import ProportionalRoPE, SuScaledRoPE, initialize_rope
from model_configs import make_model

from mlx_snapkv import models
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.models import rope as room
from mlx_snapkv.models.patch import recording
from mlx_snapkv.models.rope import mean_rotation, undo_rope

D = 64
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "plain": nn.RoPE(D),
    "traditional": nn.RoPE(D, traditional=True),
    "large base": nn.RoPE(D, base=5e6),
    "scaled": nn.RoPE(D, scale=0.25),
    "partial": nn.RoPE(16),
    "partial traditional": nn.RoPE(16, traditional=True),
    "linear": initialize_rope(D, 1e4, False, {"type": "linear", "factor": 8.0}),
    "dynamic": initialize_rope(D, 1e4, False, {"type": "dynamic", "factor": 2.0}, 1 << 20),
    "llama3": initialize_rope(D, 5e5, False, LLAMA3),
    "yarn": initialize_rope(D, 1e4, True, YARN | {"type": "yarn"}),
    "yarn, louder": initialize_rope(D, 1e4, False, YARN | {"type": "yarn", "mscale": 2.0}),
    "su": SuScaledRoPE(48, long_factor=[1.0 + i / 8 for i in range(24)]),
    "proportional": ProportionalRoPE(D, 32),
}


@pytest.mark.parametrize("offset", [0, 1, 511, 100_000])
@pytest.mark.parametrize("name", ROPES)
def test_a_rotation_is_undone(name, offset):
    x = mx.random.normal((2, 3, 20, D))
    turned = ROPES[name](x, offset=offset)
    error = mx.abs(undo_rope(ROPES[name], turned, offset) - x).max() / mx.abs(x).max()
    assert error.item() < 1e-5
    assert not mx.allclose(turned, x, atol=1e-2).item()


@pytest.mark.parametrize("start", [0, 17, 100_000])
@pytest.mark.parametrize("name", ROPES)
def test_the_mean_of_the_rotations_to_come(name, start):
    """What a vector becomes on average: each of the matrices is what the object makes of the unit vectors."""
    x, n = mx.random.normal((3, D)), 40
    turned = ROPES[name](
        mx.contiguous(mx.broadcast_to(x[:, None, None], (3, 1, n, D))), offset=start
    )
    matrix = mean_rotation(ROPES[name], D, start, n)
    assert np.allclose(x @ matrix.T, turned.mean(axis=(1, 2)), atol=1e-4)


def test_the_mean_of_no_rotation_changes_nothing():
    assert mx.array_equal(mean_rotation(None, 6, 5, 9), mx.eye(6))


def test_any_part_of_a_chunk_can_be_undone():
    rope, x = ROPES["yarn"], mx.random.normal((1, 2, 30, D))
    part = undo_rope(rope, rope(x, offset=7)[:, :, 11:13], 18)
    assert mx.allclose(part, x[:, :, 11:13], atol=1e-5).item()


def test_half_precision_becomes_float32_and_no_rope_changes_nothing():
    x = mx.random.normal((1, 1, 4, D)).astype(mx.float16)
    assert undo_rope(ROPES["plain"], x, 0).dtype == mx.float32
    assert mx.array_equal(undo_rope(None, x, 5), x.astype(mx.float32)).item()


def test_an_object_is_probed_once_and_not_kept_alive():
    calls = []

    class Counting(nn.RoPE):
        def __call__(self, x, offset=0):
            calls.append(x.shape)
            return super().__call__(x, offset)

    gc.collect()
    rope, n = Counting(D), len(room._probes)
    for _ in range(3):
        mx.eval(undo_rope(rope, mx.ones((1, 1, 2, D)), 4))
    assert len(calls) == 4 and len(room._probes) == n + 1
    gone = weakref.ref(rope)
    del rope
    gc.collect()
    assert gone() is None and len(room._probes) == n


# What follows RoPE there, a norm or a factor, is not undone.
LATER = {"hunyuan", "hunyuan_v1_dense", "ministral3", "mistral3", "nanochat", "talkie"}
UNTURNED = set(
    """afmoe cohere2 exaone4 exaone_moe gpt2 gpt_bigcode jamba kimi_k3 kimi_linear llama4 muse_glimmer
    nemotron_h""".split()
)


@pytest.mark.parametrize("name", models.SUPPORTED)
def test_every_familys_queries_are_what_its_rope_was_given(name, monkeypatch):
    """What the module itself was given with a second chunk; the dimensions that don't turn are left alone."""
    model, given = make_model(name), []
    caches = make_prompt_cache(model)
    found = attention_layers(model, caches)
    for layer in found:
        layer.put(caches, RecordingKVCache(9, 16, 16, layer))
    with recording({type(layer.attention) for layer in found}), monkeypatch.context() as patched:
        model(mx.arange(1, 10)[None], cache=caches)
        for cls in {type(layer.rope) for layer in found if isinstance(layer.rope, nn.Module)}:
            patched.setattr(cls, "__call__", remembering(cls.__call__, given))
        model(mx.arange(20, 27)[None], cache=caches)
    for layer in found:
        queries = layer.cache_in(caches).queries
        raw = layer.undo_rope(queries, 9)
        if layer.rope is None:
            assert mx.array_equal(raw, queries)
        elif name in LATER:
            assert not mx.allclose(raw, queries, atol=1e-3).item()
        else:
            parts = mx.split(raw, len(layer.readers), axis=1)
            assert all(any(is_part(part, x) for x in given) for part in parts)
    assert all(layer.rope is None for layer in found) == (name in UNTURNED)


@pytest.mark.parametrize("name", models.SUPPORTED)
def test_every_familys_mean_rotation_is_what_its_queries_become(name):
    """What is turned back and then by the matrix of one position is as it was."""
    model = make_model(name)
    caches = make_prompt_cache(model)
    found = attention_layers(model, caches)
    for layer in found:
        layer.put(caches, RecordingKVCache(9, 16, 16, layer))
    with recording({type(layer.attention) for layer in found}):
        model(mx.arange(1, 17)[None], cache=caches)
    for layer in found:
        queries = layer.cache_in(caches).queries.astype(mx.float32)
        raw = layer.undo_rope(queries, 9)
        for i in (0, 6):
            matrix = layer.mean_rotation(queries.shape[3], 9 + i, 1)
            assert np.allclose(raw[0, :, i] @ matrix.T, queries[0, :, i], atol=1e-4)


def remembering(call, given):
    def __call__(self, x, *args, **kwargs):
        given.append(x)
        return call(self, x, *args, **kwargs)

    return __call__


def is_part(raw, x):
    """Whether `x` are the first or the last dimensions of queries."""
    if x.ndim != 4 or x.shape[:3] != raw.shape[:3] or x.shape[3] > raw.shape[3]:
        return False
    n = x.shape[3]
    return any(mx.allclose(part, x, atol=2e-5).item() for part in (raw[..., :n], raw[..., -n:]))
