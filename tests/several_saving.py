"""A rank that saves a prompt cache: `python -m several_saving`."""

import mlx.core as mx
from mlx_lm.utils import sharded_load

from mlx_snapkv import saved
from mlx_snapkv.demo import MODELS

model, _ = sharded_load(str(MODELS["demo"]), tensor_group=mx.distributed.init())
saved.save("a.safetensors", model, model.make_cache(), [1])
