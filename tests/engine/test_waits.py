"""Python waits for the device only once at the end of a prompt, however many layers the model has."""

import itertools

import pytest
from count_operations import counting_operations
from mlx_lm.models.cache import KVCache, make_prompt_cache
from request_helpers import SMALL
from tiny_models import make_llama

from mlx_snapkv import SnapKVCache, SnapKVError, generate_step
from mlx_snapkv.caches.layers import AttentionLayer
from mlx_snapkv.engine.prefill import mlx_generate

N_LAYERS = 5
ONCE = SMALL | {"lookahead": 0}
BLOCK = 32


@pytest.fixture
def wide():
    """Return a random model with several layers, and with heads wide enough to be quantised."""
    return make_llama(head_dim=32, num_hidden_layers=N_LAYERS)


def waits(items):
    """Return how often Python waits for the device while eight items are taken."""
    with counting_operations() as counts:
        assert len(list(itertools.islice(items, 8))) == 8
    return counts.waits


@pytest.mark.parametrize("options", [
    {"snapkv": ONCE}, {"snapkv": ONCE, "kv_bits": 8, "kv_group_size": 32},
    {"snapkv": SMALL}, {"snapkv": ONCE | {"on_full": "slide"}}, {"policy": "keydiff:budget=40,schedule=once"},
    {"policy": "tova:budget=40,schedule=once"}, {"policy": f"h2o:budget=40,block={BLOCK}"},
], ids=["snapkv", "quantised", "lookahead", "slide", "keydiff", "tova", "h2o in blocks"])  # fmt: skip
def test_a_prompts_end_waits_once_beyond_mlx_lms_loop(wide, tokens, options):
    """Waits are counted until a few tokens have been decoded from the compressed cache."""
    in_blocks = "block=" in options.get("policy", "")
    mlx_lms = {"max_tokens": 9} | ({"prefill_step_size": BLOCK} if in_blocks else {})
    expected = waits(mlx_generate.generate_step(tokens, wide, **mlx_lms))
    assert expected > 8  # the counting works
    assert waits(generate_step(tokens, wide, **options, **mlx_lms)) == expected + 1


def test_nan_in_the_last_layer_leaves_the_callers_cache_alone(wide, tokens, monkeypatch):
    """By then, all earlier layers have already been compressed."""
    compressed, put = [], AttentionLayer.put

    def watched(self, prompt_cache, cache):
        compressed.append(isinstance(cache, SnapKVCache))
        put(self, prompt_cache, cache)

    monkeypatch.setattr(AttentionLayer, "put", watched)
    wide.model.layers[-1].self_attn.k_proj.weight[0, 0] = float("nan")
    cache = make_prompt_cache(wide)
    with pytest.raises(SnapKVError, match="NaN"):
        next(generate_step(tokens, wide, snapkv=ONCE, prompt_cache=cache))
    assert sum(compressed) == N_LAYERS
    assert all(type(c) is KVCache and c.empty() for c in cache)
