import random

import pytest

from mlx_snapkv import generate
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import is_right, make_haystack, question_prompt, token_counter
from mlx_snapkv.demo.tasks import TASKS, make_task

SIZE = {"n_sink": 4, "n_window": 32, "obs_window": 32, "pool": "avg", "pool_kernel": 21}


def test_together_they_stay_below_8_mb_and_each_has_a_card():
    files = [file for folder in MODELS.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 8_000_000
    for folder in MODELS.values():
        assert "reedy accuracy\n" in (folder / "README.md").read_text()


def test_the_chat_template_reads_back_its_own_answers(demo_llama):
    _, tokenizer = demo_llama
    turns = "system Be brief.", "user What is the code?", "assistant 1234", "user And now?"
    messages = [dict(zip(("role", "content"), turn.split(" ", 1))) for turn in turns]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|bos|><|system|>Be brief.<|user|>What is the code?<|assistant|> 1234<|end|>"
        "<|user|>And now?<|assistant|>"
    )


def answers(model, tokenizer, n_tokens, n_questions, task=None, max_tokens=14, **policy):
    """How many questions about facts, or of a task, are answered, each at the end of a document of its own."""
    right = 0
    for seed in range(n_questions):
        if task is None:
            document, asked = make_haystack(tokenizer, random.Random(900 + seed), 4, n_tokens - 40)
        else:
            count = token_counter(tokenizer)
            document, asked = make_task(task, random.Random(seed), n_tokens - 60, count)
        prompt = question_prompt(tokenizer, document, asked[0].question)
        said = generate(model, tokenizer, prompt, max_tokens=max_tokens, **policy)
        right += is_right(asked[0], said)
    return right


def test_compression_keeps_the_answers_that_a_window_loses(demo_model):
    """1/16 of the rows at 1,024 tokens; `make eval` measures longer prompts."""
    voted, recent = ({"top_k": 28, "lookahead": 4}, {"top_k": 0, "n_window": 60, "lookahead": 0})
    assert answers(*demo_model, 1024, 5) == 5
    assert answers(*demo_model, 1024, 5, snapkv=SIZE | voted) >= 4
    assert answers(*demo_model, 1024, 5, snapkv=SIZE | recent) <= 1


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_model_does_its_tasks(demo_tasks, task):
    assert answers(*demo_tasks, 700, 4, task, 56) >= 3
