"""Queries before RoPE, of every RoPE object that mlx-lm has."""

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import ProportionalRoPE, SuScaledRoPE, initialize_rope

from mlx_snapkv.models import rope as room
from mlx_snapkv.models.rope import undo_rope

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

    rope, n = Counting(D), len(room._probes)
    for _ in range(3):
        mx.eval(undo_rope(rope, mx.ones((1, 1, 2, D)), 4))
    assert len(calls) == 4 and len(room._probes) == n + 1
    gone = weakref.ref(rope)
    del rope
    gc.collect()
    assert gone() is None and len(room._probes) == n
