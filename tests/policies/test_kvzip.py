"""KVzip: its score, who votes for it, and what is put back when the prompt has been read again."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_unpatched, fail_in, plain, steps
from tiny_models import make_llama

from mlx_snapkv import Conversation, KVzip, SnapKVError, compress_prompt_cache, prefill
from mlx_snapkv.engine import repetition
from mlx_snapkv.entries import attention
from mlx_snapkv.entries.queries import Queries

POLICY = "kvzip:budget=40,n_window=8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(KVzip):
    repeats = 64


@pytest.mark.parametrize("asked, n_bytes", [(range(0, 30), 32 << 20), (range(30, 41), 1)])
def test_most_attention(asked, n_bytes, monkeypatch):
    """In one block and in blocks of one query; a sink of the attention is one more entry that nobody scores."""
    monkeypatch.setattr(attention, "MOST_BYTES", n_bytes)
    rng = np.random.default_rng(0)
    T, n, again, n_sink = 60, 15, 42, min(4, asked.start)
    keys = rng.normal(0.3, 1, size=(1, 2, T, 8)).astype(np.float32)
    queries = rng.normal(size=(1, 4, n, 8)).astype(np.float32) * 2
    observed = Queries(mx.array(queries), range(T - n, T), 0.4)
    found, with_sinks = (
        attention.most_attention(mx.array(keys), each, n_sink, asked, again)
        for each in (observed, dataclasses.replace(observed, sinks=mx.array([0.3, 2.0, -1.0, 0.0])))
    )
    for head in range(2):
        group = queries[0, 2 * head : 2 * head + 2]
        expected = reference.kvzip(group, keys[0, head], n_sink, asked, again, 0.4)
        assert np.allclose(np.exp2(found[0, head]), expected, rtol=1e-4, atol=1e-7)
    assert mx.all(with_sinks < found).item()


def test_what_it_costs_is_reported(tokens, monkeypatch):
    """A second prompt in the progress, and its seconds in those of the selection, not of the prefill."""
    model, clock, progress = make_llama(), [0.0], []
    call = type(model).__call__

    def slow(self, inputs, *args, **kwargs):
        clock[0] += inputs.shape[1]
        return call(self, inputs, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", slow)
    monkeypatch.setattr(repetition.time, "perf_counter", lambda: clock[0])
    options = {"prompt_progress_callback": lambda *done: progress.append(done)}
    _, report = prefill(model, tokens, Small(budget=40), **options)
    assert progress == sorted(progress) and {total for _, total in progress} == {400}
    assert [done for done, _ in progress][-4:] == [328, 392, 399, 400] and progress[0] == (0, 400)
    n_again = 64 + 72 + 72 + 16
    assert KVzip().lead_in(tokens, 64).tolist() == tokens[56:64].tolist()
    assert report.selection_seconds == pytest.approx(n_again, abs=1)
    assert report.prefill_seconds == pytest.approx(200, abs=1)


def test_an_error_while_it_reads_again_leaves_everything(tiny_model, tokens, monkeypatch):
    fail_in(6, tiny_model, monkeypatch)
    cache = make_prompt_cache(tiny_model)
    before = list(cache)
    with pytest.raises(RuntimeError, match="the model failed"):
        steps(tiny_model, tokens, policy=Small(budget=40), prompt_cache=cache)
    assert_unpatched()
    assert all(a is b for a, b in zip(cache, before)) and all(c.empty() for c in cache)


def test_what_can_not_be_read_again_is_refused(demo_llama, tokens):
    model = make_llama()
    for options, message in (
        ({"policy": "kvzip:schedule=block"}, "kvzip option schedule must be once, got 'block'"),
        ({"policy": f"keydiff:budget=60 then {POLICY}"}, "kvzip reads the whole prompt again"),
        ({"policy": POLICY, "memory": "recall"}, "memory=recall needs .* once .* or memory=drop"),
    ):
        with pytest.raises(SnapKVError, match=message):
            steps(model, tokens, **options)
    with pytest.raises(SnapKVError, match="a conversation's turns can't do"):
        Conversation(*demo_llama, policy=POLICY)
    cache = make_prompt_cache(model)
    plain(model, tokens, n=0, prompt_cache=cache)
    with pytest.raises(SnapKVError, match="needs the prompt to be read twice"):
        compress_prompt_cache(model, cache, POLICY)
    assert {type(c).__name__ for c in cache} == {"KVCache"}
