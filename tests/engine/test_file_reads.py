"""Unreadable entry files cause a one-line error, and the caches continue once the files are readable again."""

import copy

import pytest
from disk_helpers import cut_short, unreadable
from entry_helpers import exact_up_to
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_same, random_tokens, steps
from tiny_models import make_llama

from mlx_snapkv import Conversation, SnapKVError, generate_step
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.sparse.options import CHUNK_SIZE, PAGE_SIZE
from mlx_snapkv.sparse.prefill_cache import SparsePrefillKVCache

# Chunks and tokens choose what they read from files, or tokens only.
WAYS = ["budget=40,store=file", "budget=40,read=dense,store=file"]
SENTENCE = r"^entries kept in a file can't be read: [^\n]+$"


def descriptors(model, caches):
    """Return the file descriptors of all keys and values, layer by layer."""
    stores = [layer.cache_in(caches).store for layer in attention_layers(model, caches)]
    parts = [part for store in stores for part in store._views]
    return [file._file.fileno() for part in parts for file in part.files]


def state(caches):
    return [(id(c), c.offset, c.n_entries, c.store.n_entries) for c in caches]


@pytest.mark.parametrize("which", [0, -1])  # the first layer's keys, the last layer's values
@pytest.mark.parametrize("sparse", WAYS)
def test_a_failed_request_leaves_its_caches_unchanged(tokens, sparse, which):
    model = make_llama(head_dim=32)
    caches = make_prompt_cache(model)
    steps(model, tokens[:150], 3, prompt_cache=caches, sparse=sparse)
    wanted = steps(model, tokens[150:], prompt_cache=copy.deepcopy(caches), sparse=sparse)
    before, mend = state(caches), cut_short(descriptors(model, caches)[which])
    with pytest.raises(SnapKVError, match=SENTENCE):
        steps(model, tokens[150:], prompt_cache=caches, sparse=sparse)
    assert state(caches) == before
    mend()
    assert_same(steps(model, tokens[150:], prompt_cache=caches, sparse=sparse), wanted)


@pytest.mark.parametrize("sparse", WAYS)
def test_a_failed_answer_leaves_the_caches_of_its_prompt(tokens, sparse, monkeypatch):
    """Every token reads the files. Once they are readable again, the caches continue as after a stopped answer."""
    exact_up_to(monkeypatch, 0)
    model, made = make_llama(head_dim=32), []
    for damaged in (False, True):
        caches = make_prompt_cache(model)
        answer = generate_step(tokens, model, prompt_cache=caches, sparse=sparse)
        list(zip(range(2), answer))  # the first token reads all entries, the second chooses
        if damaged:
            mends = [cut_short(number) for number in descriptors(model, caches)]
            before = state(caches)
            with pytest.raises(SnapKVError, match=SENTENCE):
                list(answer)
            assert state(caches) == before
            for mend in mends:
                mend()
        answer.close()
        made.append(steps(model, tokens[:9], prompt_cache=caches, sparse=sparse))
    assert_same(*made)


@pytest.mark.parametrize("sparse", WAYS)
def test_a_turn_that_fails_can_be_asked_again(demo_llama, sparse):
    """The files are truncated between two turns. The conversation forgets only the turn that fails."""
    model, tokenizer = demo_llama
    conversation, other = (
        Conversation(model, tokenizer, sparse=sparse, max_tokens=4) for _ in range(2)
    )
    for each in (conversation, other):
        list(each.send("The access code of the amber falcon is 482913. " * 20))
    before = list(conversation.messages), list(conversation.read)
    mends = [cut_short(number) for number in descriptors(model, conversation.prompt_cache)]
    with pytest.raises(SnapKVError, match=SENTENCE):
        list(conversation.send("And what is it?"))
    assert (conversation.messages, conversation.read) == before
    for mend in mends:
        mend()
    found, wanted = (list(each.send("And what is it?")) for each in (conversation, other))
    assert [r.token for r in found] == [r.token for r in wanted]
    assert conversation.messages == other.messages


@pytest.mark.parametrize("damage", [cut_short, unreadable])
def test_a_chunk_that_can_not_read_its_pages_leaves_empty_caches(damage, monkeypatch):
    """The chunk is in the middle of a long prompt, whose first chunks are already in files."""
    model = make_llama(head_dim=32)
    tokens = random_tokens(3 * CHUNK_SIZE)
    sparse = f"budget=50%,read_top_k={PAGE_SIZE},store=file"
    wanted = steps(model, tokens, 3, sparse=sparse)
    choose = SparsePrefillKVCache._choose_earlier

    def damaged(self, captured):
        damage(self.stored.store._views[0].files[0]._file.fileno())
        return choose(self, captured)

    cache = make_prompt_cache(model)
    with monkeypatch.context() as patch, pytest.raises(SnapKVError, match=SENTENCE):
        patch.setattr(SparsePrefillKVCache, "_choose_earlier", damaged)
        steps(model, tokens, 3, prompt_cache=cache, sparse=sparse)
    assert all(c.empty() for c in cache)
    assert_same(steps(model, tokens, 3, prompt_cache=cache, sparse=sparse), wanted)
