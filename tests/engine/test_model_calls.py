"""The number of model calls: one per prompt chunk and one per answer token."""

import pytest
from request_helpers import random_tokens, steps
from saved_helpers import KEYDIFF, SNAPKV
from tiny_models import make_llama, make_qwen

from mlx_snapkv import Conversation
from mlx_snapkv.sparse.options import CHUNK_SIZE, LAST_TOKENS, PAGE_SIZE

STAGES = f"{KEYDIFF} then {SNAPKV}"
# Chunks of 200 tokens; the last token is a separate call.
ONCE, BLOCKS = [64, 64, 64, 7], [16] * 12 + [7]
CASES = [
    ({}, ONCE),
    ({"policy": SNAPKV}, ONCE),
    ({"policy": SNAPKV.replace("lookahead=4", "lookahead=0")}, ONCE),
    ({"policy": f"{SNAPKV},on_full=slide"}, ONCE),
    ({"policy": "expected_attention:budget=40"}, ONCE),
    ({"policy": KEYDIFF}, BLOCKS),
    ({"policy": "h2o:budget=40,block=16"}, BLOCKS),
    ({"policy": STAGES}, BLOCKS),
    ({"sparse": "budget=40"}, [61, 61, 61, 16]),  # the last 16 weigh the residual
    ({"sparse": "budget=40,read=dense,store=file"}, [61, 61, 61, 16]),
    ({"sparse": "budget=40,read=sparse"}, [199]),  # one sparse chunk
    ({"sparse": "budget=40,store=file"}, [199]),
]


@pytest.fixture
def watch(monkeypatch):
    """Return a function that makes a model record the number of tokens of each call in a list."""

    def make(model):
        calls, call = [], type(model).__call__

        def watched(self, inputs, *args, **kwargs):
            calls.append(inputs.shape[1])
            return call(self, inputs, *args, **kwargs)

        monkeypatch.setattr(type(model), "__call__", watched)
        return calls

    return make


@pytest.mark.parametrize(
    "make, options, chunks",
    [
        *((make_llama, *case) for case in CASES),
        *((make_qwen, *CASES[i]) for i in (1, 5, -1)),
    ],
)
def test_the_model_is_called_once_per_chunk_and_once_per_token(
    make, options, chunks, tokens, watch
):
    """mlx-lm's loop computes one token more than it returns."""
    model = make()
    calls = watch(model)
    assert len(steps(model, tokens, 12, prefill_step_size=64, **options)) == 12
    assert calls == [*chunks, 1, *[1] * 12]


@pytest.mark.parametrize("store", ["memory", "file"])
def test_sparse_chunks_have_their_own_size_and_the_last_tokens_begin_a_chunk(watch, store):
    """prefill_step_size has no effect. CHUNK_SIZE tokens choose together, and only chunks that choose are split."""
    model = make_llama()
    calls, n = watch(model), 2 * CHUNK_SIZE + LAST_TOKENS + 9
    tokens = random_tokens(n)
    for how, chunks in (("", [CHUNK_SIZE]), (f",read_top_k={PAGE_SIZE}", [9, CHUNK_SIZE - 9])):
        calls.clear()
        sparse = f"budget=40,read=sparse,when=always,store={store}{how}"
        steps(model, tokens, 1, prefill_step_size=700, sparse=sparse)
        assert calls[:-2] == [CHUNK_SIZE, CHUNK_SIZE, *chunks, n - 1 - 3 * CHUNK_SIZE]


@pytest.mark.parametrize("how", [{"policy": SNAPKV}, {"sparse": "budget=40,when=always"}])
def test_a_later_turn_reads_only_new_tokens(how, demo_llama, watch):
    model, tokenizer = demo_llama
    conversation = Conversation(model, tokenizer, max_tokens=4, **how)
    calls = watch(model)
    for text in ("The access code of the amber falcon is 482913. " * 9, "And what is it?"):
        calls.clear()
        n_before = len(conversation.read)
        assert len(list(conversation.send(text))) == 4
        n_new = len(conversation.read) - n_before
        # The first tokens of an answer are read before the caches are replaced.
        n_read = n_new - (2 if "sparse" in how else 5)
        assert calls == [n_read] + [1] * 5
