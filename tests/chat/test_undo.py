"""Taking back turns: the last one exactly, earlier ones to what the messages tell."""

import random

import pytest
from chat_helpers import SMALL, ask, begun, is_answered

from mlx_snapkv import Conversation, SnapKVError
from mlx_snapkv.caches.layers import kv_bytes
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.engine.request import held_tokens

GATED = SMALL + ",min_ctx=500"  # compressed later, or never
WAYS = [
    (None, "drop"),
    (SMALL, "drop"),
    (SMALL, "recall:file:4bit"),
    (GATED, "recall:4bit"),
    ("h2o:budget=64,block=32", "drop"),
    ("keydiff:budget=96,block=32 then snapkv:budget=64,n_sink=4,n_window=32", "drop"),
]


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(5), 3, 250)


@pytest.mark.parametrize("policy, memory", WAYS)
def test_a_turn_that_is_taken_back_was_never_said(demo_model, haystack, policy, memory):
    document, facts = haystack
    plain, undone = (begun(demo_model, haystack, 1, policy=policy, memory=memory) for _ in "ab")
    undone.attach(document[:200])
    ask(undone, facts[1].question)
    assert undone.undo() == facts[1].question
    assert undone.attached == [document[:200]]
    undone.attached.clear()
    assert (undone.messages, undone.read) == (plain.messages, plain.read)
    assert undone.report.prompt_tokens == plain.report.prompt_tokens
    for fact in facts[2:]:
        assert ask(undone, fact.question) == ask(plain, fact.question)
    assert undone.messages == plain.messages


def test_all_turns_can_be_taken_back(demo_model, haystack):
    document, facts = haystack
    ways = {"policy": SMALL, "memory": "recall:8bit", "system": "Be brief."}
    conversation = begun(demo_model, haystack, 3, **ways)
    for fact in reversed(facts):
        assert conversation.undo() == fact.question
    assert [m["role"] for m in conversation.messages] == ["system"]
    assert (conversation.read, conversation.attached) == ([], [document])
    assert kv_bytes(conversation.prompt_cache) == 0 and conversation.report is None
    with pytest.raises(SnapKVError, match="nothing to take back"):
        conversation.undo()
    fresh = begun(demo_model, haystack, 0, **ways)
    assert ask(conversation, facts[2].question) == ask(fresh, facts[2].question)


@pytest.mark.parametrize("memory", ["drop", "recall"])
def test_earlier_turns_are_taken_back_to_what_the_messages_tell(demo_model, haystack, memory):
    """All entries are there again: kept where the memory has them, read again where it has not."""
    _, facts = haystack
    conversation = begun(demo_model, haystack, 3, policy=SMALL, memory=memory)
    conversation.undo(), conversation.undo()
    has_states = any(not c.is_trimmable() for c in begun(demo_model, haystack, 0).prompt_cache)
    assert bool(conversation.read) == (memory != "drop" and not has_states)
    if conversation.read:
        assert held_tokens(demo_model[0], conversation.prompt_cache) == len(conversation.read)
        assert all(is_answered(conversation, fact) for fact in facts[1:])
    else:
        fresh = begun(demo_model, haystack, 0, policy=SMALL, memory=memory)
        fresh.messages, fresh.attached = conversation.messages, []
        assert ask(conversation, facts[1].question) == ask(fresh, facts[1].question)
        assert fresh.report.prompt_tokens > 250


@pytest.mark.parametrize("policy, memory", [(SMALL, "drop"), (SMALL, "recall")])
def test_a_loaded_conversations_turns_can_be_taken_back(demo_llama, haystack, policy, memory, path):
    document, facts = haystack
    begun(demo_llama, haystack, 2, policy=policy, memory=memory).save(path)
    conversation = Conversation.load(path, *demo_llama, max_tokens=12)
    assert conversation.undo() == facts[1].question
    assert bool(conversation.read) == (memory == "recall")
    assert conversation.undo() == facts[0].question
    assert (conversation.messages, conversation.attached) == ([], [document])


def test_what_is_kept_for_it_is_no_more_than_the_conversation_keeps(demo_llama, haystack):
    document, facts = haystack
    conversation = Conversation(*demo_llama, policy=SMALL + ",min_ctx=200", max_tokens=12)
    ask(conversation, document[:500])
    assert not conversation.report.compressed
    full = kv_bytes(conversation.prompt_cache)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    assert conversation.report.compressed and kv_bytes(conversation.prompt_cache) < full
    assert conversation.undo_nbytes == 0  # all entries had been held: reading again is as good
    ask(conversation, facts[1].question)
    assert conversation.undo_nbytes == kv_bytes(conversation.prompt_cache)
    assert begun(demo_llama, haystack, 2, policy=SMALL, memory="recall").undo_nbytes == 0


def test_an_interrupted_message_leaves_the_turn_before_it_to_be_taken_back(
    demo_model, haystack, monkeypatch
):
    _, facts = haystack
    plain, undone = (begun(demo_model, haystack, n, policy=SMALL) for n in (1, 2))

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(demo_model[0]), "__call__", interrupt)
        ask(undone, facts[2].question)
    assert undone.undo() == facts[1].question
    assert ask(undone, facts[2].question) == ask(plain, facts[2].question)
