"""Compiled steps against the model's own: logits, caches, what follows them, and when there are none."""

import copy
import dataclasses
import importlib
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model
from request_helpers import SMALL, assert_same, plain, steps
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVCache, SnapKVError, generate, generate_step, models, prefill
from mlx_snapkv.capture import recording
from mlx_snapkv.compiled import WAIT, CompiledDecoder
from mlx_snapkv.policies import SnapKV
from mlx_snapkv.prefill import mlx_generate
from mlx_snapkv.recorder import Recorder

requests = importlib.import_module("mlx_snapkv.generate")  # its name is also a function's

TOKENS = mx.array(np.random.default_rng(0).integers(1, 64, 48))
POLICY = SnapKV(
    top_k=6,
    n_sink=2,
    n_window=8,
    obs_window=8,
    pool_kernel=1,
    min_ctx=0,
    lookahead=0,
    on_full="slide",
)
CHOOSING = dataclasses.replace(POLICY, on_full="keydiff", budget=None, n_window=16)
MODELS = {"llama": make_llama, "qwen3_next": make_qwen}
NO_POLICY = [{}, {"snapkv": None}, {"snapkv": {"min_ctx": 201}}, {"snapkv": {"top_k": 200, "min_ctx": 0}}]  # fmt: skip


class Spied(CompiledDecoder):
    """A decoder that counts the calls of its compiled step."""

    def __init__(self, model, wait=0):
        super().__init__(model, wait)
        self.n_compiled = 0
        step = self._step

        def counted(*args):
            self.n_compiled += 1
            return step(*args)

        self._step = counted


def make_caches(model, policy=POLICY):
    """One compressed cache, twice."""
    cache, _ = prefill(model, TOKENS, policy)
    return cache, copy.deepcopy(cache)


def attention_classes(model):
    return models.attention_classes(models.attention_layers(model, make_prompt_cache(model)))


def assert_equal(a, b):
    """Bit for bit where it was found to be so; fused kernels of a GPU may round differently."""
    assert mx.array_equal(a, b) if mx.default_device() == mx.cpu else mx.allclose(a, b, atol=1e-4)


def assert_same_caches(caches, others):
    for a, b in zip(caches, others):
        assert type(a) is type(b)
        if isinstance(a, SnapKVCache):
            counts = ("offset", "n_window", "_oldest", "_trimmable", "_since")
            assert all(getattr(a, c, None) == getattr(b, c, None) for c in counts)
            assert mx.array_equal(a.positions, b.positions)
            assert_equal(a.keys, b.keys)
            assert_equal(a.values, b.values)
            if isinstance(a, Recorder) and a.n_queries:
                assert_equal(a.queries, b.queries)
        else:
            for x, y in zip(a.cache, b.cache):
                assert_equal(x, y)


def decode(decoder, model, caches, tokens):
    """Each of `tokens` fed alone to both, with its own cache of the two."""
    for i in range(tokens.size):
        token = tokens[None, i : i + 1]
        assert_equal(decoder(token, cache=caches[0]), model(token, cache=caches[1]))


@pytest.fixture(scope="module", params=[*MODELS, "mixtral", "qwen3_moe", "gpt2"])
def any_model(request):
    make = MODELS.get(request.param)
    return make() if make else make_model(request.param)


def test_steps_equal_the_models_own_and_so_does_what_follows(any_model):
    """Over two turns of the ring; then a turn of several tokens, and a token taken back."""
    caches = make_caches(any_model)
    decoder = Spied(any_model)
    decode(decoder, any_model, caches, TOKENS[:20])
    assert decoder.n_compiled == 20 and decoder._traceable
    assert_same_caches(*caches)
    turn = TOKENS[None, 20:25]
    assert_equal(decoder(turn, cache=caches[0]), any_model(turn, cache=caches[1]))
    assert_same_caches(*caches)
    decode(decoder, any_model, caches, TOKENS[:12])
    assert decoder.n_compiled == 31, "the first step after a turn drops the rows over the window"
    for cache in caches:
        compressed = [c for c in cache if isinstance(c, SnapKVCache)]
        assert [c.trim(1) for c in compressed] == [1] * len(compressed)
    assert_same_caches(*caches)
    decode(decoder, any_model, caches, TOKENS[:12])
    assert_same_caches(*caches)


@pytest.mark.parametrize("on_full, plain_steps", [("keydiff", 4), ("reselect", 4 + 1)])
def test_caches_that_choose_again_do_so_in_plain_steps(any_model, on_full, plain_steps):
    """One choice every 8 tokens; the first step to be observed is plain, too."""
    caches = make_caches(any_model, dataclasses.replace(CHOOSING, on_full=on_full))
    decoder = Spied(any_model)
    with recording(attention_classes(any_model)):
        decode(decoder, any_model, caches, TOKENS[:40])
    assert decoder.n_compiled == 40 - plain_steps and decoder._traceable
    assert_same_caches(*caches)


def test_no_step_is_compiled_whose_queries_nobody_records():
    model = make_llama()
    cache, _ = make_caches(model, dataclasses.replace(CHOOSING, on_full="reselect"))
    decoder = Spied(model)
    with recording(attention_classes(model)):
        decoder(TOKENS[None, :1], cache=cache)
    with pytest.raises(SnapKVError, match="were not recorded"):
        for i in range(30):
            decoder(TOKENS[None, i : i + 1], cache=cache)
    assert not decoder._traceable


def is_traced() -> bool:
    """Whether mx.compile compiles here: on a CPU without a C++ compiler it calls the function each time."""
    calls = []
    double = mx.compile(lambda x: calls.append(x) or x * 2)
    for _ in range(3):
        mx.eval(double(mx.ones(1)))
    return len(calls) == 1


@pytest.mark.skipif(not is_traced(), reason="mx.compile does not compile here")
def test_the_models_code_runs_once_for_all_steps(monkeypatch):
    model = make_llama()
    cache, _ = make_caches(model)
    calls = []
    call = type(model).__call__
    monkeypatch.setattr(
        type(model), "__call__", lambda *args, **options: calls.append(1) or call(*args, **options)
    )
    decoder = CompiledDecoder(model, wait=3)
    for _ in range(20):
        decoder(TOKENS[None, :1], cache=cache)
    assert len(calls) == 3 + 1


def test_the_rows_are_written_in_place():
    """With 2 MB in each of 4 arrays, a copy would show; the loop runs one step ahead, as mlx-lm's does."""
    model = make_llama(head_dim=64)
    pinned = mx.broadcast_to(mx.arange(4000), (1, 2, 4000))
    peaks = []
    for stepped in (CompiledDecoder(model, wait=0), model):
        rows = mx.random.normal((4, 1, 2, 4096, 64))
        cache = [SnapKVCache(*rows[i : i + 2], pinned, offset=5000, n_window=96) for i in (0, 2)]
        mx.eval([c.state for c in cache])
        del rows
        before = mx.get_active_memory()
        for i in range(24):
            if i == 4:
                mx.synchronize()
                mx.reset_peak_memory()
            mx.async_eval(stepped(TOKENS[None, :1], cache=cache))
        mx.synchronize()
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[0] < peaks[1] + 2**20


def test_a_model_that_cant_be_traced_runs_as_it_is():
    model = make_model("gpt_bigcode")
    caches = make_caches(model)
    decoder = Spied(model)
    decode(decoder, model, caches, TOKENS[:10])
    assert decoder.n_compiled == (1 if is_traced() else 10)
    assert_same_caches(*caches)


def test_sliding_window_layers_keep_the_model_as_it_is():
    model = make_model("gpt_oss")
    caches = make_caches(model)
    decoder = Spied(model)
    for i in range(10):
        token = TOKENS[None, i : i + 1]
        assert mx.array_equal(decoder(token, cache=caches[0]), model(token, cache=caches[1]))
    assert decoder.n_compiled == 0


def test_other_calls_are_the_models_own(tiny_model):
    decoder = Spied(tiny_model)
    full = make_prompt_cache(tiny_model)
    decoder(TOKENS[None], cache=full)
    decoder(TOKENS[None, :1], cache=full)
    decoder(TOKENS[None, :1])
    apart, _ = make_caches(tiny_model)
    next(c for c in apart if isinstance(c, SnapKVCache)).offset += 1
    decoder(TOKENS[None, :1], cache=apart)
    padded, _ = make_caches(tiny_model)
    if not isinstance(padded[0], SnapKVCache):
        padded[0].lengths = mx.array([3])
        decoder(TOKENS[None, :1], cache=padded)
    assert decoder.n_compiled == 0
    cache, _ = make_caches(tiny_model)
    decoder(TOKENS[None, :1], cache=cache)
    assert decoder.n_compiled == 1


def test_errors_of_the_call_itself_are_raised():
    model = make_llama()
    cache, before = make_caches(model)
    with pytest.raises(ValueError):
        CompiledDecoder(model, wait=0)(mx.array([[1.5]]), cache=cache)
    assert_same_caches(cache, before)


def test_it_has_the_models_attributes(tiny_model):
    decoder = CompiledDecoder(tiny_model)
    assert all(a is b for a, b in zip(decoder.layers, tiny_model.layers, strict=True))
    assert decoder.args is tiny_model.args
    assert decoder.model_type == tiny_model.model_type
    types = [[type(c) for c in make_prompt_cache(m)] for m in (decoder, tiny_model)]
    assert types[0] == types[1]
    assert not hasattr(decoder, "unheard_of")


# Requests.


@pytest.fixture
def decoders(monkeypatch):
    """The decoders that requests made; they don't wait."""
    made = []
    monkeypatch.setattr(
        requests, "CompiledDecoder", lambda model: made.append(Spied(model)) or made[-1]
    )
    return made


@pytest.mark.parametrize("changes", [{}, {"last_token": False}])
def test_a_request_gives_the_same_answer(tiny_model, tokens, decoders, changes, monkeypatch):
    options = {"n": 40, "snapkv": SMALL | {"n_window": 12, "obs_window": 8} | changes}
    caches = [make_prompt_cache(tiny_model) for _ in range(2)]
    ours = steps(tiny_model, tokens, prompt_cache=caches[0], **options)
    assert decoders[0].n_compiled > 26 and decoders[0]._traceable
    monkeypatch.undo()
    theirs = steps(tiny_model, tokens, prompt_cache=caches[1], **options)
    assert [t for t, _ in ours] == [t for t, _ in theirs]
    for (_, a), (_, b) in zip(ours, theirs):
        assert_equal(a, b)
    assert_same_caches(*caches)


def test_answers_as_text_are_compiled_too(demo_llama, ask, decoders):
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 300, seed=2)
    text = generate(model, tokenizer, prompt, max_tokens=12, snapkv=SMALL | {"lookahead": 0})
    assert text and decoders[0].n_compiled > 0 and decoders[0]._traceable


def test_two_threads_equal_requests_alone(tiny_model, tokens, decoders):
    prompts = [tokens, tokens[::-1]]

    def answer(prompt):
        return [t for t, _ in generate_step(prompt, tiny_model, max_tokens=30, snapkv=SMALL)]

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer, prompts)) == alone
    assert all(d.n_compiled > 20 and d._traceable for d in decoders)


def test_short_answers_are_not_compiled(tiny_model, tokens, monkeypatch):
    decoder = Spied(tiny_model, wait=None)
    monkeypatch.setattr(requests, "CompiledDecoder", lambda model: decoder)
    steps(tiny_model, tokens, n=20, snapkv=SMALL)
    assert decoder.n_compiled == 0
    waits = WAIT[mx.default_device().type]
    assert decoder._wait == waits - 16, "it waits for steps after the cut"


@pytest.mark.parametrize("keywords", NO_POLICY)
def test_without_a_policy_mlx_lm_gets_the_callers_model(tokens, keywords, monkeypatch, decoders):
    model = make_llama()
    expected = plain(model, tokens)
    given = []
    step = mlx_generate.generate_step
    monkeypatch.setattr(
        mlx_generate, "generate_step", lambda p, m, *a, **o: given.append(m) or step(p, m, *a, **o)
    )
    assert_same(steps(model, tokens, **keywords), expected)
    assert len(given) == 1 and given[0] is model
    assert decoders == []
