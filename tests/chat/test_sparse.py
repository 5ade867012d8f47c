"""Conversations with sparse attention, with entries in memory and in files."""

import contextlib
import random
from unittest import mock

import pytest
from chat_helpers import ask, is_answered
from disk_helpers import full_disk

from mlx_snapkv import Conversation, SnapKVError, Sparse
from mlx_snapkv.caches.layers import attention_layers, kv_bytes
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.sparse import token_ranking
from mlx_snapkv.sparse.options import PAGE_SIZE
from mlx_snapkv.sparse.prompt_caches import caches_in_files

# A chunk reads 128 entries besides its sink and window, and a token of the answer 128 in all.
SPARSE = "top_k=92,n_window=32,read_top_k=128,when=always"
IN_FILES = f"{SPARSE},store=file"


def about_a_text(model, tokenizer, n_tokens, n_facts, **options):
    """Return a conversation with an attached document, and the document's facts."""
    document, facts = make_haystack(tokenizer, random.Random(7), n_facts, n_tokens)
    options = {"sparse": SPARSE, "max_tokens": 12} | options
    conversation = Conversation(model, tokenizer, **options)
    conversation.attach(document)
    return conversation, facts


def read(last=False):
    """Return how many entries a chunk may read, as a range. `last` is for questions with entries in files."""
    reach = Sparse.from_string(SPARSE).reach(2048)
    reach = reach.for_last_tokens(in_files=True) if last else reach
    return range(reach.max_read + 1 - PAGE_SIZE, reach.max_read + 1)


def test_six_questions_in_six_turns_are_answered_from_files(demo_llama):
    """All chunks choose what they read. Those of the questions choose four times as many entries."""
    conversation, facts = about_a_text(*demo_llama, 2048, 6, sparse=IN_FILES)
    for fact in facts:
        assert is_answered(conversation, fact)
        assert conversation.report.read_per_chunk in read(last=True)
    report = conversation.report
    assert report.policy == f"sparse:{IN_FILES}" and 100 < report.read_per_token <= 128
    caches = caches_in_files(conversation.prompt_cache)
    assert report.file_bytes and [cache.nbytes for cache in caches] == [0] * len(caches)
    # The means of pages stay in memory for later turns.
    assert 0 < kv_bytes(conversation.prompt_cache) < report.file_bytes / 50
    assert held(conversation) == {len(conversation.read)}
    forgetful, facts = about_a_text(*demo_llama, 2048, 6, sparse=None, policy="snapkv:top_k=92")
    assert sum(is_answered(forgetful, fact) for fact in facts) <= 3


def test_a_turn_with_a_document_chooses_what_its_chunks_read(demo_llama):
    """With entries in memory, questions and short documents read all entries."""
    conversation, (first, other) = about_a_text(*demo_llama, 700, 2)
    assert is_answered(conversation, first) and conversation.report.read_per_chunk is None
    document, (second,) = make_haystack(demo_llama[1], random.Random(8), 1, 700)
    conversation.attach(document)
    assert is_answered(conversation, second)
    assert conversation.report.read_per_chunk in read() and len(conversation.read) > 1400
    assert is_answered(conversation, other) and conversation.report.read_per_chunk is None


def held(conversation):
    layers = attention_layers(conversation.model, conversation.prompt_cache)
    caches = [layer.cache_in(conversation.prompt_cache) for layer in layers]
    for cache in caches:
        cache.offload()
    return {cache.store.n_entries for cache in caches} | {cache.offset for cache in caches}


@contextlib.contextmanager
def full():
    words = "can't be kept in a file.*; set TMPDIR or --store-dir to a folder with enough space"
    with full_disk(100_000), pytest.raises(SnapKVError, match=words):
        yield


@contextlib.contextmanager
def interrupted():
    """Raise KeyboardInterrupt after the prompt, while the residual's factors are computed, and expect it."""
    weighing = mock.patch.object(token_ranking, "best_factors", side_effect=KeyboardInterrupt)
    with weighing, pytest.raises(KeyboardInterrupt):
        yield


@pytest.mark.parametrize("failing", [full, interrupted])
def test_a_failed_turn_leaves_the_conversation_as_it_was(demo_llama, failing):
    conversation, (first, second) = about_a_text(*demo_llama, 1024, 2, sparse=IN_FILES)
    with failing():
        ask(conversation, first.question)
    assert not conversation.messages and not conversation.read and conversation.attached
    assert is_answered(conversation, first)
    known = conversation.read
    with failing():
        ask(conversation, second.question * 40)
    assert conversation.read == known and held(conversation) == {len(known)}
    assert is_answered(conversation, second)


def test_a_conversation_is_read_in_full_while_it_fits_the_budget(demo_llama):
    conversation, (first, second) = about_a_text(
        *demo_llama, 400, 2, sparse="budget=500,when=always"
    )
    plain, _ = about_a_text(*demo_llama, 400, 2, sparse=None)
    assert ask(conversation, first.question) == ask(plain, first.question)
    assert "fit the budget of 500" in conversation.report.reason
    conversation.attach(make_haystack(demo_llama[1], random.Random(8), 1, 300)[0])
    assert is_answered(conversation, second)
    assert conversation.report.read_per_token and len(conversation.read) > 700


def test_a_turn_with_its_own_document_can_be_undone(demo_model):
    """Undoing works even if a later message was cancelled while it was being read."""
    sparse = f"{SPARSE},store=8bit"
    plain, (first, second) = about_a_text(*demo_model, 1024, 2, sparse=sparse)
    conversation, _ = about_a_text(*demo_model, 1024, 2, sparse=sparse)
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
    assert conversation.policy == Sparse.from_string(sparse)
