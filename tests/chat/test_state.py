"""What a file holds of a conversation comes back as it was, without the conversation."""

from dataclasses import replace

import mlx.core as mx
import pytest
from chat_helpers import SMALL
from saved_helpers import read
from tiny_models import make_llama

from mlx_snapkv import SnapKVError
from mlx_snapkv.chat import saved_chat
from mlx_snapkv.chat.saved_chat import ChatState, first_messages
from mlx_snapkv.policies import resolve_policy

SAID = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "ünï"}]


def state_of(model, tokens, policy=None, **more):
    """A conversation that has read these tokens, compressed if a policy is given."""
    cache = read(model, tokens, policy)
    return ChatState(cache, resolve_policy(policy=policy), read=tokens.tolist(), **more)


@pytest.mark.parametrize("policy", [None, SMALL, "keydiff:budget=64,block=32"])
def test_a_state_comes_back_as_it_was(path, tokens, policy):
    model = make_llama()
    said = {"messages": first_messages("Be brief.") + SAID, "system": "Be brief."}
    rest = {"attached": ["a text", "another"], "pending_tokens": [5, 6], "n_unknown": 3}
    state = state_of(model, tokens, policy, **said, **rest)
    saved_chat.save(path, model, state)
    loaded = saved_chat.load(path, model)
    assert replace(loaded, prompt_cache=[]) == replace(state, prompt_cache=[])
    for one, other in zip(loaded.prompt_cache, state.prompt_cache, strict=True):
        assert type(one) is type(other) and mx.array_equal(one.state[0], other.state[0])


def test_a_policy_given_is_for_a_state_without_one(path, tokens):
    model = make_llama()
    saved_chat.save(path, model, state_of(model, tokens, messages=SAID))
    loaded = saved_chat.load(path, model, SMALL, "recall")
    assert (loaded.policy, loaded.memory) == (resolve_policy(policy=SMALL), "recall")
    saved_chat.save(path, model, loaded)
    again = saved_chat.load(path, model, "keydiff:budget=9", "drop")
    assert (again.policy, again.memory) == (loaded.policy, loaded.memory)
    with pytest.raises(SnapKVError, match="memory must be"):
        saved_chat.save(path, model, state_of(model, tokens, messages=SAID))
        saved_chat.load(path, model, memory="some")


def test_nothing_read_is_nothing_to_save(path):
    with pytest.raises(SnapKVError, match="nothing has been said yet"):
        saved_chat.save(path, make_llama(), ChatState([], messages=SAID))
    assert not path.exists()
