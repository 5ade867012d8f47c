import random

import pytest
from evaluation.suite_tasks import TASKS, make_task

from mlx_snapkv import generate
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import is_right, question_prompt, token_counter

SIZE = {"n_sink": 4, "n_window": 32, "obs_window": 32, "pool": "avg", "pool_kernel": 21}


def test_the_built_in_models_take_less_than_8_mb_and_each_has_a_model_card():
    files = [file for folder in MODELS.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 8_000_000
    for folder in MODELS.values():
        assert "reedy accuracy\n" in (folder / "README.md").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_model_does_its_tasks(demo_tasks, task):
    """At least three of four questions, each at the end of its own document, must be answered correctly."""
    model, tokenizer = demo_tasks
    right = 0
    for seed in range(4):
        document, asked = make_task(task, random.Random(seed), 640, token_counter(tokenizer))
        prompt = question_prompt(tokenizer, document, asked[0].question)
        right += is_right(asked[0], generate(model, tokenizer, prompt, max_tokens=56))
    assert right >= 3
