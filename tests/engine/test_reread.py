"""Beyond the trained length the tokens of the pages that all heads read are read again, by themselves."""

import random

import mlx.core as mx
import pytest
from far_helpers import short_model
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

from mlx_snapkv import Conversation, generate_step, prefill, saved
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.caches.sparse import SparseKVCache
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.engine import sparse

HOW = "budget=400,n_sink=4,n_window=32"


@pytest.fixture(scope="module", params=["demo", "demo-qwen3-next"])
def short(request):
    return short_model(request.param)


@pytest.fixture(scope="module")
def demo():
    return short_model("demo")


@pytest.fixture
def seen(monkeypatch):
    """Positions that all heads read, which of them were read again, and the answer's caches, of the latest request."""
    found = {}
    reread, init = sparse.reread, SparseKVCache.__init__

    def spied(model, views, ids, positions, n_sink):
        rereads = reread(model, views, ids, positions, n_sink)
        which = [] if rereads[0] is None else rereads[0].which.tolist()
        found.update(positions=positions.tolist(), which=which, caches=[])
        return rereads

    def made(self, ranking, again):
        init(self, ranking, again)
        found["caches"].append(self)

    monkeypatch.setattr(sparse, "reread", spied)
    monkeypatch.setattr(SparseKVCache, "__init__", made)
    return found


def long_text(tokenizer, n, seed=3):
    text, _ = make_haystack(tokenizer, random.Random(seed), 4, n + 200)
    return tokenizer.encode(text, add_special_tokens=False)[:n]


def ids_of(model, caches):
    return attention_layers(model, make_prompt_cache(model))[-1].entries_in(caches).token_ids


def read(model, tokens, cache=None, n=1, **options):
    options = {"sparse": HOW, "prompt_cache": cache} | options
    return [t for t, _ in generate_step(mx.array(tokens), model, max_tokens=n, **options)]


def test_what_all_heads_read_is_what_mlx_lm_reads_behind_the_sink(short, seen):
    """It stands in the answer's caches, turned to where it is read. Linear layers begin anew."""
    model, tokenizer = short
    tokens = long_text(tokenizer, 3000)
    read(model, tokens)
    positions = seen["positions"]
    caches, m = make_prompt_cache(model), len(positions)
    model(mx.array([tokens[:4]]), cache=caches)
    caches = [cache if isinstance(cache, KVCache) else type(cache)(2) for cache in caches]
    model(mx.array([[tokens[i] for i in positions]]), cache=caches)
    layers = attention_layers(model, caches)
    assert m > 100 and len(seen["caches"]) == len(layers)
    end = len(tokens) - sparse.AGAIN - 32  # the window begins there
    for layer, cache in zip(layers, seen["caches"], strict=True):
        wanted, held = layer.entries_in(caches).held().between(4, 4 + m), cache.held()
        steps = mx.full((*wanted.keys.shape[:2], m), end - m - 4, mx.int32)
        found = held.between(4, 4 + m)
        assert mx.allclose(found.keys, layer.turn(wanted.keys, steps), atol=2e-3).item()
        assert mx.allclose(found.values, wanted.values, atol=2e-3).item()


def test_tokens_that_are_not_known_keep_the_entries_that_they_have(demo, seen):
    """Those of a turn that mlx-lm read alone; the others are read again, in order."""
    model, tokenizer = demo
    tokens, cache = long_text(tokenizer, 3000), make_prompt_cache(model)
    model(mx.array([tokens[:1500]]), cache=cache)
    read(model, tokens[1500:], cache)
    positions, which = seen["positions"], seen["which"]
    known = [place for place, position in enumerate(positions) if position >= 1500]
    assert which == known and 0 < len(known) < len(positions)
    # A first layer's values would say nothing: they are the token's alone.
    view, held = seen["caches"][-1].ranking.view, seen["caches"][-1].held()
    places = mx.broadcast_to(mx.array(positions, mx.uint32), (1, 2, len(positions)))
    own = view.gather(places).values
    same = mx.all(held.values[:, :, 4 : 4 + len(positions)] == own, axis=(0, 1, 3)).tolist()
    assert [place for place, is_same in enumerate(same) if not is_same] == known


def test_a_prompt_cache_knows_its_tokens_until_others_take_their_place(demo):
    """Also one of mlx-lm's, which is trimmed, and goes on, without a word."""
    model, tokenizer = demo
    tokens, others = long_text(tokenizer, 1200), long_text(tokenizer, 300, seed=4)
    cache, _ = prefill(model, tokens[:1000], sparse=HOW)
    assert type(cache[0]) is KVCache
    assert ids_of(model, cache).tolist() == tokens[:1000]
    read(model, tokens[1000:], cache)
    assert ids_of(model, cache).tolist() == tokens[:-1]  # the last one is read with the answer
    trim_prompt_cache(cache, 499)
    assert ids_of(model, cache).tolist() == tokens[:700]
    model(mx.array([others]), cache=cache)
    n_same = next(i for i, other in enumerate(others) if other != tokens[700 + i])
    assert ids_of(model, cache).tolist() == tokens[: 700 + n_same]
    read(model, others, cache)
    unknown = [-1] * (300 - n_same)
    assert ids_of(model, cache).tolist() == tokens[: 700 + n_same] + unknown + others[:-1]


def test_nothing_is_read_again_of_a_cache_that_others_have_filled(demo, seen):
    """Not even if it begins with the first token that there was."""
    model, tokenizer = demo
    cache, _ = prefill(model, long_text(tokenizer, 600), sparse=HOW)
    trim_prompt_cache(cache, 600)
    model(mx.array([long_text(tokenizer, 1200, seed=4)]), cache=cache)
    assert ids_of(model, cache).size < 5
    assert len(read(model, [55], cache, 3)) == 3
    assert seen["which"] == [] and len(seen["positions"]) > 100


def test_a_chunk_that_is_broken_off_leaves_no_tokens_behind(demo):
    """Those of a request that was broken off are gone with its entries."""
    model, tokenizer = demo
    tokens = long_text(tokenizer, 1200)
    cache, _ = prefill(model, tokens[:600], sparse=HOW, memory="recall:file")

    def stop(done, total):
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        options = {"memory": "recall:file", "prompt_progress_callback": stop}
        read(model, tokens[600:], cache, prefill_step_size=128, **options)
    assert ids_of(model, cache).tolist() == tokens[:600] and cache[0].offset == 600


@pytest.mark.parametrize("memory", ["recall", "recall:8bit", "recall:file"])
def test_a_saved_prompt_is_read_again_as_one_that_was_not_saved(demo, seen, memory, tmp_path):
    model, tokenizer = demo
    tokens, question = long_text(tokenizer, 3000), long_text(tokenizer, 90, seed=5)
    cache, _ = prefill(model, tokens, sparse=HOW, memory=memory)
    saved.save(tmp_path / "text.safetensors", model, cache, tokens, f"sparse:{HOW}")
    wanted = read(model, question, cache, 8, memory=memory)
    which = seen["which"]
    loaded = saved.load(tmp_path / "text.safetensors", model).prompt_cache
    assert read(model, question, loaded, 8, memory=memory) == wanted
    assert seen["which"] == which and len(which) > 100


def test_a_conversation_reads_again_what_it_read_in_earlier_turns(demo, seen):
    model, tokenizer = demo
    document, facts = make_haystack(tokenizer, random.Random(3), 2, 3000)
    conversation = Conversation(model, tokenizer, sparse=HOW, max_tokens=12)
    conversation.attach(document)
    for fact in facts:
        list(conversation.send(fact.question))
        assert seen["which"] == [*range(len(seen["positions"]))] != []
        known = ids_of(model, conversation.prompt_cache).tolist()
        assert known == conversation.read[: len(known)] and len(known) > 3000
