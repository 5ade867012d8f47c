"""Helpers for generation tests: our requests and mlx-lm's own."""

import gc
import itertools
import sys

import mlx.core as mx
from mlx_lm.models import llama, qwen3_next
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_snapkv import generate_step
from mlx_snapkv.compress.recording import RecordingKVCache
from mlx_snapkv.engine.prefill import mlx_generate
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording

SMALL = {"top_k": 20, "n_sink": 4, "n_window": 32, "lookahead": 4}
PATCHED = [
    (owner, name, vars(owner)[name])
    for cls in (llama.Attention, qwen3_next.Qwen3NextAttention)
    for owner, name in ((cls, "__call__"), (sys.modules[cls.__module__], "scaled_dot_product_attention"))
]  # fmt: skip


def assert_unpatched():
    if any(vars(owner)[name] is not original for owner, name, original in PATCHED):
        gc.collect()  # an iterator that an earlier test has left in a cycle ends its patches when it is collected
    for owner, name, original in PATCHED:
        assert vars(owner)[name] is original


def fail_in(call, model, monkeypatch):
    """Make call number `call` fail for models of this class."""
    count = [0]
    original = type(model).__call__

    def failing(self, *args, **kwargs):
        count[0] += 1
        if count[0] == call:
            raise RuntimeError("the model failed")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", failing)


def random_tokens(n, seed=0):
    return mx.random.randint(0, 64, (n,), key=mx.random.key(seed))


def forced(tokens):
    """Return a sampler that returns these tokens, and then 0."""
    answer = itertools.chain(tokens, itertools.repeat(0))
    return lambda _: mx.array([next(answer)])


def steps(model, prompt, n=12, **keywords):
    """Return the tokens and log-probabilities of our generate_step."""
    return list(generate_step(prompt, model, max_tokens=n, **keywords))


def plain(model, prompt, n=12, **keywords):
    return list(mlx_generate.generate_step(prompt, model, max_tokens=n, **keywords))


def assert_same(a, b):
    assert [t for t, _ in a] == [t for t, _ in b]
    assert all(mx.array_equal(x, y) for (_, x), (_, y) in zip(a, b))


def filled_cache(model, tokens, n_queries=None):
    """Return a prompt's plain cache, and the queries of its last tokens per layer."""
    n = tokens.size
    caches = [
        RecordingKVCache(n - (n_queries or n), n, n) if type(c) is KVCache else c
        for c in make_prompt_cache(model)
    ]
    with recording(attention_classes(model)):
        model(tokens[None], cache=caches)
    plain = make_prompt_cache(model)
    model(tokens[None], cache=plain)
    return plain, [c.queries if isinstance(c, RecordingKVCache) else None for c in caches]


def is_quantised(cache):
    return getattr(cache, "quantization", None) is not None
