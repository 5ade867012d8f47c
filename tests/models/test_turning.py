"""Keys turned on by every RoPE object that mlx-lm has, against rotations in double precision."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import ProportionalRoPE, SuScaledRoPE, initialize_rope
from model_configs import make_model

from mlx_snapkv import models
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.models import turning
from mlx_snapkv.models.rope import amplitudes
from mlx_snapkv.models.turning import composes, turn

D = 64
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def plain(dims=D, base=1e4, scale=1.0):
    """Wavelengths, divided by 2 pi, of each pair."""
    return base ** (np.arange(0, dims, 2) / dims) / scale


# The object, the wavelengths that it turns pairs by, whether pairs are neighbours, and what it multiplies them by.
ROPES = {
    "plain": (nn.RoPE(D), plain(), False, 1.0),
    "large base": (nn.RoPE(D, base=5e6), plain(base=5e6), False, 1.0),
    "traditional": (nn.RoPE(D, traditional=True), plain(), True, 1.0),
    "scaled": (nn.RoPE(D, scale=0.25), plain(scale=0.25), False, 1.0),
    "partial": (nn.RoPE(16), plain(16), False, 1.0),
    "partial traditional": (nn.RoPE(16, traditional=True), plain(16), True, 1.0),
    "llama3": (llama3 := initialize_rope(D, 5e5, False, LLAMA3), llama3._freqs, False, 1.0),
    "yarn": (
        yarn := initialize_rope(D, 1e4, True, YARN | {"type": "yarn"}),
        yarn._freqs,
        True,
        None,
    ),
    "yarn, louder": (
        loud := initialize_rope(D, 1e4, False, YARN | {"type": "yarn", "mscale": 2.0}),
        loud._freqs,
        False,
        0.2 * math.log(4) + 1,
    ),
    "longrope": (
        su := SuScaledRoPE(48, long_factor=[1.0 + i / 8 for i in range(24)]),
        su._freqs,
        False,
        su._scale,
    ),
    "proportional": (part := ProportionalRoPE(D, 32), part._freqs, False, 1.0),
}
STEPS = [0, 1, 7, 300, 5_000, 90_000]


def rotated(x: np.ndarray, angles: np.ndarray, neighbours: bool) -> np.ndarray:
    """`x` `(n, D)` with its first pairs turned by angles `(n, pairs)`, float64."""
    n = angles.shape[1]
    x = x.astype(np.float64)
    first, second = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if neighbours else (slice(n), slice(n, 2 * n))
    )
    a, b = x[:, first].copy(), x[:, second].copy()
    x[:, first] = a * np.cos(angles) - b * np.sin(angles)
    x[:, second] = a * np.sin(angles) + b * np.cos(angles)
    return x


@pytest.mark.parametrize("name", ROPES)
def test_equals_rotation_in_double_precision(name):
    rope, wavelengths, neighbours, _ = ROPES[name]
    keys = mx.random.normal((1, 2, 6, D), key=mx.random.key(1))
    steps = np.array([STEPS, STEPS[::-1]])
    found = np.array(turn(rope, keys, mx.array(steps[None])))
    for head in range(2):
        angles = steps[head][:, None] / np.array(wavelengths, np.float64)
        wanted = rotated(np.array(keys[0, head]), angles, neighbours)
        assert np.abs(found[0, head] - wanted).max() < 0.03  # of a float32 angle of 90,000
        near = steps[head] <= 300
        assert np.abs(found[0, head] - wanted)[near].max() < 2e-4


@pytest.mark.parametrize("name", ROPES)
def test_is_as_if_the_key_had_come_later(name):
    rope = ROPES[name][0]
    keys = mx.random.normal((1, 3, 1, D), key=mx.random.key(2))
    found = turn(rope, rope(keys, 1000), mx.full((1, 3, 1), 234))
    assert mx.allclose(found, rope(keys, 1234), atol=2e-3).item()
    assert composes(rope, D, 4096) and composes(rope, D, 1 << 20)


@pytest.mark.parametrize("n", [0, 5, 20, 41])
def test_many_at_a_time_are_as_all_at_once(n, monkeypatch):
    keys, steps = mx.random.normal((1, 2, n, D)), mx.random.randint(0, 5000, (1, 2, n))
    at_once = turn(ROPES["llama3"][0], keys, steps)
    monkeypatch.setattr(turning, "AT_ONCE", 20)
    assert mx.array_equal(turn(ROPES["llama3"][0], keys, steps), at_once).item()


@pytest.mark.parametrize("name", [name for name in ROPES if ROPES[name][3]])
def test_amplitudes(name):
    rope, wavelengths, _, amplitude = ROPES[name]
    found = np.array(amplitudes(rope, D))
    n = 2 * len(np.array(wavelengths))
    assert np.allclose(found[:n], amplitude, atol=1e-5) and np.allclose(found[n:], 1, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_what_is_turned_by_nothing_stays_bit_for_bit(dtype):
    keys = mx.random.normal((1, 2, 3, D)).astype(dtype)
    found = turn(ROPES["yarn, louder"][0], keys, mx.array([[[0, 5, 0], [1, 0, 0]]]))
    assert found.dtype == dtype
    same = mx.all(found == keys, axis=-1)
    assert same.tolist() == [[[True, False, True], [False, True, True]]]


def test_rotations_that_depend_on_the_length_do_not_compose():
    dynamic = initialize_rope(D, 1e4, False, {"type": "dynamic", "factor": 2.0}, 4096)
    assert not composes(dynamic, D, 4096)


NORMED = {"hunyuan", "hunyuan_v1_dense"}
# A scale of queries.
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
        cache = caches[layer.index] if name == "baichuan_m1" else own
        if layer.family.method == "attention":
            own.update_and_fetch(*layer.attention.get_qkv(hidden, 0)[1:])
        else:
            mask = create_causal_mask(41)
            layer.attention(hidden, *BEFORE_MASK.get(name, ()), mask, cache)
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
