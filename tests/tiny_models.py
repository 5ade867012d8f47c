"""Small random models of mlx-lm's real classes."""

import copy

import mlx.core as mx
from mlx_lm.models import llama, qwen3_next
from model_configs import TINY


def make_llama(seed: int = 0, **changes):
    return _made(llama, TINY["llama"] | changes, seed)


def make_qwen(seed: int = 0, **changes):
    return _made(qwen3_next, TINY["qwen3_next"] | changes, seed)


def _made(module, config, seed):
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs(**copy.deepcopy(config)))
    mx.eval(model.parameters())
    return model
