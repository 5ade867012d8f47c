"""Every RoPE object that mlx-lm has, undone, averaged and applied once more; and every family's queries and keys."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import ProportionalRoPE, SuScaledRoPE, initialize_rope
from model_configs import make_model

from mlx_snapkv import models
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.models import rope as room
from mlx_snapkv.models.patch import recording
from mlx_snapkv.models.rope import composes, mean_rotation, turn, undo_rope

D = 64
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0}


def plain(dims=D, scale=1.0):
    """Wavelengths of each pair, divided by 2 pi."""
    return 1e4 ** (np.arange(0, dims, 2) / dims) / scale


llama3 = initialize_rope(D, 5e5, False, LLAMA3)
yarn = initialize_rope(D, 1e4, True, YARN)
loud = initialize_rope(D, 1e4, False, YARN | {"mscale": 2.0})
su = SuScaledRoPE(48, long_factor=[1.0 + i / 8 for i in range(24)])
part = ProportionalRoPE(D, 32)
linear = initialize_rope(D, 1e4, False, {"type": "linear", "factor": 8.0})
# The object, the wavelengths that it turns pairs by, and whether pairs are neighbours.
ROPES = {
    "plain": (nn.RoPE(D), plain(), False),
    "linear": (linear, plain(scale=1 / 8), False),
    "partial traditional": (nn.RoPE(16, traditional=True), plain(16), True),
    "llama3": (llama3, llama3._freqs, False),
    "yarn": (yarn, yarn._freqs, True),
    "yarn, louder": (loud, loud._freqs, False),
    "longrope": (su, su._freqs, False),
    "proportional": (part, part._freqs, False),
}
STEPS = [0, 1, 7, 300, 5_000, 90_000]


@pytest.mark.parametrize("name", ROPES)
def test_turning_equals_rotation_in_double_precision(name):
    rope, wavelengths, neighbours = ROPES[name]
    keys = mx.random.normal((1, 2, 6, D), key=mx.random.key(1))
    steps = np.array([STEPS, STEPS[::-1]])
    found = np.array(turn(rope, keys, mx.array(steps[None])))
    for head in range(2):
        angles = steps[head][:, None] / np.array(wavelengths, np.float64)
        wanted = reference.rotated(np.array(keys[0, head]), angles, neighbours)
        assert np.abs(found[0, head] - wanted).max() < 0.03  # of a float32 angle of 90,000
        assert np.abs(found[0, head] - wanted)[steps[head] <= 300].max() < 2e-4
    assert composes(rope, D, 4096) and composes(rope, D, 1 << 20)
    assert not composes(initialize_rope(D, 1e4, False, DYNAMIC, 4096), D, 4096)


@pytest.mark.parametrize("n", [0, 20, 41])
def test_many_at_a_time_are_as_all_at_once_and_steps_of_0_change_no_bit(n, monkeypatch):
    keys = mx.random.normal((1, 2, n, D))
    steps = mx.random.randint(0, 3, (1, 2, n)) * 700
    at_once = turn(loud, keys, steps)
    monkeypatch.setattr(room, "AT_ONCE", 20)
    found = turn(loud, keys, steps)
    assert mx.array_equal(found, at_once).item()
    assert turn(loud, keys.astype(mx.bfloat16), steps).dtype == mx.bfloat16
    assert mx.array_equal(mx.all(found == keys, axis=-1), steps == 0).item()


UNDONE = {name: each[0] for name, each in ROPES.items()} | {
    "partial": nn.RoPE(16),
    "dynamic": initialize_rope(D, 1e4, False, DYNAMIC, 1 << 20),
}


@pytest.mark.parametrize("offset", [17, 100_000])
@pytest.mark.parametrize("name", UNDONE)
def test_a_rotation_is_undone_and_averaged(name, offset):
    """Each of the mean's matrices is what the object makes of the unit vectors."""
    rope = UNDONE[name]
    x = mx.random.normal((2, 3, 20, D))
    found = rope(x, offset=offset)
    error = mx.abs(undo_rope(rope, found, offset) - x).max() / mx.abs(x).max()
    assert error.item() < 1e-5 and not mx.allclose(found, x, atol=1e-2).item()
    assert mx.allclose(undo_rope(rope, found[:, :, 11:13], offset + 11), x[:, :, 11:13], atol=1e-5)
    assert undo_rope(rope, found.astype(mx.float16), offset).dtype == mx.float32
    same = mx.contiguous(mx.broadcast_to(x[:, :, :1], (2, 3, 40, D)))
    matrix = mean_rotation(rope, D, offset, 40)
    assert np.allclose(x[:, :, 0] @ matrix.T, rope(same, offset=offset).mean(axis=2), atol=1e-4)


# What follows RoPE there, a norm or a factor, is not undone.
LATER = {"hunyuan", "hunyuan_v1_dense", "ministral3", "mistral3", "nanochat", "talkie"}
UNTURNED = set(
    """afmoe cohere2 exaone4 exaone_moe gpt2 gpt_bigcode jamba kimi_k3 kimi_linear llama4 muse_glimmer
    nemotron_h""".split()
)


@pytest.mark.parametrize("name", models.SUPPORTED)
def test_every_familys_queries_are_what_its_rope_was_given(name, monkeypatch):
    """What the module itself was given with a second chunk; the dimensions that don't turn are left alone.

    What is turned back and then by the matrix of one position is as it was.
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
    assert all(layer.rope is None for layer in found) == (name in UNTURNED)


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


NORMED = {"hunyuan", "hunyuan_v1_dense"}
# Arguments before the mask: a scale of queries.
BEFORE_MASK = dict.fromkeys(("ministral3", "mistral3", "mistral4"), (mx.ones((41, 1)),))
WIDE = {"prism_hadamard_qwen35": 128}


@pytest.mark.parametrize("name", models.SUPPORTED)
def test_every_familys_keys(name):
    """The same hidden state again and again has keys that differ by nothing but their rotation."""
    model = make_model(name)
    caches = make_prompt_cache(model)
    hidden = mx.repeat(mx.random.normal((1, 1, WIDE.get(name, 64))), 41, axis=1)
    for layer in attention_layers(model, caches):
        if layer.rope is None:
            continue
        own = layer.cache_in(caches)
        if layer.family.method == "attention":
            own.update_and_fetch(*layer.attention.get_qkv(hidden, 0)[1:])
        else:
            cache = caches[layer.index] if name == "baichuan_m1" else own
            layer.attention(hidden, *BEFORE_MASK.get(name, ()), create_causal_mask(41), cache)
        keys = Entries(*own.keys_and_values(), layer=layer).keys
        keys = keys[:, :, 1:41]  # a convolution's first is another
        B, H, _, D = keys.shape
        can = layer.family.can_turn(layer.attention, layer.rope, D, 4096)
        assert can == (name not in NORMED)
        if can:
            later = layer.turn(keys[:, :, :10], mx.full((B, H, 10), 30))
            assert mx.allclose(later, keys[:, :, 30:], atol=1e-4).item()
            sooner = layer.turned_to(keys[:, :, 30:], 31, 1)
            assert mx.allclose(sooner, keys[:, :, :10], atol=1e-4).item()
