"""Entries in files that can't be read: one sentence, and caches that go on when they can be again."""

import copy

import mlx.core as mx
import pytest
from disk_helpers import cut_short, unreadable
from entry_helpers import exact_up_to
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_same, steps
from tiny_models import make_llama

from mlx_snapkv import Conversation, SnapKVError, generate_step
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.sparse.options import CHUNK_SIZE, PAGE_SIZE
from mlx_snapkv.sparse.prefill_cache import SparsePrefillKVCache

# What is read of entries in files: some by every chunk and token, or some by every token.
WAYS = [{"sparse": "budget=40"}, {"sparse": "budget=40,read=dense"}]
SENTENCE = r"^entries kept in a file can't be read: [^\n]+$"


def descriptors(model, caches):
    """Of the files of keys and values, layer by layer."""
    stores = [layer.cache_in(caches).store for layer in attention_layers(model, caches)]
    parts = [part for store in stores for part in store._parts]
    return [file._file.fileno() for part in parts for file in part.files]


def state(caches):
    return [(id(c), c.offset, c.n_entries, c.store.n_entries) for c in caches]


@pytest.mark.parametrize("which", [0, -1])  # the first layer's keys, the last one's values
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_request_fails_and_its_caches_are_as_they_were(tokens, how, which):
    model = make_llama(head_dim=32)
    caches = make_prompt_cache(model)
    options = {"store": "file"} | how
    steps(model, tokens[:150], 3, prompt_cache=caches, **options)
    wanted = steps(model, tokens[150:], prompt_cache=copy.deepcopy(caches), **options)
    before, mend = state(caches), cut_short(descriptors(model, caches)[which])
    with pytest.raises(SnapKVError, match=SENTENCE):
        steps(model, tokens[150:], prompt_cache=caches, **options)
    assert state(caches) == before
    mend()
    assert_same(steps(model, tokens[150:], prompt_cache=caches, **options), wanted)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_an_answer_under_way_fails_and_leaves_its_prompt(tokens, how, monkeypatch):
    """Each of its tokens reads the files. Its prompt's caches go on when they are mended, as if it had been stopped."""
    exact_up_to(monkeypatch, 0)
    model, made = make_llama(head_dim=32), []
    options = {"store": "file"} | how
    for damaged in (False, True):
        caches = make_prompt_cache(model)
        answer = generate_step(tokens, model, prompt_cache=caches, **options)
        list(zip(range(2), answer))  # the first, which read all, and one more
        if damaged:
            mends = [cut_short(number) for number in descriptors(model, caches)]
            before = state(caches)
            with pytest.raises(SnapKVError, match=SENTENCE):
                list(answer)
            assert state(caches) == before
            for mend in mends:
                mend()
        answer.close()
        made.append(steps(model, tokens[:9], prompt_cache=caches, **options))
    assert_same(*made)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_turn_that_fails_can_be_asked_again(demo_llama, how):
    """Files are cut short between two turns; the conversation forgets the turn that fails, and no other."""
    model, tokenizer = demo_llama
    options = {"store": "file", "max_tokens": 4} | how
    conversation, other = (Conversation(model, tokenizer, **options) for _ in range(2))
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
def test_a_chunk_that_can_not_read_its_pages_fails_and_nothing_was_read(damage, monkeypatch):
    """In the middle of a long prompt, whose first chunks have gone to the files by then."""
    model = make_llama(head_dim=32)
    tokens = mx.random.randint(0, 64, (3 * CHUNK_SIZE,), key=mx.random.key(0))
    options = {"sparse": f"budget=50%,read_top_k={PAGE_SIZE}", "store": "file"}
    wanted = steps(model, tokens, 3, **options)
    choose = SparsePrefillKVCache._read_before

    def damaged(self, captured):
        damage(self.stored.store._parts[0].files[0]._file.fileno())
        return choose(self, captured)

    cache = make_prompt_cache(model)
    with monkeypatch.context() as patch, pytest.raises(SnapKVError, match=SENTENCE):
        patch.setattr(SparsePrefillKVCache, "_read_before", damaged)
        steps(model, tokens, 3, prompt_cache=cache, **options)
    assert all(c.empty() for c in cache)
    assert_same(steps(model, tokens, 3, prompt_cache=cache, **options), wanted)
