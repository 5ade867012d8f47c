"""A rank that goes wrong in the middle of a prompt: `several_faults.py raise|stay|kill|policy|prompt|save FOLDER`."""

import os
import signal
import sys
import time

import mlx.core as mx
from mlx_lm.utils import sharded_load
from several_cases import ALWAYS, prompt_of

from mlx_snapkv import generate_step, prefill, saved
from mlx_snapkv.demo import MODELS

how, folder = sys.argv[1:]
group = mx.distributed.init()
model, tokenizer = sharded_load(str(MODELS["demo"]), tensor_group=group)
tokens = prompt_of(tokenizer)
wrong = group.rank() == 1
if how == "prompt" and wrong:
    tokens[7] += 1


def progress(done: int, total: int) -> None:
    if wrong and done >= 200:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("raise", "stay"):
            raise MemoryError("no room for the entries")


def answer(policy: str) -> None:
    for _ in generate_step(
        tokens, model, policy=policy, max_tokens=4, prompt_progress_callback=progress
    ):
        pass


if how == "save":
    cache, _ = prefill(model, tokens, "tova:budget=96,block=96")
    path = f"{folder}/none/a.safetensors" if wrong else f"{folder}/a.safetensors"
    saved.save(path, model, cache, tokens.tolist())
elif how == "policy":
    answer(f"snapkv:budget={96 + wrong},{ALWAYS}")
elif how == "stay" and wrong:
    try:
        answer("tova:budget=96,block=96")
    except MemoryError:
        time.sleep(7)  # it neither comes back to the model nor ends
else:
    answer("tova:budget=96,block=96")
print("went well")
