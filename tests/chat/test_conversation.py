import contextlib
import copy
import gc
import os
import re
from dataclasses import replace

import mlx.core as mx
import pytest
from chat_helpers import SMALL, STORES, all_right, ask, begun, is_answered
from entry_helpers import count_indexes, exact_up_to
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_tokenizer
from model_configs import REFUSED_CONFIGS, make_model
from request_helpers import is_quantised

from mlx_snapkv import BlockKVCache, Conversation, SnapKVCache, SnapKVError, Sparse
from mlx_snapkv.caches import layers
from mlx_snapkv.caches.adapter import layer_cache
from mlx_snapkv.caches.layers import (
    all_caches,
    attention_layers,
    file_bytes,
    kv_bytes,
    n_tokens,
)
from mlx_snapkv.demo import MODELS
from mlx_snapkv.entries.queries import Queries
from mlx_snapkv.errors import UnsupportedModelError
from mlx_snapkv.sparse.prompt_caches import caches_to_save, make_caches

SPARSE = Sparse(budget=64, when="always")
KEYDIFF = "keydiff:budget=64,block=32"
SLIDING = "snapkv:budget=25%,n_window=25%,n_sink=2,obs_window=8,on_full=slide"
TWO = f"keydiff:budget=96,block=32 then {SMALL}"
BITS = {"kv_bits": 8, "kv_group_size": 32}


@contextlib.contextmanager
def interrupted(model, monkeypatch, after=0):
    """Raise KeyboardInterrupt in the model's call number `after`, and expect it to propagate."""
    calls, original = [], type(model).__call__

    def call(self, *args, **kwargs):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(None)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(model), "__call__", call)
        yield


@contextlib.contextmanager
def interrupted_between_layers(model, monkeypatch):
    """Raise KeyboardInterrupt before the last layer, after all others have read a token, and expect it to propagate."""
    original = type(model.layers[-1]).__call__

    def call(self, *args, **kwargs):
        if self is model.layers[-1]:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(model.layers[-1]), "__call__", call)
        yield


def test_without_a_policy_a_conversation_is_a_plain_chat(demo_model, haystack):
    model, tokenizer = demo_model
    document, facts = haystack
    conversation = begun(demo_model, haystack)
    assert all(all_right(conversation, facts[:2]))
    messages = conversation.messages
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == f"{document}\n\n{facts[0].question}"
    # The cache has read exactly the tokens that the template makes of the chat.
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert whole[: len(conversation.read)] == conversation.read
    assert n_tokens(conversation.prompt_cache) == len(conversation.read)
    quantised = begun((model, tokenizer), haystack, **BITS, quantized_kv_start=0)
    assert is_answered(quantised, facts[0])
    assert any(isinstance(c, QuantizedKVCache) for c in quantised.prompt_cache)


def test_a_model_that_can_not_be_compressed_can_chat(demo_llama, haystack, monkeypatch):
    def refuse(*args):
        raise UnsupportedModelError("not this one")

    monkeypatch.setattr(layers, "cache_owners", refuse)
    assert is_answered(begun(demo_llama, haystack), haystack[1][0])


def open_files():
    gc.collect()  # closes files that earlier tests have left open
    return len(os.listdir("/dev/fd"))


def test_every_store_answers_all_questions_and_holds_its_stated_memory(demo_llama, haystack):
    _, facts = haystack
    held, in_files, n_open, before = {}, {}, {}, open_files()
    for store in STORES:
        conversation = begun(demo_llama, haystack, policy=replace(SPARSE, store=store))
        assert all(all_right(conversation, facts))
        held[store] = kv_bytes(conversation.prompt_cache)
        in_files[store] = file_bytes(conversation.prompt_cache)
        n_open[store] = open_files() - before
        conversation.reset()
        assert open_files() == before
    n_layers = len(attention_layers(demo_llama[0], conversation.prompt_cache))
    full = held["memory"]
    assert in_files == dict.fromkeys(STORES[:-1], 0) | {"file": full}
    # Keys and values have a file and a memory map each.
    assert n_open == dict.fromkeys(STORES[:-1], 0) | {"file": 4 * n_layers}
    # Compared with float32: 8 bits a value, with a scale and a bias for 64 or 32 values.
    assert held["file"] == 0
    assert full * 0.27 < held["8bit"] < full * 0.32


@pytest.mark.parametrize("store", STORES)
def test_an_index_is_made_once_and_grows_with_the_turns(demo_llama, haystack, store, monkeypatch):
    """The index contains the keys of all tokens read, even after a turn was undone."""
    exact_up_to(monkeypatch, 200)
    made = count_indexes(monkeypatch)
    sparse = f"budget=64,n_window=32,when=always,store={store}"
    conversation = begun(demo_llama, haystack, sparse=sparse)
    for taken_back, fact in zip([False, True, False], haystack[1]):
        assert is_answered(conversation, fact)
        assert len(made) == len(demo_llama[0].layers)
        if taken_back:
            n = len(conversation.read)
            conversation.undo()
            assert max(len(cache.index) for cache in conversation.prompt_cache) < n
            assert is_answered(conversation, fact)
    n = len(conversation.read)
    for cache in conversation.prompt_cache:
        keys, _ = cache.keys_and_values()
        rebuilt = copy.deepcopy(cache.index)
        rebuilt.codes.truncate(0)
        rebuilt.append(keys)
        assert len(cache.index) == len(rebuilt) == n
        queries = mx.random.normal((1, keys.shape[1], 1, keys.shape[3]), key=mx.random.key(0))
        asked = Queries(queries, range(n, n + 1), 1.0)
        difference = cache.index.relevance(asked, n) - rebuilt.relevance(asked, n)
        assert mx.abs(difference).mean() < 1e-3


def test_a_policy_forgets_and_holds_exactly_the_budget_after_every_turn(demo_model, haystack):
    right = []
    conversation = begun(demo_model, haystack, policy=SMALL)
    for fact in haystack[1]:
        right.append(is_answered(conversation, fact))
        caches = [c for c in conversation.prompt_cache if isinstance(c, SnapKVCache)]
        assert caches and all(c.keys.shape[2] == 64 for c in caches)
        assert n_tokens(conversation.prompt_cache) == len(conversation.read)
    assert right[0] and sum(right) < 4


def test_a_turn_votes_over_held_and_new_entries(demo_llama, haystack):
    """The budget keeps nearly all entries, so a compressed second turn must answer like an uncompressed one."""
    policies = None, "snapkv:budget=95%,n_sink=4,n_window=32"
    one, other = (begun(demo_llama, haystack, 1, policy=policy) for policy in policies)
    for fact in haystack[1][1:]:
        assert ask(one, fact.question) == ask(other, fact.question)


@pytest.mark.parametrize("policy", [SPARSE, KEYDIFF], ids=str)
def test_a_stopped_answer_is_kept_up_to_its_last_token(demo_model, haystack, policy):
    _, facts = haystack
    conversation = begun(demo_model, haystack, policy=policy)
    answer = conversation.send(facts[0].question)
    text = next(answer).text + next(answer).text
    answer.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    assert ask(conversation, facts[0].question)
    whole = demo_model[1].apply_chat_template(conversation.messages, add_generation_prompt=False)
    assert len(whole) - 2 <= len(conversation.read + conversation.pending_tokens) <= len(whole) + 1


def test_answers_keep_their_own_tokens_even_if_the_template_would_change_them(demo_llama, haystack):
    model, tokenizer = demo_llama[0], load_tokenizer(MODELS["demo"])
    changed = "{{ ' Then: ' + message['content'] | trim + '<|end|>' }}"
    tokenizer.chat_template = re.sub(r"\{\{ ' ' \+.*?\}\}", changed, tokenizer.chat_template)
    conversation = begun((model, tokenizer), haystack, policy=SPARSE)
    answer = ask(conversation, haystack[1][0].question)
    known = conversation.read + conversation.pending_tokens
    assert conversation.pending_tokens and known[-len(answer) :] == answer
    ask(conversation, haystack[1][1].question)
    assert conversation.read[: len(known)] == known


@pytest.mark.parametrize(
    ("policy", "turn", "bits"),
    [
        (None, 1, BITS | {"quantized_kv_start": 0}),
        (SMALL, 0, {}),
        (SMALL, 1, BITS),
        (replace(SPARSE, store="file"), 1, {}),
    ],
)
def test_a_failure_while_reading_leaves_the_conversation_as_it_was(
    demo_llama, haystack, policy, turn, bits, monkeypatch
):
    _, facts = haystack
    ways = {"policy": policy, "prefill_step_size": 128, **bits}
    plain, failing = (begun(demo_llama, haystack, turn, **ways) for _ in range(2))
    before = list(failing.messages)
    with interrupted(demo_llama[0], monkeypatch, after=0 if turn else 2):
        ask(failing, facts[2].question)
    assert failing.messages == before
    if turn and policy is not None:  # the earlier turn can still be undone
        assert plain.undo() == failing.undo() == facts[0].question
    assert ask(failing, facts[3].question) == ask(plain, facts[3].question)


def test_a_step_that_is_interrupted_between_two_layers_leaves_no_trace(
    demo_model, haystack, monkeypatch
):
    """Some layers have read a token that is not in the answer. Linear layers go back to their state before the turn."""
    model, facts = demo_model[0], haystack[1]
    mine, plain = (begun(demo_model, haystack, 1) for _ in range(2))
    before = list(mine.read)
    answers = [conversation.send(facts[1].question) for conversation in (mine, plain)]
    for answer in answers:
        next(answer), next(answer), next(answer)
    with interrupted_between_layers(model, monkeypatch):
        next(answers[0])
    answers[1].close()
    assert mine.messages == plain.messages
    assert mine.read == (before if model.model_type == "qwen3_next" else plain.read)
    assert mine.read + mine.pending_tokens == plain.read + plain.pending_tokens
    assert ask(mine, facts[2].question) == ask(plain, facts[2].question)
    assert mine.read == plain.read


def test_turns_of_a_model_with_only_linear_states_are_undone(demo_llama):
    """The states can't be trimmed, so the next turn reads the remaining messages again."""
    model = make_model("mamba2", REFUSED_CONFIGS["mamba2"] | {"vocab_size": 4096})
    _, tokenizer = demo_llama
    conversation = Conversation(model, tokenizer, max_tokens=8)
    for text in ("My name is Ada.", "The secret is 4711.", "Three."):
        ask(conversation, text)
    conversation.undo(), conversation.undo()
    assert conversation.read == [] and all(cache.empty() for cache in conversation.prompt_cache)
    ask(conversation, "What is the secret?")
    fresh = make_prompt_cache(model)
    model(mx.array([conversation.read]), cache=fresh)
    for cache, fresh_cache in zip(conversation.prompt_cache, fresh):
        for state, fresh_state in zip(cache.cache, fresh_cache.cache):
            assert mx.allclose(state, fresh_state, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming_llm:budget=25%,schedule=once", SLIDING])
def test_a_later_turns_larger_window_starts_after_the_evicted_entries(demo_llama, policy):
    """A share of the longer conversation is more entries than the first turn kept. Their positions stay right."""
    model, tokenizer = demo_llama
    long_answer = {"sampler": lambda logprobs: mx.array([100]), "max_tokens": 600}
    conversation = Conversation(model, tokenizer, policy=policy, **long_answer)
    conversation.attach("word " * 300)
    ask(conversation, "Tell me about it.")
    conversation.generation["max_tokens"] = 3
    ask(conversation, "And?")
    full = make_prompt_cache(model)
    model(mx.array([conversation.read]), cache=full)
    cache = conversation.prompt_cache[0]
    held = cache.held()
    assert cache.size() < cache.offset // 2 and held.positions[0, 0, 0].item() == 0
    # A first layer's keys depend on the token and its position only.
    every_key, _ = full[0].keys_and_values()
    wanted = mx.take_along_axis(every_key, held.positions[..., None].astype(mx.int32), axis=2)
    assert mx.allclose(held.keys, wanted, atol=1e-4)


def test_a_sliding_window_interrupted_in_a_step_is_restored(demo_llama, haystack, monkeypatch):
    """The window goes back to its state before the turn. The next turn reads this turn again, with its answer."""
    mine, plain = (begun(demo_llama, haystack, 1, policy=SMALL) for _ in range(2))
    before = list(mine.read)
    answer = mine.send(haystack[1][1].question)
    said = "".join(next(answer).text for _ in range(7))  # compression follows the fifth token
    with interrupted_between_layers(demo_llama[0], monkeypatch):
        next(answer)
    assert mine.report.compressed and mine.messages[-1]["content"] == said
    assert mine.read == before and n_tokens(mine.prompt_cache) == len(before)
    ask(mine, haystack[1][2].question)
    mine.undo(), mine.undo()
    assert mine.messages == plain.messages
    mine, question = begun(demo_llama, haystack, 1, policy=SMALL), haystack[1][1].question
    answer = mine.send(question)
    next(answer)
    with interrupted_between_layers(demo_llama[0], monkeypatch):
        list(answer)
    assert mine.undo() == question and mine.read == plain.read
    assert ask(mine, haystack[1][2].question) == ask(plain, haystack[1][2].question)


def test_an_interruption_between_tokens_keeps_the_answer_so_far(demo_model, haystack, monkeypatch):
    _, facts = haystack
    mine, plain = (
        begun(demo_model, haystack, 1, policy=replace(SPARSE, store=store))
        for store in ("file", "memory")
    )
    for conversation in (mine, plain):
        answer = conversation.send(facts[1].question)
        next(answer), next(answer)
        with interrupted(demo_model[0], monkeypatch):
            list(answer)
    assert mine.messages == plain.messages and mine.messages[-1]["role"] == "assistant"
    assert ask(mine, facts[2].question) == ask(plain, facts[2].question)


def test_entries_stay_full_and_unquantised_until_a_turn_is_compressed(demo_llama, haystack):
    document, facts = haystack
    policy = SMALL + ",min_ctx=200"
    conversation = Conversation(*demo_llama, max_tokens=12, policy=policy, **BITS)
    ask(conversation, facts[0].question)
    assert "below min_ctx" in conversation.report.reason
    assert kv_bytes(conversation.prompt_cache) > 0
    assert not any(map(is_quantised, conversation.prompt_cache))
    conversation.attach(document)
    assert is_answered(conversation, facts[1]) and conversation.report.compressed
    assert any(map(is_quantised, conversation.prompt_cache))


@pytest.mark.parametrize("policy", [SMALL, SMALL.replace("slide", "grow"), TWO])
def test_turns_that_evict_quantise_every_entry_once(demo_model, haystack, policy):
    conversation = begun(demo_model, haystack, 1, policy=policy, **BITS)
    before = packed_keys(conversation)
    ask(conversation, haystack[1][1].question)
    after = packed_keys(conversation)
    both = before.keys() & after.keys()
    assert both and all(before[position] == after[position] for position in both)
    ours = [c for c in conversation.prompt_cache if isinstance(c, (SnapKVCache, BlockKVCache))]
    assert {getattr(cache, "bits", None) for cache in ours} == {8}


def packed_keys(conversation):
    """Return one head's packed keys by position."""
    model, caches = conversation.model, conversation.prompt_cache
    held = layer_cache(attention_layers(model, caches)[0].cache_in(caches)).held()
    return dict(zip(held.positions[0, 0].tolist(), held.stored_keys[0][0, 0].tolist()))


def test_entries_inside_a_list_of_caches_are_saved_in_kinds_of_mlx_lm():
    model = make_model("falcon_h1")  # a state and entries in every layer
    caches = make_caches(model, Sparse())
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    forms = list(all_caches(caches_to_save(caches)))
    assert {type(form).__name__ for form in forms} == {"ArraysCache", "KVCache"}
    for form, cache in zip(forms, all_caches(caches)):
        if form is not cache:
            assert mx.array_equal(form.keys[:, :, :3], cache.keys_and_values()[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparse": "store=forget"}, "store must be memory, .* or file, got 'forget'"),
        ({"store": "file"}, r"^unknown option 'store': .* give sparse=\{'store': 'file'\}$"),
        ({"max_token": 1}, r"unknown option 'max_token' of a conversation \(did you mean 'max_tok"),
        ({"policy": "snapkv", "max_kv_size": 9}, "max_kv_size can't be combined with a policy"),
        ({"policy": "tova", "sparse": True}, "give only one of them"),
    ],
)
def test_a_mistake_in_the_options_is_one_sentence(demo_llama, options, words):
    with pytest.raises(SnapKVError, match=words):
        Conversation(*demo_llama, **options)


def test_reset_keeps_the_system_prompt_and_empty_texts_are_refused(demo_llama):
    conversation = Conversation(*demo_llama, system="Be brief.", max_tokens=4)
    ask(conversation, "What is the access code of the amber falcon?")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.read == [] and all(c.empty() for c in conversation.prompt_cache)
    with pytest.raises(SnapKVError, match="the document is empty"):
        conversation.attach(" \n")
    with pytest.raises(SnapKVError, match="the message is empty"):
        conversation.send("")
