"""Prompts read and saved, for the tests of saved files."""

import random

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import plain

from mlx_snapkv import prefill, saved

OPTIONS = {"snapkv": "min_ctx=0,n_sink=2,n_window=16,obs_window=8,lookahead=2"}
KEYDIFF = "keydiff:budget=40,block=16"
SNAPKV = "snapkv:min_ctx=0,n_sink=2,n_window=16,obs_window=8,budget=40"


def spec(name, schedule):
    return f"{name}:{OPTIONS.get(name, 'n_sink=2')},budget=40,block=16,schedule={schedule}"


def read(model, tokens, policy):
    """A prompt's cache, as `prefill` makes it, or mlx-lm without a policy."""
    if policy is not None:
        return prefill(model, tokens, policy)[0]
    cache = make_prompt_cache(model)
    plain(model, tokens, n=0, prompt_cache=cache)
    return cache


def saved_file(path, model, tokens, policy=KEYDIFF):
    saved.save(path, model, read(model, tokens, policy), tokens, policy or "none")
    return path


def question(n=9, seed=5):
    rng = random.Random(seed)
    return mx.array([rng.randrange(64) for _ in range(n)])
