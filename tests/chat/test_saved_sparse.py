"""Conversations with sparse attention are saved and continued, and damaged files are detected."""

import random
from dataclasses import replace

import pytest
from chat_helpers import ask, begun, is_answered

from mlx_snapkv import Conversation, SnapKVError, Sparse, saved
from mlx_snapkv.caches.layers import file_bytes
from mlx_snapkv.demo.questions import make_haystack

SPARSE = "top_k=92,n_window=32,read_top_k=128,when=always"
IN_FILES = f"{SPARSE},store=file"


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(5), 4, 1024)


@pytest.mark.parametrize(("name", "store"), [("demo_qwen", "memory"), ("demo_llama", "8bit")])
def test_a_loaded_conversation_continues_as_the_saved_one_in_any_store(
    request, haystack, name, store, path
):
    demo_model = request.getfixturevalue(name)
    conversation = begun(demo_model, haystack, 1, sparse=f"{SPARSE},store={store}")
    conversation.save(path)
    assert saved.load(path, demo_model[0]).policy == str(conversation.policy)
    own = Conversation.load(path, *demo_model, max_tokens=12)
    assert own.policy == conversation.policy
    in_file = Conversation.load(path, *demo_model, sparse="store=file", max_tokens=12)
    assert in_file.policy == replace(own.policy, store="file")
    for fact in haystack[1][1:]:
        wanted = ask(conversation, fact.question)
        assert ask(own, fact.question) == wanted
        assert ask(in_file, fact.question) == wanted
    assert file_bytes(own.prompt_cache) == 0 < file_bytes(in_file.prompt_cache)
    in_file.save(path)  # replaces the files that `in_file` still reads
    again = Conversation.load(path, *demo_model, max_tokens=12)
    for fact in haystack[1]:
        assert ask(again, fact.question) == ask(in_file, fact.question)


def test_a_flipped_bit_is_one_sentence_and_fails_only_one_turn(demo_llama, haystack, path):
    begun(demo_llama, haystack, 1, sparse=IN_FILES).save(path)
    damaged, whole = (Conversation.load(path, *demo_llama, max_tokens=12) for _ in range(2))
    _, file, *_ = sorted(path.parent.glob("*.entries/*.keys"))
    data = file.read_bytes()
    place = int(0.6 * len(data))
    question = haystack[1][1].question
    before = list(damaged.messages), list(damaged.read), damaged.prompt_cache[0].offset
    file.write_bytes(data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :])
    with pytest.raises(SnapKVError) as error:
        ask(damaged, question)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert (damaged.messages, damaged.read, damaged.prompt_cache[0].offset) == before
    file.write_bytes(data)
    assert ask(damaged, question) == ask(whole, question)


@pytest.mark.parametrize("store", ["memory", "8bit", "file"])
def test_a_saved_full_cache_is_continued_with_sparse_attention(demo_llama, haystack, path, store):
    begun(demo_llama, haystack, 1).save(path)
    sparse = Sparse.from_string(f"{SPARSE},store={store}")
    loaded = Conversation.load(path, *demo_llama, sparse=sparse, max_tokens=12)
    assert loaded.policy == sparse
    assert is_answered(loaded, haystack[1][1]) and loaded.report.read_per_token
    loaded.save(path)
    again = Conversation.load(path, *demo_llama, sparse="top_k=9", max_tokens=12)
    assert again.policy == loaded.policy
    assert ask(again, haystack[1][2].question) == ask(loaded, haystack[1][2].question)
