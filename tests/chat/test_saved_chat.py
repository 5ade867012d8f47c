"""A conversation that is saved and loaded goes on as if nothing had happened."""

import json
import random
import sys

import fork_helpers
import mlx.core as mx
import pytest
from chat_helpers import SMALL, ask

from mlx_snapkv import Conversation, SnapKVError, prefill, saved
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import make_haystack

WAYS = [
    (None, "drop"),
    (SMALL, "drop"),
    (SMALL, "recall"),
    (SMALL, "recall:8bit"),
    (SMALL, "recall:4bit"),
    (SMALL, "recall:file"),
    (SMALL, "recall:file:8bit"),
    (SMALL, "recall:file:4bit"),
    (SMALL + ",min_ctx=500", "recall:4bit"),  # compressed later, or never
    (SMALL + ",min_ctx=500", "recall:file"),
    (SMALL + ",min_ctx=500", "recall:file:4bit"),
    ("keydiff:budget=64,block=32", "drop"),
    ("h2o:budget=64,block=32", "drop"),
    ("keydiff:budget=96,block=32 then snapkv:budget=64,n_sink=4,n_window=32", "drop"),
]


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(5), 3, 400)


@pytest.mark.parametrize("policy, memory", WAYS)
def test_it_goes_on_as_without_the_interruption(demo_model, haystack, policy, memory, tmp_path):
    model, tokenizer = demo_model
    document, facts = haystack
    conversation = Conversation(model, tokenizer, policy=policy, memory=memory, max_tokens=12)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    path = tmp_path / "chat.safetensors"
    conversation.save(path)
    loaded = Conversation.load(path, model, tokenizer, max_tokens=12)
    assert (loaded.policy, loaded.memory) == (conversation.policy, memory)
    assert loaded.messages == conversation.messages
    for fact in facts[1:]:
        assert ask(loaded, fact.question) == ask(conversation, fact.question)
    assert loaded.messages == conversation.messages


@pytest.mark.parametrize("memory", ["recall:8bit", "recall:file", "recall:file:8bit"])
def test_entries_are_saved_bit_for_bit(memory, demo_llama, haystack, tmp_path):
    """Quantised ones are not quantised once more."""
    document, facts = haystack
    path = tmp_path / "chat.safetensors"
    conversation = Conversation(*demo_llama, policy=SMALL, memory=memory, max_tokens=12)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    conversation.save(path)
    loaded = Conversation.load(path, *demo_llama, max_tokens=12)
    for mine, theirs in zip(loaded.prompt_cache, conversation.prompt_cache):
        for found, wanted in zip(mine.keys_and_values(), theirs.keys_and_values()):
            assert mx.array_equal(found, wanted)


IN_ANOTHER_PROCESS = """
import json, sys
from mlx_snapkv import Conversation
from mlx_snapkv.cli.loading import load_model

model, tokenizer = load_model(sys.argv[1])
conversation = Conversation.load(sys.argv[2], model, tokenizer, max_tokens=12)
said = [[r.token for r in conversation.send(question)] for question in sys.argv[3:]]
print(json.dumps([conversation.memory, said]))
"""


@pytest.mark.parametrize("memory", ["recall:8bit", "recall:4bit", "recall:file"])
@pytest.mark.parametrize("name", ["demo", "demo-qwen3-next"])
def test_it_goes_on_in_another_process(name, memory, tmp_path):
    model, tokenizer = load_model(name)
    document, facts = make_haystack(tokenizer, random.Random(5), 3, 400)
    conversation = Conversation(model, tokenizer, policy=SMALL, memory=memory, max_tokens=12)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    path = tmp_path / "chat.safetensors"
    conversation.save(path)
    questions = [fact.question for fact in facts[1:]]
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, name, str(path), *questions]
    done = fork_helpers.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [memory, [ask(conversation, q) for q in questions]]


@pytest.mark.parametrize("memory", ["drop", "recall", "recall:4bit", "recall:file"])
def test_a_turn_that_was_interrupted_before_its_cut_is_saved(
    demo_llama, haystack, memory, tmp_path
):
    document, facts = haystack
    conversation = Conversation(*demo_llama, policy=SMALL, memory=memory, max_tokens=12)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    with pytest.raises(KeyboardInterrupt):
        ask_until_interrupted(conversation, facts[1].question)
    conversation.save(tmp_path / "chat.safetensors")
    loaded = Conversation.load(tmp_path / "chat.safetensors", *demo_llama, max_tokens=12)
    assert ask(loaded, facts[2].question) == ask(conversation, facts[2].question)


def ask_until_interrupted(conversation, question):
    def interrupt(tokens, logits):
        if len(tokens) > n_tokens + 2:
            raise KeyboardInterrupt
        return logits

    conversation.generation["logits_processors"] = [interrupt]
    n_tokens = len(
        conversation._unread([*conversation.messages, {"role": "user", "content": question}])
    )
    try:
        ask(conversation, question)
    finally:
        del conversation.generation["logits_processors"]


def test_a_document_that_waits_is_saved_too(demo_llama, haystack, tmp_path):
    document, facts = haystack
    conversation = Conversation(*demo_llama, max_tokens=12)
    ask(conversation, facts[0].question)
    conversation.attach(document)
    conversation.save(tmp_path / "chat.safetensors")
    loaded = Conversation.load(tmp_path / "chat.safetensors", *demo_llama, max_tokens=12)
    assert ask(loaded, facts[1].question) == ask(conversation, facts[1].question)


def test_a_prompt_without_its_text_is_no_conversation(demo_llama, tmp_path):
    model, tokenizer = demo_llama
    cache, _ = prefill(model, [5, 6, 7, 8] * 20, "keydiff:budget=40")
    saved.save(tmp_path / "prompt.safetensors", model, cache, [5, 6, 7, 8] * 20)
    with pytest.raises(SnapKVError, match="no conversation and no text"):
        Conversation.load(tmp_path / "prompt.safetensors", model, tokenizer)


def test_nothing_said_is_nothing_to_save(demo_llama, tmp_path):
    with pytest.raises(SnapKVError, match="nothing has been said yet"):
        Conversation(*demo_llama).save(tmp_path / "chat.safetensors")
    assert not list(tmp_path.iterdir())
