import contextlib
import random
from unittest import mock

import pytest
from chat_helpers import ask, is_answered
from disk_helpers import full_disk

from mlx_snapkv import Conversation, SnapKVError
from mlx_snapkv.caches.full_view import FullView
from mlx_snapkv.caches.layers import attention_layers, kv_bytes
from mlx_snapkv.demo.questions import make_haystack

# 1/16 of 2,048 tokens is resident, and the answer is decoded from as many.
BOOK = "keydiff:budget=128,block=256 then snapkv:top_k=92,n_sink=4,n_window=32"


def a_book(model, tokenizer, n_tokens, n_facts, **options):
    """A conversation with a document attached, and the facts in it."""
    document, facts = make_haystack(tokenizer, random.Random(7), n_facts, n_tokens)
    options = {"policy": BOOK, "memory": "recall:file", "max_tokens": 12} | options
    conversation = Conversation(model, tokenizer, **options)
    conversation.attach(document)
    return conversation, facts


def test_six_questions_one_a_turn(demo_model):
    conversation, facts = a_book(*demo_model, 2048, 6)
    assert all(is_answered(conversation, fact) for fact in facts)
    report = conversation.report
    assert 120 < report.entries <= 128 and report.book.resident <= 128 + 256
    assert report.book.stored == len(conversation.read) > 2048
    assert report.kv_bytes_before == report.book.file_bytes
    forgetful, facts = a_book(*demo_model, 2048, 6, memory="drop")
    assert sum(is_answered(forgetful, fact) for fact in facts) <= 3


def test_answers_are_verified(demo_llama):
    conversation, facts = a_book(*demo_llama, 1024, 3, verify="all", memory="recall")
    assert all(is_answered(conversation, fact) for fact in facts)
    assert conversation.report.verified.tokens > 0
    assert held(conversation) == {len(conversation.read)}


def held(conversation):
    layers = attention_layers(conversation.model, conversation.prompt_cache)
    caches = [layer.cache_in(conversation.prompt_cache) for layer in layers]
    for cache in caches:
        cache.offload()
    return {cache.store.n_entries for cache in caches} | {cache.offset for cache in caches}


@contextlib.contextmanager
def full():
    words = "can't be kept in a file.*; set TMPDIR or --store-dir to a folder with room"
    with full_disk(100_000), pytest.raises(SnapKVError, match=words):
        yield


@contextlib.contextmanager
def interrupted():
    """Ctrl-C in the vote."""
    voting = mock.patch.object(FullView, "asked_by", side_effect=KeyboardInterrupt)
    with voting, pytest.raises(KeyboardInterrupt):
        yield


@pytest.mark.parametrize("failing", [full, interrupted])
def test_what_ends_a_turn_leaves_the_conversation_as_it_was(demo_model, failing):
    conversation, (first, second) = a_book(*demo_model, 1024, 2)
    with failing():
        ask(conversation, first.question)
    assert not conversation.messages and not conversation.read and conversation.attached
    assert is_answered(conversation, first)
    known = conversation.read
    with failing():
        ask(conversation, second.question * 40)
    assert conversation.read == known and held(conversation) == {len(known)}
    assert is_answered(conversation, second)


def test_below_the_gate_everything_is_resident_until_it_is_passed(demo_llama):
    policy = BOOK.replace("keydiff:", "keydiff:min_ctx=1500,")
    conversation, (first, second) = a_book(*demo_llama, 1024, 2, policy=policy)
    plain, _ = a_book(*demo_llama, 1024, 2, policy=None, memory="drop")
    assert ask(conversation, first.question) == ask(plain, first.question)
    assert "below min_ctx" in conversation.report.reason
    conversation.attach(make_haystack(demo_llama[1], random.Random(8), 1, 700)[0])
    assert is_answered(conversation, second)
    assert conversation.report.book.stored > 1700


def test_a_turn_with_a_document_of_its_own_can_be_taken_back(demo_model):
    """Entries have given way to it, and come back; also when a later message was given up while it was read."""
    plain, (first, second) = a_book(*demo_model, 1024, 2, memory="recall:8bit")
    conversation, _ = a_book(*demo_model, 1024, 2, memory="recall:8bit")
    for each in (plain, conversation):
        ask(each, first.question)
    known = conversation.read
    conversation.attach(make_haystack(demo_model[1], random.Random(8), 1, 700)[0])
    ask(conversation, second.question)

    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(conversation.send(second.question * 40, prompt_progress_callback=stop))
    assert conversation.undo_nbytes <= kv_bytes(conversation.prompt_cache)
    assert conversation.undo() == second.question
    conversation.attached.clear()
    assert conversation.read == known and held(conversation) == {len(known)}
    assert ask(conversation, second.question) == ask(plain, second.question)
