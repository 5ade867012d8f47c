"""Conversations whose answers are decoded from quantised rows."""

import random

import pytest
from mlx_lm.models.cache import QuantizedKVCache
from request_helpers import is_quantised

from mlx_snapkv import BlockKVCache, Conversation, SnapKVCache, SnapKVError
from mlx_snapkv.caches.adapter import layer_cache
from mlx_snapkv.caches.memories import MEMORIES
from mlx_snapkv.demo.questions import is_right, make_haystack
from mlx_snapkv.engine.request import Request

SNAPKV = "snapkv:budget=96,n_sink=4,n_window=32,obs_window=32,pool=avg,pool_kernel=21,lookahead=4"
KEYDIFF = "keydiff:budget=128,block=64"
DROPPING = [SNAPKV, f"{SNAPKV},on_full=grow", KEYDIFF, f"{KEYDIFF} then {SNAPKV}", "h2o:budget=128"]
BITS = {"kv_bits": 8, "kv_group_size": 32}
OURS = (SnapKVCache, BlockKVCache)


@pytest.fixture(scope="module")
def haystack(demo_llama):
    return make_haystack(demo_llama[1], random.Random(5), 3, 400)


def started(demo_model, haystack, policy, memory="drop", **options):
    """A conversation that has answered its first question, and that answer."""
    document, facts = haystack
    options = {"max_tokens": 12, **BITS, **options}
    conversation = Conversation(*demo_model, policy=policy, memory=memory, **options)
    conversation.attach(document)
    return conversation, ask(conversation, facts[0])


def ask(conversation, fact):
    return "".join(response.text for response in conversation.send(fact.question))


def bits_of(caches):
    """The bits of the rows of our own caches, None for plain ones."""
    return {getattr(c, "bits", None) for c in caches if isinstance(c, OURS)}


@pytest.fixture
def decoded_from(monkeypatch):
    """The bits of every turn's caches after its cut."""
    bits = []

    def compress(self, original=Request.compress):
        report = original(self)
        bits.append(bits_of(self.caches))
        return report

    monkeypatch.setattr(Request, "compress", compress)
    return bits


@pytest.mark.parametrize("policy", DROPPING)
def test_dropping_turns_hold_quantised_rows(demo_model, haystack, policy, decoded_from):
    conversation, answer = started(demo_model, haystack, policy)
    _, facts = haystack
    assert is_right(facts[0], answer) or policy != SNAPKV
    for fact in facts[1:]:
        ask(conversation, fact)
    assert decoded_from == [{8}] * 3 and bits_of(conversation.prompt_cache) == {8}


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m != "drop"])
def test_recalling_turns_are_decoded_from_quantised_rows(
    demo_model, haystack, memory, decoded_from
):
    conversation, answer = started(demo_model, haystack, SNAPKV, memory)
    _, facts = haystack
    answers = [answer, *(ask(conversation, fact) for fact in facts[1:])]
    assert all(map(is_right, facts, answers))
    assert decoded_from == [{8}] * 3
    assert not any(is_quantised(c) for c in conversation.prompt_cache)


@pytest.mark.parametrize("policy", [SNAPKV, KEYDIFF])
def test_no_row_is_quantised_twice(demo_llama, haystack, policy):
    """A row held from one turn to the next keeps its packed values."""
    conversation, _ = started(demo_llama, haystack, policy)
    before = packed_keys(conversation)
    ask(conversation, haystack[1][1])
    after = packed_keys(conversation)
    both = before.keys() & after.keys()
    assert len(both) > 20 and all(before[p] == after[p] for p in both)


def packed_keys(conversation):
    """By position, the packed keys of a head's rows."""
    rows = layer_cache(conversation.prompt_cache[0]).held()
    return dict(zip(rows.positions[0, 0].tolist(), rows.stored_keys[0][0, 0].tolist()))


def test_a_turn_that_is_not_compressed_stays_plain_until_one_is(demo_llama, haystack):
    policy = SNAPKV + ",min_ctx=430"
    conversation, _ = started(demo_llama, haystack, policy)
    assert "below min_ctx" in conversation.report.reason
    assert not any(hasattr(c, "bits") for c in conversation.prompt_cache)
    for fact in haystack[1][1:]:
        ask(conversation, fact)
    assert conversation.report.compressed and bits_of(conversation.prompt_cache) == {8}


def test_without_a_policy_mlx_lm_quantises(demo_model, haystack, tmp_path):
    options = {"quantized_kv_start": 0}
    conversation, answer = started(demo_model, haystack, None, **options)
    _, facts = haystack
    assert is_right(facts[0], answer) and is_right(facts[1], ask(conversation, facts[1]))
    assert any(isinstance(c, QuantizedKVCache) for c in conversation.prompt_cache)
    path = tmp_path / "chat.safetensors"
    conversation.save(path)
    loaded = Conversation.load(path, *demo_model, max_tokens=12)
    assert ask(loaded, facts[2]) == ask(conversation, facts[2])


@pytest.mark.parametrize("policy", [None, SNAPKV, KEYDIFF])
def test_a_failure_while_reading_leaves_it_as_it_was(demo_model, haystack, policy, monkeypatch):
    options = {"quantized_kv_start": 0, "prefill_step_size": 128}
    failing, plain = (started(demo_model, haystack, policy, **options)[0] for _ in range(2))
    kind, (_, facts) = type(demo_model[0]), haystack
    original = kind.__call__

    def fail(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, "__call__", fail)
        ask(failing, facts[1])
    assert ask(failing, facts[2]) == ask(plain, facts[2])


@pytest.mark.parametrize(
    "policy, bits", [*((policy, 8) for policy in DROPPING), (SNAPKV, None), (KEYDIFF, 4)]
)
def test_saved_it_goes_on_with_the_bits_asked_for(demo_model, haystack, policy, bits, tmp_path):
    """Options of the answers are not saved: rows of other bits are unpacked, then packed as the next turn wants."""
    conversation, _ = started(demo_model, haystack, policy)
    path = tmp_path / "chat.safetensors"
    conversation.save(path)
    options = {} if bits is None else BITS | {"kv_bits": bits}
    loaded = Conversation.load(path, *demo_model, max_tokens=12, **options)
    assert bits_of(loaded.prompt_cache) == {8}
    _, facts = haystack
    for fact in facts[1:]:
        answer = ask(loaded, fact)
        assert bits_of(loaded.prompt_cache) == {bits}
        if bits == 8:
            assert answer == ask(conversation, fact)


def test_what_cannot_be_is_told_at_once(demo_llama):
    with pytest.raises(SnapKVError, match=r"kv_group_size must be one of \[32, 64\]"):
        Conversation(*demo_llama, policy=SNAPKV, **BITS | {"kv_group_size": 128})
