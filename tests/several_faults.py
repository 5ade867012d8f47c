"""A rank that goes wrong: `python -m several_faults raise|kill|options|save`."""

import os
import signal
import sys

import mlx.core as mx
from mlx_lm.utils import sharded_load
from several_cases import prompt_of

from mlx_snapkv import generate_step, saved
from mlx_snapkv.cli.app import main
from mlx_snapkv.demo import MODELS

how = sys.argv[1]
group = mx.distributed.init()
wrong = group.rank() == 1
if how == "options":
    command = ["mlx-snapkv", "generate", "--model", "demo", "--prompt", "x", "--max-tokens"]
    sys.argv = [*command, str(1 + wrong)]
    main()
model, tokenizer = sharded_load(str(MODELS["demo"]), tensor_group=group)
tokens = prompt_of(tokenizer)


def progress(done: int, total: int) -> None:
    if wrong and done >= 200:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("no room for the entries")


if how == "save":
    saved.save("a.safetensors", model, model.make_cache(), tokens.tolist())
for _ in generate_step(
    tokens, model, policy="tova:budget=96,block=96", max_tokens=4, prompt_progress_callback=progress
):
    pass
print("went well")
