"""The model's calls: one a chunk of the prompt, and one a token of the answer."""

import pytest
from request_helpers import steps
from saved_helpers import KEYDIFF, SNAPKV
from tiny_models import make_llama, make_qwen

from mlx_snapkv import Conversation

BOOK = f"{KEYDIFF} then {SNAPKV}"
ONCE, BLOCKS = [64, 64, 64, 7], [16] * 12 + [7]  # of 200 tokens; the last one is a call of its own
# Before the queries that vote, 8 and the last one's, a chunk ends.
VOTING = [16] * 11 + [8, 8, 7]
CASES = [
    ({}, ONCE, []),
    ({"policy": SNAPKV}, ONCE, []),
    ({"policy": SNAPKV.replace("lookahead=4", "lookahead=0")}, ONCE, []),
    ({"policy": f"{SNAPKV},on_full=slide"}, ONCE, []),
    ({"policy": "expected_attention:budget=40"}, ONCE, []),
    ({"policy": KEYDIFF}, BLOCKS, []),
    ({"policy": "h2o:budget=40,block=16"}, BLOCKS, []),
    ({"policy": BOOK}, BLOCKS, []),
    ({"policy": SNAPKV, "memory": "recall"}, ONCE, []),
    ({"policy": SNAPKV, "memory": "recall", "refresh": "turn"}, ONCE, []),
    ({"policy": SNAPKV, "memory": "recall:file"}, ONCE, []),
    # The question's last tokens are read again over what they chose.
    ({"policy": BOOK, "memory": "recall"}, VOTING, [15, 1]),
    ({"policy": BOOK, "memory": "recall:file", "refresh": "turn"}, VOTING, [16]),
]


@pytest.fixture
def watch(monkeypatch):
    """watch(model) -> a list that gets the number of tokens of each of its calls."""

    def make(model):
        calls, call = [], type(model).__call__

        def watched(self, inputs, *args, **kwargs):
            calls.append(inputs.shape[1])
            return call(self, inputs, *args, **kwargs)

        monkeypatch.setattr(type(model), "__call__", watched)
        return calls

    return make


@pytest.mark.parametrize("make", [make_llama, make_qwen])
@pytest.mark.parametrize("options, chunks, again", CASES)
def test_a_prompt_is_computed_once_a_chunk_and_an_answer_once_a_token(
    make, options, chunks, again, tokens, watch
):
    """mlx-lm's loop asks for a token more than it gives."""
    model = make()
    calls = watch(model)
    assert len(steps(model, tokens, 12, prefill_step_size=64, **options)) == 12
    assert calls == [*chunks, 1, *again, *[1] * 12]


@pytest.mark.parametrize("memory", ["drop", "recall"])
def test_a_later_turn_reads_no_more_than_is_new(memory, demo_llama, watch):
    model, tokenizer = demo_llama
    conversation = Conversation(model, tokenizer, policy=SNAPKV, memory=memory, max_tokens=4)
    calls = watch(model)
    for text in ("The access code of the amber falcon is 482913. " * 9, "And what is it?"):
        calls.clear()
        n_before = len(conversation.read)
        assert len(list(conversation.send(text))) == 4
        n_new = len(conversation.read) - n_before
        # With recall, the caches of the next turn hold all but the answer.
        n_fed = 5 if memory == "drop" else 2
        assert calls == [n_new - n_fed, *[1] * 5]
