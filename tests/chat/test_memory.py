"""Where the rows of a conversation rest between turns: what it costs in memory, and that nothing else changes."""

import os
import random

import mlx.core as mx
import pytest
from chat_helpers import RECALLS, SMALL, all_right, ask
from disk_helpers import full_disk
from model_configs import make_model
from tiny_models import make_llama

from mlx_snapkv import Conversation, SnapKVError
from mlx_snapkv.caches.layers import attention_layers, file_bytes, kv_bytes, members
from mlx_snapkv.caches.memories import make_caches, saved_forms
from mlx_snapkv.demo.questions import make_haystack


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(3), 4, 900)


@pytest.mark.parametrize("policy", [SMALL, "keydiff:budget=128"])
def test_from_a_file_the_answers_are_those_from_memory(demo_model, haystack, policy):
    model, tokenizer = demo_model
    document, facts = haystack
    said = {}
    for memory in ("recall", "recall:file"):
        conversation = Conversation(model, tokenizer, policy=policy, memory=memory, max_tokens=16)
        conversation.attach(document)
        said[memory] = [
            [response.token for response in conversation.send(fact.question)] for fact in facts
        ]
    assert said["recall"] == said["recall:file"]


def test_what_is_held_between_turns(demo_model, haystack):
    model, tokenizer = demo_model
    document, facts = haystack
    held, in_files = {}, {}
    for memory in RECALLS:
        conversation = Conversation(model, tokenizer, policy=SMALL, memory=memory, max_tokens=16)
        conversation.attach(document)
        all_right(conversation, facts[:2])
        held[memory] = kv_bytes(conversation.prompt_cache)
        in_files[memory] = file_bytes(conversation.prompt_cache)
        report = conversation.report
        assert report.kv_bytes_before > 10 * report.kv_bytes_after
    assert in_files == {
        "recall": 0,
        "recall:8bit": 0,
        "recall:4bit": 0,
        "recall:file": held["recall"],
    }
    # Of float32: 8 or 4 bits a value, and a scale and a bias for each 64, or for each 32.
    assert held["recall:file"] == 0
    assert held["recall"] * 0.27 < held["recall:8bit"] < held["recall"] * 0.32
    assert held["recall"] * 0.15 < held["recall:4bit"] < held["recall"] * 0.20


@pytest.mark.parametrize("memory", ["recall:8bit", "recall:file"])
def test_a_turn_that_is_not_compressed_stays_in_memory(demo_llama, haystack, memory):
    model, tokenizer = demo_llama
    document, facts = haystack
    ways = {"policy": SMALL + ",min_ctx=500", "max_tokens": 16}
    mine, plain = (Conversation(model, tokenizer, memory=m, **ways) for m in (memory, "recall"))
    for conversation in (mine, plain):
        ask(conversation, facts[0].question)
        assert not conversation.report.compressed
    assert kv_bytes(mine.prompt_cache) == kv_bytes(plain.prompt_cache)
    for conversation in (mine, plain):
        conversation.attach(document)
    assert all_right(mine, facts) == all_right(plain, facts) == [True] * 4
    assert mine.report.compressed and kv_bytes(mine.prompt_cache) < kv_bytes(plain.prompt_cache)


def test_an_interruption_before_the_cut_keeps_what_was_answered(demo_model, haystack, monkeypatch):
    """Three answer tokens are there by then; the turn's rows go to rest with those of the next one."""
    model, tokenizer = demo_model
    document, facts = haystack
    mine, plain = (
        Conversation(model, tokenizer, policy=SMALL, memory=memory, max_tokens=16)
        for memory in ("recall:file", "recall")
    )
    for conversation in (mine, plain):
        conversation.attach(document)
        ask(conversation, facts[0].question)
        answer = conversation.send(facts[1].question)
        next(answer), next(answer)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(model), "__call__", interrupt)
            list(answer)
    assert mine.messages == plain.messages and mine.messages[-1]["role"] == "assistant"
    assert 0 < kv_bytes(mine.prompt_cache) < kv_bytes(plain.prompt_cache)
    assert ask(mine, facts[2].question) == ask(plain, facts[2].question)
    assert kv_bytes(mine.prompt_cache) == 0


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_without_room_in_the_file_the_conversation_goes_on(demo_llama, haystack):
    document, facts = haystack
    conversation = Conversation(*demo_llama, policy=SMALL, memory="recall:file", max_tokens=16)
    conversation.attach(document)
    told = "set TMPDIR or --store-dir to a folder with room"
    with full_disk(100_000), pytest.raises(SnapKVError, match=told):
        ask(conversation, facts[0].question)
    assert kv_bytes(conversation.prompt_cache) > 0
    assert all(all_right(conversation, facts[1:]))
    assert kv_bytes(conversation.prompt_cache) == 0


def test_the_files_go_with_the_conversation(demo_model, haystack):
    def open_files():
        return len(os.listdir("/dev/fd"))

    model, tokenizer = demo_model
    document, facts = haystack
    before = open_files()
    conversation = Conversation(model, tokenizer, policy=SMALL, memory="recall:file", max_tokens=4)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    layers = len(attention_layers(model, conversation.prompt_cache))
    assert open_files() == before + 2 * layers
    conversation.reset()
    assert open_files() == before
    ask(conversation, document)
    assert open_files() == before + 2 * layers
    del conversation
    assert open_files() == before


@pytest.mark.parametrize("memory", ["recall", "recall:file"])
def test_entries_inside_a_list_of_caches_are_saved_in_kinds_of_mlx_lm(memory):
    model = make_model("falcon_h1")  # a state and entries in every layer
    caches = make_caches(model, memory)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    forms = list(members(saved_forms(model, caches)))
    assert {type(form).__name__ for form in forms} == {"ArraysCache", "KVCache"}
    for form, cache in zip(forms, members(caches)):
        if form is not cache:
            assert mx.array_equal(form.keys[:, :, :3], cache.keys_and_values()[0])


def test_heads_that_can_not_be_quantised_are_refused():
    class Tokenizer:
        has_chat_template = True

    model = make_llama()  # heads of 8
    words = r"memory=recall:8bit needs heads of a size that 32 divides, .* \[8\]: do without it"
    with pytest.raises(SnapKVError, match=words):
        Conversation(model, Tokenizer(), policy=SMALL, memory="recall:8bit")
    assert Conversation(model, Tokenizer(), policy=SMALL, memory="recall:file").read == []
