import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models import llama, qwen3_next
from request_helpers import PATCHED, assert_unpatched
from tiny_models import make_llama

from mlx_snapkv import patch_for_snapkv, unpatch_snapkv
from mlx_snapkv.compress.recording import RecordingKVCache
from mlx_snapkv.models.patch import recording

OTHER = qwen3_next.Qwen3NextAttention


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    assert_unpatched()


def recording_caches(model, first, last):
    return [RecordingKVCache(first, last, capacity=200) for _ in model.layers]


def test_queries_before_a_gap_are_forgotten(tokens):
    model = make_llama()
    caches = recording_caches(model, 0, 200)
    for start, classes in ((0, [llama.Attention]), (20, []), (40, [llama.Attention])):
        with recording(classes):
            model(tokens[None, start : start + 20], cache=caches)
    assert caches[0].query_positions == range(40, 60) and caches[0].queries.shape[2] == 20
    assert caches[0].keys.shape[2] == 200  # allocated once


def test_threads_do_not_mix(tokens):
    """Each thread is in the middle of a call while the other one is as well."""
    model, prompts, barrier = make_llama(), (tokens, tokens[::-1]), threading.Barrier(2)
    attention = model.layers[0].self_attn
    project = attention.q_proj

    def meeting(x):
        barrier.wait()
        return project(x)

    def queries(prompt):
        caches = recording_caches(model, 100, 200)
        with mx.stream(mx.new_stream(mx.default_device())), recording([llama.Attention]):
            model(prompt[None], cache=caches)
            mx.eval([c.queries for c in caches])
        return [c.queries for c in caches]

    alone = [queries(prompt) for prompt in prompts]
    attention.q_proj = meeting
    with ThreadPoolExecutor() as pool:
        threaded = list(pool.map(queries, prompts))
    for found, wanted in zip(threaded, alone):
        assert all(map(mx.array_equal, found, wanted))


def test_contexts_nest_and_survive_exceptions():
    with pytest.raises(RuntimeError), recording([llama.Attention]):
        patched, original = llama.Attention.__call__, OTHER.__call__
        with pytest.raises(KeyError), recording([llama.Attention, OTHER]):
            assert OTHER.__call__ is not original
            raise KeyError
        assert llama.Attention.__call__ is patched and OTHER.__call__ is original
        raise RuntimeError


def test_patch_for_snapkv_is_idempotent_and_undone():
    """If a model is passed, only its attention class is patched, otherwise those of all families."""
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
    patched = [vars(owner)[name] is not before for owner, name, before in PATCHED]
    unpatch_snapkv()
    assert all(patched)


def test_a_later_patch_of_another_package_stays(monkeypatch):
    cls = llama.Attention
    monkeypatch.setattr(cls, "__call__", cls.__call__)  # so that `undo` restores it
    with recording([cls]):
        cls.__call__ = theirs = functools.partialmethod(cls.__call__)
    assert vars(cls)["__call__"] is theirs
    monkeypatch.undo()


def test_a_call_wrapped_by_another_package_is_still_captured(tokens, monkeypatch):
    model, calls, original = make_llama(), [], llama.Attention.__call__

    @functools.wraps(original)
    def counted(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(llama.Attention, "__call__", counted)
    caches = recording_caches(model, 190, 200)
    with recording([llama.Attention]):
        model(tokens[None], cache=caches)
    assert len(calls) == 2 and caches[0].n_queries == 10
    monkeypatch.undo()
