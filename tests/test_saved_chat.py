"""A conversation that is saved and loaded goes on as if nothing had happened."""

import random

import pytest

from mlx_snapkv import Conversation, SnapKVError, prefill, saved
from mlx_snapkv.demo.questions import make_haystack

WAYS = [
    (None, "drop"),
    ("snapkv:budget=64,n_sink=4,n_window=32,min_ctx=0", "drop"),
    ("snapkv:budget=64,n_sink=4,n_window=32,min_ctx=0", "recall"),
    ("keydiff:budget=64,block=32", "drop"),
    ("h2o:budget=64,block=32", "drop"),
    ("keydiff:budget=96,block=32 then snapkv:budget=64,n_sink=4,n_window=32", "drop"),
]


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(5), 3, 400)


def ask(conversation, question):
    return [response.token for response in conversation.send(question)]


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
