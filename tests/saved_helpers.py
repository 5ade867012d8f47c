"""Helpers that read and save prompts, for tests of saved files."""

import random

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import plain

from mlx_snapkv import prefill, saved
from mlx_snapkv.compress.policy import POLICIES

OPTIONS = {
    "snapkv": "n_sink=2,n_window=16,obs_window=8,lookahead=2",
    "scissorhands": "obs_window=8",
}
KEYDIFF = "keydiff:budget=40,block=16"
SNAPKV = "snapkv:n_sink=2,n_window=16,obs_window=8,budget=40,lookahead=4"


def spec(name, schedule, budget=40, block=16):
    options = OPTIONS.get(name, "n_sink=2")
    return f"{name}:{options},budget={budget},block={block},schedule={schedule}"


def read(model, tokens, policy):
    """Return a prompt's cache, created by `prefill` or, if `policy` is None, by mlx-lm."""
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


SPECS = [spec(name, schedule) for name in POLICIES for schedule in ("once", "block")]
SPECS += [
    f"{KEYDIFF} then snapkv:budget=24,n_sink=2,n_window=8,obs_window=8",
    f"{spec('h2o', 'block')} then tova:budget=30,block=8",
    f"{SNAPKV},on_full=slide",
]
