"""The embedded models: what they promise, and what compression keeps of it."""

import random

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv import SnapKV, SnapKVCache, generate, prefill
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import is_right, make_haystack, question_prompt, token_counter
from mlx_snapkv.demo.tasks import TASKS, make_task

SIZE = {"n_sink": 4, "n_window": 32, "obs_window": 32, "pool": "avg", "pool_kernel": 21}


def test_together_they_stay_below_8_mb():
    files = [file for folder in MODELS.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 8_000_000


@pytest.mark.parametrize("name", MODELS)
def test_each_has_a_card(name):
    assert "reedy accuracy\n" in (MODELS[name] / "README.md").read_text()


@given(st.text(max_size=40))
def test_any_text_can_be_encoded(demo_llama, text):
    _, tokenizer = demo_llama
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert (
        tokenizer.decode(tokens, skip_special_tokens=False)
        == text.encode("utf-8", "replace").decode()
    )


def test_the_chat_template_reads_back_its_own_answers(demo_llama):
    _, tokenizer = demo_llama
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the code?"},
        {"role": "assistant", "content": "1234"},
        {"role": "user", "content": "And now?"},
    ]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|bos|><|system|>Be brief.<|user|>What is the code?<|assistant|> 1234<|end|>"
        "<|user|>And now?<|assistant|>"
    )


def answers(model, tokenizer, n_tokens, questions, **policy):
    """How many of several questions are answered, each at the end of a document of its own."""
    right = 0
    for seed in range(questions):
        document, facts = make_haystack(tokenizer, random.Random(900 + seed), 4, n_tokens - 40)
        prompt = question_prompt(tokenizer, document, facts[0].question)
        right += is_right(facts[0], generate(model, tokenizer, prompt, max_tokens=14, **policy))
    return right


def test_compression_keeps_the_answers_that_a_window_loses(demo_model):
    """1/16 of the rows at 1,024 tokens; `make eval` measures longer prompts."""
    model, tokenizer = demo_model
    full = answers(model, tokenizer, 1024, 5)
    kept = answers(model, tokenizer, 1024, 5, snapkv=SIZE | {"top_k": 28, "lookahead": 4})
    window = answers(
        model, tokenizer, 1024, 5, snapkv=SIZE | {"top_k": 0, "n_window": 60, "last_token": False}
    )
    assert full == 5
    assert kept >= 4
    assert window <= 1


def done(model, tokenizer, task, n_tokens, questions=4, **policy):
    """How many questions of a task are answered, each at the end of a document of its own."""
    right = 0
    for seed in range(questions):
        count = token_counter(tokenizer)
        document, asked = make_task(task, random.Random(seed), n_tokens - 60, count)
        prompt = question_prompt(tokenizer, document, asked[0].question)
        right += is_right(asked[0], generate(model, tokenizer, prompt, max_tokens=56, **policy))
    return right


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_model_does_its_tasks(demo_tasks, task):
    assert done(*demo_tasks, task, 700) >= 3


def test_votes_before_the_answer_lose_what_the_second_link_needs(demo_tasks):
    """With a sixteenth of the entries one fact is found, a chain is not."""
    policy = {"policy": "snapkv:budget=64,n_sink=4,n_window=32,lookahead=0"}
    assert done(*demo_tasks, "single", 1024, **policy) == 4
    assert done(*demo_tasks, "three-links", 1024, **policy) == 0
    assert done(*demo_tasks, "three-links", 1024) == 4


def test_an_answer_that_asks_all_entries_has_its_second_link(demo_tasks):
    """The same sixteenth, beside which every entry is at hand: "all" gives the full cache's answers."""
    policy = "snapkv:budget=64,n_sink=4,n_window=32,lookahead=0"
    for verify, least in ((None, 3), ("all", 4)):
        ways = {"policy": policy, "memory": "recall", "verify": verify}
        assert done(*demo_tasks, "three-links", 1024, **ways) >= least


def test_a_chat_continues_on_the_compressed_cache(demo_llama):
    """mlx-lm appends the next turn's tokens to our cache in one multi-token update."""
    model, tokenizer = demo_llama
    document, facts = make_haystack(tokenizer, random.Random(1), 2, 600)
    cache = make_prompt_cache(model)
    prompt = question_prompt(tokenizer, document, facts[0].question)
    generate(
        model,
        tokenizer,
        prompt,
        max_tokens=12,
        prompt_cache=cache,
        snapkv=SIZE | {"top_k": 200, "lookahead": 4, "on_full": "keydiff"},
    )
    again = tokenizer.encode(f"<|user|>{facts[0].question}<|assistant|>", add_special_tokens=False)
    answer = generate(model, tokenizer, again, max_tokens=12, prompt_cache=cache)
    assert is_right(facts[0], answer)
    assert all(isinstance(c, SnapKVCache) and c.size() <= 236 + 1 for c in cache)


# "keydiff" chooses every n_window // 2 tokens, which is not during the turn here.
@pytest.mark.parametrize("n_window, on_full", [(64, "slide"), (400, "slide"), (700, "keydiff")])
def test_a_second_turn_of_150_tokens_equals_its_tokens_one_by_one(
    demo_model, ask, n_window, on_full
):
    model, tokenizer = demo_model
    prompt, _ = ask(tokenizer, 900, seed=6)
    sizes = {"budget": n_window + 80, "n_sink": 4, "n_window": n_window}
    policy = SnapKV(**sizes, on_full=on_full)
    caches = [prefill(model, prompt, policy)[0] for _ in range(2)]
    turn = mx.array(prompt[200:350])[None]
    at_once = model(turn, cache=caches[0])[0]
    for i in range(150):
        one = model(turn[:, i : i + 1], cache=caches[1])[0, 0]
        # Machines round by up to 1e-4; a wrong entry changes much more.
        assert mx.abs(one - at_once[i]).max().item() < 1e-3
