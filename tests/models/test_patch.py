import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3_next
from mlx_lm.models.cache import KVCache, make_prompt_cache
from request_helpers import PATCHED, assert_unpatched
from tiny_models import make_llama

from mlx_snapkv import patch_for_snapkv, unpatch_snapkv
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording

OTHER = qwen3_next.Qwen3NextAttention


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    assert_unpatched()


def recording_caches(model, first, last):
    return [
        RecordingKVCache(first, last, capacity=200) if isinstance(c, KVCache) else c
        for c in make_prompt_cache(model)
    ]


def run_in_chunks(model, tokens, caches, chunk):
    for start in range(0, tokens.size, chunk):
        model(tokens[None, start : start + chunk], cache=caches)
        mx.eval([c.state for c in caches])


def queries_of(caches):
    return [c.queries for c in caches if isinstance(c, RecordingKVCache)]


@pytest.mark.parametrize("chunk", [7, 168, 169])
def test_chunks_do_not_change_what_is_recorded(tiny_model, tokens, chunk):
    whole, cut, all_of_them = (recording_caches(tiny_model, first, 200) for first in (168, 168, 0))
    with recording(attention_classes(tiny_model)):
        for caches, n in ((whole, tokens.size), (cut, chunk), (all_of_them, chunk)):
            run_in_chunks(tiny_model, tokens, caches, n)
    for a, b, c in zip(*map(queries_of, (whole, cut, all_of_them))):
        assert a.shape == b.shape == (1, 4, 32, a.shape[-1])
        assert np.allclose(a, b, atol=1e-5) and mx.array_equal(b, c[:, :, 168:])


def test_queries_before_a_gap_are_forgotten(tokens):
    model = make_llama()
    caches = recording_caches(model, 0, 200)
    for start, classes in ((0, [llama.Attention]), (20, []), (40, [llama.Attention])):
        with recording(classes):
            model(tokens[None, start : start + 20], cache=caches)
    assert caches[0].query_positions == range(40, 60) and caches[0].queries.shape[2] == 20
    assert caches[0].keys.shape[2] == 200  # allocated once


def test_recording_changes_nothing(tiny_model, tokens):
    expected = tiny_model(tokens[None], cache=make_prompt_cache(tiny_model))
    with recording(attention_classes(tiny_model)):
        for caches in (recording_caches(tiny_model, 100, 200), make_prompt_cache(tiny_model)):
            assert mx.array_equal(tiny_model(tokens[None], cache=caches), expected)


def test_requests_and_threads_do_not_mix(tokens):
    model, sequences, barrier = make_llama(), [tokens, tokens[::-1]], threading.Barrier(2)
    alone, mixed, threaded = (
        [recording_caches(model, 100, 200) for _ in sequences] for _ in range(3)
    )

    def work(sequence, caches):
        with mx.stream(mx.new_stream(mx.default_device())), recording([llama.Attention]):
            barrier.wait()
            run_in_chunks(model, sequence, caches, 10)
            mx.eval(queries_of(caches))

    with recording([llama.Attention]):
        for sequence, caches in zip(sequences, alone):
            run_in_chunks(model, sequence, caches, 10)
        for start in range(0, 200, 10):
            for sequence, caches in zip(sequences, mixed):
                run_in_chunks(model, sequence[start : start + 10], caches, 10)
    mx.eval([queries_of(caches) for caches in (*alone, *mixed)])
    with ThreadPoolExecutor() as pool:
        list(pool.map(work, sequences, threaded))
    for found in zip(alone, mixed, threaded):
        for x, y, z in zip(*map(queries_of, found)):
            assert mx.array_equal(x, y) and mx.array_equal(x, z)


def test_contexts_nest_and_survive_exceptions():
    with pytest.raises(RuntimeError), recording([llama.Attention]):
        patched, original = llama.Attention.__call__, OTHER.__call__
        with pytest.raises(KeyError), recording([llama.Attention, OTHER]):
            assert OTHER.__call__ is not original
            raise KeyError
        assert llama.Attention.__call__ is patched and OTHER.__call__ is original
        raise RuntimeError


def test_patch_for_snapkv_is_idempotent_and_undone():
    """Of one model's class, and without a model of every family's."""
    model, cls, original = make_llama(), llama.Attention, llama.Attention.__call__
    for _ in range(2):
        patch_for_snapkv(model)
        patched = cls.__call__
        with recording([cls]):
            assert cls.__call__ is patched is not original
    for _ in range(2):
        unpatch_snapkv(model)
        assert cls.__call__ is original
    patch_for_snapkv()
    try:
        assert all(vars(owner)[name] is not before for owner, name, before in PATCHED)
    finally:
        unpatch_snapkv()


def test_what_someone_else_has_patched_over_ours_stays():
    cls, original = llama.Attention, llama.Attention.__call__
    with recording([cls]):
        cls.__call__ = theirs = functools.partialmethod(cls.__call__)
    try:
        assert vars(cls)["__call__"] is theirs
    finally:
        cls.__call__ = original


def test_a_call_wrapped_by_someone_else_is_still_captured(tokens, monkeypatch):
    model, calls, original = make_llama(), [], llama.Attention.__call__

    @functools.wraps(original)
    def counted(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(llama.Attention, "__call__", counted)
    caches = recording_caches(model, 190, 200)
    with recording([llama.Attention]):
        run_in_chunks(model, tokens, caches, 200)
    assert len(calls) == 2 and caches[0].n_queries == 10
    monkeypatch.undo()
