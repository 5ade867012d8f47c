"""Several turns: what the cache has read, what it keeps, and what is still known of the document."""

import copy
import random

import mlx.core as mx
import pytest
from chat_helpers import RECALLS, SMALL, all_right, ask
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv import SnapKVCache, SnapKVError
from mlx_snapkv.caches import layers
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.chat.conversation import Conversation
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.engine.recalling import RecallingRequest
from mlx_snapkv.engine.request import Request, held_tokens
from mlx_snapkv.errors import UnsupportedModelError
from mlx_snapkv.policies import resolve_policy


@pytest.fixture(scope="module")
def haystack(demo_llama):
    _, tokenizer = demo_llama
    return make_haystack(tokenizer, random.Random(3), 4, 900)


def logits_of(model, tokens):
    return model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]


@pytest.mark.parametrize("memory", ["drop", "recall"])
def test_without_a_policy_it_is_a_plain_chat(demo_model, haystack, memory):
    model, tokenizer = demo_model
    conversation = Conversation(model, tokenizer, memory=memory, max_tokens=16)
    document, facts = haystack
    conversation.attach(document)
    assert all(all_right(conversation, facts[:2]))
    messages = conversation.messages
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == f"{document}\n\n{facts[0].question}"
    # The cache has read exactly what the template makes of the chat so far.
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert whole[: len(conversation.read)] == conversation.read
    assert held_tokens(model, conversation.prompt_cache) == len(conversation.read)


def test_a_model_that_can_not_be_compressed_can_be_talked_to(demo_llama, haystack, monkeypatch):
    def refuse(*args):
        raise UnsupportedModelError("not this one")

    monkeypatch.setattr(layers, "attentions", refuse)
    document, facts = haystack
    conversation = Conversation(*demo_llama, max_tokens=16)
    conversation.attach(document)
    assert all(all_right(conversation, facts[:2]))
    with pytest.raises(UnsupportedModelError):
        Conversation(*demo_llama, policy=SMALL)


def test_recall_answers_every_question_of_a_document_and_drop_does_not(demo_model, haystack):
    model, tokenizer = demo_model
    document, facts = haystack
    right = {}
    for memory in (*RECALLS, "drop"):
        conversation = Conversation(model, tokenizer, policy=SMALL, memory=memory, max_tokens=16)
        conversation.attach(document)
        right[memory] = all_right(conversation, facts)
        kept = [n for n in conversation.report.entries_kept if n is not None]
        assert set(kept) == {64} and conversation.report.reason is None
    assert all(right[memory] == [True] * 4 for memory in RECALLS)
    assert right["drop"][0] and sum(right["drop"]) < 4


def test_recall_keeps_all_rows_and_its_own_answers(demo_llama, haystack):
    model, tokenizer = demo_llama
    document, facts = haystack
    conversation = Conversation(model, tokenizer, policy=SMALL, memory="recall", max_tokens=16)
    conversation.attach(document)
    all_right(conversation, facts[:2])
    cache = conversation.prompt_cache
    assert not any(isinstance(c, SnapKVCache) for c in cache)
    exact = make_prompt_cache(model)
    model(mx.array([conversation.read]), cache=exact)
    for mine, plain in zip(cache, exact, strict=True):
        assert mx.allclose(mine.keys_and_values()[0], plain.keys_and_values()[0], atol=1e-4)


def test_drop_holds_no_more_than_the_budget_after_every_turn(demo_model, haystack):
    model, tokenizer = demo_model
    document, facts = haystack
    conversation = Conversation(model, tokenizer, policy=SMALL, max_tokens=16)
    conversation.attach(document)
    for fact in facts:
        ask(conversation, fact.question)
        caches = [c for c in conversation.prompt_cache if isinstance(c, SnapKVCache)]
        assert caches and all(c.keys.shape[2] == 64 for c in caches)
        assert held_tokens(model, conversation.prompt_cache) == len(conversation.read)


def test_a_turn_votes_over_the_rows_held_and_its_own(demo_llama, haystack):
    """With room for everything, a compressed second turn is the plain second turn."""
    model, tokenizer = demo_llama
    document, facts = haystack
    answers = []
    for policy in (None, "snapkv:budget=95%,n_sink=4,n_window=32"):
        conversation = Conversation(model, tokenizer, policy=policy, max_tokens=16)
        conversation.attach(document)
        answers.append([ask(conversation, fact.question) for fact in facts])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "policy, memory", [(None, "drop"), (SMALL, "recall"), ("keydiff:budget=64,block=32", "drop")]
)
def test_an_answer_that_is_stopped_is_kept_as_far_as_it_was_read(
    demo_model, haystack, policy, memory
):
    model, tokenizer = demo_model
    document, facts = haystack
    conversation = Conversation(model, tokenizer, policy=policy, memory=memory, max_tokens=16)
    conversation.attach(document)
    answer = conversation.send(facts[0].question)
    text = next(answer).text + next(answer).text
    answer.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    assert ask(conversation, facts[0].question)
    whole = tokenizer.apply_chat_template(conversation.messages, add_generation_prompt=False)
    assert len(whole) - 2 <= len(conversation.read + conversation.pending_tokens) <= len(whole) + 1


@pytest.mark.parametrize(
    "policy, memory, turn",
    [
        (None, "drop", 1),
        (SMALL, "drop", 0),
        (SMALL, "recall", 1),
        (SMALL, "recall:8bit", 1),
        ("keydiff:budget=64,block=32", "drop", 1),
        ("keydiff:budget=64,block=32", "recall:file", 0),
        ("keydiff:budget=64,block=32", "recall:file", 1),
    ],
)
def test_a_failure_while_reading_leaves_the_conversation_as_it_was(
    demo_model, haystack, policy, memory, turn, monkeypatch
):
    model, tokenizer = demo_model
    document, facts = haystack
    ways = {"policy": policy, "memory": memory, "max_tokens": 16, "prefill_step_size": 128}
    plain, failing = (Conversation(model, tokenizer, **ways) for _ in range(2))
    for conversation in (plain, failing):
        conversation.attach(document)
        for fact in facts[:turn]:
            ask(conversation, fact.question)
    calls = [0]
    original = type(model).__call__

    def fail(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == (3 if turn == 0 else 1):
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "__call__", fail)
        before = copy.deepcopy(failing.messages)
        with pytest.raises(KeyboardInterrupt):
            ask(failing, facts[2].question)
    assert failing.messages == before
    assert ask(failing, facts[3].question) == ask(plain, facts[3].question)


def test_a_turn_before_its_cut_touches_nothing(demo_qwen, haystack):
    model, tokenizer = demo_qwen
    document, facts = haystack
    conversation = Conversation(model, tokenizer, policy=SMALL, max_tokens=16)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    before = [
        [mx.array(x) for x in c.state if isinstance(x, mx.array)] for c in conversation.prompt_cache
    ]
    turn = Request(model, resolve_policy(policy=SMALL), 5, conversation.prompt_cache)
    model(mx.array([[5, 6, 7, 8, 9]]), cache=turn.caches)
    mx.eval([c.state for c in turn.caches])
    for c, arrays in zip(conversation.prompt_cache, before, strict=True):
        now = [x for x in c.state if isinstance(x, mx.array)]
        assert all(mx.array_equal(a, b) for a, b in zip(now, arrays, strict=True))


def test_reset_forgets_everything_but_the_system_prompt(demo_llama):
    model, tokenizer = demo_llama
    conversation = Conversation(model, tokenizer, system="Be brief.", max_tokens=4)
    ask(conversation, "What is the access code of the amber falcon?")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.read == [] and all(c.empty() for c in conversation.prompt_cache)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"memory": "forget"},
            "memory must be drop, recall, .* or recall:file:4bit, got 'forget'",
        ),
        ({"policy": "keydif"}, "did you mean 'keydiff'"),
        (
            {"max_token": 1},
            r"unknown option 'max_token' of a conversation \(did you mean 'max_tokens'",
        ),
        ({"foo": 1}, "unknown option 'foo' of a conversation; known: kv_bits, kv_group_size"),
        ({"policy": "snapkv", "max_kv_size": 9}, "max_kv_size also limits the entries"),
        ({"policy": "h2o", "memory": "recall:4bit"}, "memory=recall:4bit needs a policy that"),
        ({"policy": "h2o", "memory": "recall"}, "memory=recall needs a policy that"),
    ],
)
def test_a_mistake_is_one_sentence(demo_llama, options, words):
    with pytest.raises(SnapKVError, match=words):
        Conversation(*demo_llama, **options)


def test_empty_messages_and_documents_are_refused(demo_llama):
    conversation = Conversation(*demo_llama)
    with pytest.raises(SnapKVError, match="no text to attach"):
        conversation.attach(" \n")
    with pytest.raises(SnapKVError, match="the message is empty"):
        conversation.send("")


def test_recalled_turns_need_no_second_copy_of_the_rows(demo_llama, haystack):
    model, tokenizer = demo_llama
    document, facts = haystack
    conversation = Conversation(model, tokenizer, policy=SMALL, memory="recall", max_tokens=4)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    layer = attention_layers(model, conversation.prompt_cache)[0]
    turn = RecallingRequest(model, resolve_policy(policy=SMALL), 3, conversation.prompt_cache)
    assert layer.cache_in(turn.caches) is layer.cache_in(conversation.prompt_cache)
