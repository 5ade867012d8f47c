"""The rotations of every RoPE object in mlx-lm, and of every family's queries, are undone and averaged."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import ProportionalRoPE, SuScaledRoPE, initialize_rope
from model_configs import make_model

from mlx_snapkv import models
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.compress.recording import RecordingKVCache
from mlx_snapkv.models.patch import recording
from mlx_snapkv.models.rope import mean_rotation, undo_rope

D = 64
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0}


ROPES = {
    "plain": nn.RoPE(D),
    "linear": initialize_rope(D, 1e4, False, {"type": "linear", "factor": 8.0}),
    "partial": nn.RoPE(16),
    "partial traditional": nn.RoPE(16, traditional=True),
    "llama3": initialize_rope(D, 5e5, False, LLAMA3),
    "yarn": initialize_rope(D, 1e4, True, YARN),
    "yarn, louder": initialize_rope(D, 1e4, False, YARN | {"mscale": 2.0}),
    "longrope": SuScaledRoPE(48, long_factor=[1.0 + i / 8 for i in range(24)]),
    "proportional": ProportionalRoPE(D, 32),
    "dynamic": initialize_rope(D, 1e4, False, DYNAMIC, 1 << 20),
}


@pytest.mark.parametrize("offset", [17, 100_000])
@pytest.mark.parametrize("name", ROPES)
def test_a_rotation_is_undone_and_averaged(name, offset):
    """The mean rotation is checked by rotating one vector at all positions."""
    rope = ROPES[name]
    x = mx.random.normal((2, 3, 20, D))
    found = rope(x, offset=offset)
    error = mx.abs(undo_rope(rope, found, offset) - x).max() / mx.abs(x).max()
    assert error.item() < 1e-5 and not mx.allclose(found, x, atol=1e-2).item()
    assert mx.allclose(undo_rope(rope, found[:, :, 11:13], offset + 11), x[:, :, 11:13], atol=1e-5)
    assert undo_rope(rope, found.astype(mx.float16), offset).dtype == mx.float32
    same = mx.contiguous(mx.broadcast_to(x[:, :, :1], (2, 3, 40, D)))
    matrix = mean_rotation(rope, D, offset, 40)
    assert np.allclose(x[:, :, 0] @ matrix.T, rope(same, offset=offset).mean(axis=2), atol=1e-4)


# These families have a norm or a factor after RoPE, which is not undone.
LATER = {"hunyuan", "hunyuan_v1_dense", "ministral3", "mistral3", "nanochat", "talkie"}
WITHOUT_ROPE = set(
    """afmoe cohere2 exaone4 exaone_moe gpt2 gpt_bigcode jamba kimi_k3 kimi_linear llama4 muse_glimmer
    nemotron_h""".split()
)


@pytest.mark.parametrize("name", models.SUPPORTED)
def test_undone_queries_are_the_inputs_of_the_familys_rope(name, monkeypatch):
    """Dimensions that are not rotated stay unchanged.

    The inputs are recorded in a second chunk. Rotating undone queries by their position's matrix restores the queries.
    """
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
        queries = layer.cache_in(caches).queries.astype(mx.float32)
        raw = layer.undo_rope(queries, 9)
        for i in (0, 6):
            matrix = layer.mean_rotation(queries.shape[3], 9 + i, 1)
            assert np.allclose(raw[0, :, i] @ matrix.T, queries[0, :, i], atol=1e-4)
        if layer.rope is None:
            assert mx.array_equal(raw, queries)
        elif name in LATER:
            assert not mx.allclose(raw, queries, atol=1e-3).item()
        else:
            parts = mx.split(raw, len(layer.readers), axis=1)
            assert all(any(is_part(part, x) for x in given) for part in parts)
    assert all(layer.rope is None for layer in found) == (name in WITHOUT_ROPE)


def remembering(call, given):
    def __call__(self, x, *args, **kwargs):
        given.append(x)
        return call(self, x, *args, **kwargs)

    return __call__


def is_part(raw, x):
    """Return whether `x` equals the first or the last dimensions of the queries."""
    if x.ndim != 4 or x.shape[:3] != raw.shape[:3] or x.shape[3] > raw.shape[3]:
        return False
    n = x.shape[3]
    return any(mx.allclose(part, x, atol=2e-5).item() for part in (raw[..., :n], raw[..., -n:]))
