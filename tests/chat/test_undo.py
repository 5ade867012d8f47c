from dataclasses import replace

import pytest
from chat_helpers import SMALL, ask, begun, is_answered

from mlx_snapkv import Conversation, SnapKVError, Sparse
from mlx_snapkv.caches.layers import kv_bytes, n_tokens

GATED = SMALL + ",min_ctx=500"  # compressed in a later turn, or never
TWO = f"keydiff:budget=96,block=32 then {SMALL}"


SPARSE = Sparse(budget=64, when="always")


@pytest.mark.parametrize(
    ("demo_model", "policy"),
    [
        ("demo_llama", None),
        ("demo_llama", SMALL),
        ("demo_llama", GATED),
        ("demo_llama", TWO),
        ("demo_llama", replace(SPARSE, store="8bit")),
        ("demo_llama", replace(SPARSE, store="file")),
        ("demo_qwen", None),
        ("demo_qwen", SMALL),
        ("demo_qwen", SPARSE),
    ],
    indirect=["demo_model"],
)
def test_an_undone_turn_leaves_no_trace(demo_model, haystack, policy):
    document, facts = haystack
    plain, undone = (begun(demo_model, haystack, 1, policy=policy) for _ in "ab")
    undone.attach(document[:200])
    ask(undone, facts[1].question)
    assert undone.undo() == facts[1].question
    assert undone.attached == [document[:200]]
    undone.attached.clear()
    assert (undone.messages, undone.read) == (plain.messages, plain.read)
    assert undone.report.prompt_tokens == plain.report.prompt_tokens
    assert ask(undone, facts[2].question) == ask(plain, facts[2].question)
    assert undone.messages == plain.messages


@pytest.mark.parametrize("policy", [SMALL, Sparse(budget=64, when="always")], ids=str)
def test_all_turns_can_be_undone(demo_model, haystack, policy):
    """If nothing was evicted, the entries of earlier turns are kept. Otherwise the messages are read again."""
    document, facts = haystack
    ways = {"policy": policy, "system": "Be brief."}
    conversation = begun(demo_model, haystack, 3, **ways)
    assert [conversation.undo(), conversation.undo()] == [f.question for f in (facts[2], facts[1])]
    has_states = any(not c.is_trimmable() for c in begun(demo_model, haystack, 0).prompt_cache)
    assert bool(conversation.read) == (policy != SMALL and not has_states)
    if conversation.read:
        assert n_tokens(conversation.prompt_cache) == len(conversation.read)
        assert is_answered(conversation, facts[1]) and conversation.undo()
    assert conversation.undo() == facts[0].question
    assert [m["role"] for m in conversation.messages] == ["system"]
    assert (conversation.read, conversation.attached) == ([], [document])
    assert kv_bytes(conversation.prompt_cache) == 0 and conversation.report is None
    with pytest.raises(SnapKVError, match="nothing to undo"):
        conversation.undo()
    fresh = begun(demo_model, haystack, 0, **ways)
    assert ask(conversation, facts[2].question) == ask(fresh, facts[2].question)


def test_undo_keeps_no_more_than_the_conversation_does(demo_llama, haystack):
    document, facts = haystack
    conversation = Conversation(*demo_llama, policy=SMALL + ",min_ctx=200", max_tokens=12)
    ask(conversation, document[:500])
    assert not conversation.report.compressed
    full = kv_bytes(conversation.prompt_cache)
    conversation.attach(document)
    ask(conversation, facts[0].question)
    assert conversation.report.compressed and kv_bytes(conversation.prompt_cache) < full
    assert conversation.undo_nbytes == 0  # the turn before had all entries, and can be read again
    ask(conversation, facts[1].question)
    assert conversation.undo_nbytes == kv_bytes(conversation.prompt_cache)
    assert begun(demo_llama, haystack, 2, policy=Sparse(budget=64, when="always")).undo_nbytes == 0
