"""A model call never waits for the device, even if every layer evicts in the middle of it."""

import itertools

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_snapkv import BlockKVCache, prefill
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording

pytestmark = pytest.mark.usefixtures("short_blocks")

BLOCK = "budget=40,n_sink=2,schedule=block,block=16"
SNAPKV = "snapkv:budget=40,n_sink=2,n_window=16,obs_window=4,lookahead=4"
POLICIES = [
    f"keydiff:{BLOCK}",
    f"h2o:{BLOCK}",
    f"lagkv:{BLOCK}",
    f"expected_attention:{BLOCK}",
    f"scissorhands:{BLOCK}",
    f"{SNAPKV},schedule=block,block=16",
]


def traced(model, inputs, caches):
    """Call the model under `mx.compile`, which fails if the call waits for the device.

    While tracing a function, MLX refuses to evaluate arrays that depend on the inputs or on the caches' arrays.
    """

    def call(inputs, held):
        for cache, state in zip(caches, held, strict=True):
            vars(cache).update(state)
        return model(inputs, cache=caches)

    return mx.compile(call)(inputs, [arrays_of(cache) for cache in caches])


def arrays_of(cache):
    """Return a cache's attributes that are arrays or contain arrays."""
    leaves = {name: [x for _, x in tree_flatten(value)] for name, value in vars(cache).items()}
    made = [n for n, xs in leaves.items() if xs and all(isinstance(x, mx.array) for x in xs)]
    return {name: vars(cache)[name] for name in made}


@pytest.fixture
def evictions(monkeypatch):
    """Return a list to which a cache is appended whenever it evicts entries."""
    made, original = [], BlockKVCache.evict

    def watched(self):
        made.append(self)
        original(self)

    monkeypatch.setattr(BlockKVCache, "evict", watched)
    return made


def about_to_evict(model, tokens, policy, n):
    """Return the caches of a compressed prompt, and of its attention layers, which evict within the next `n` tokens."""
    cache, _ = prefill(model, tokens, policy)
    layers = [layer.cache_in(cache) for layer in attention_layers(model, cache)]
    with recording(attention_classes(model)):
        while min(c.room for c in layers) >= n:
            model(tokens[None, :1], cache=cache)
    mx.eval([c.state for c in cache])
    return cache, layers


@pytest.mark.parametrize("policy, n", [*zip(POLICIES, itertools.cycle([1, 3]))])
def test_nothing_waits_in_a_chunk_in_which_every_layer_evicts(
    tiny_model, tokens, policy, n, evictions, monkeypatch
):
    cache, layers = about_to_evict(tiny_model, tokens, policy, n)
    evictions.clear()
    # MLX allows these calls while it traces, although they wait or cost as much as a wait.
    for name in ("eval", "async_eval", "synchronize", "clear_cache"):
        monkeypatch.delattr(mx, name)
    with recording(attention_classes(tiny_model)):
        traced(tiny_model, tokens[None, :n], cache)
    assert evictions == layers
