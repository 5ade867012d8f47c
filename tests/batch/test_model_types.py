"""Model types of every kind of cache and attention decode in a batch as alone, or are refused by name."""

import pytest
from batch_helpers import Run, alone, prompts_of
from model_configs import make_model

from mlx_snapkv import SnapKVError
from mlx_snapkv.batch.generator import ALONE

POLICY = "snapkv:top_k=6,n_sink=2,n_window=8,obs_window=8,lookahead=0"


TYPES = [
    "deepseek_v3", "falcon_h1", "gemma3n", "gpt_oss", "jamba", "kimi_linear", "llama4_text", "longcat_flash",
    "minicpm3", "nemotron_h", "plamo2", "qwen3_5",
]  # fmt: skip


@pytest.mark.parametrize("name", [*TYPES, *ALONE])
def test_a_batch_answers_as_each_alone(name):
    model = make_model(name)
    prompts = prompts_of(40, 30, 55, vocab_size=120)
    try:
        run = Run(model, POLICY)
    except SnapKVError as error:
        assert name in ALONE and "one after the other" in str(error)
        return
    uids = run.insert(prompts[:2], [14, 9])
    for _ in range(4):
        run.step()
    uids += run.insert(prompts[2:], [10])
    run.finish()
    for uid, prompt, n in zip(uids, prompts, (14, 9, 10)):
        assert run.last[uid].finish_reason == "length", run.last[uid].error
        assert run.answers[uid] == alone(model, prompt, n, policy=POLICY)
