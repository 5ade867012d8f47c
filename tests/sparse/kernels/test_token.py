"""Answers computed with the kernels, run on a CPU, equal those of the plain path."""

import mlx.core as mx
import pytest
from entry_helpers import exact_up_to
from request_helpers import random_tokens, steps
from tiny_models import make_llama

from mlx_snapkv.sparse import cache as sparse_cache
from mlx_snapkv.sparse.kernels import token

SPARSE = "budget=40,n_sink=2,n_window=8,when=always"
PROMPT = random_tokens(150)


def answer(model, sparse=SPARSE):
    reports = []
    found = steps(model, PROMPT, 48, sparse=sparse, on_report=reports.append)
    return [t for t, _ in found], mx.stack([logits for _, logits in found]), reports[-1]


@pytest.mark.parametrize("residual", ["means", "none"])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_an_answer_by_the_kernels_equals_the_plain_paths(shim, indexed, residual, monkeypatch):
    """Later tokens also choose older answer tokens, which are in another buffer."""
    exact_up_to(monkeypatch, 0 if indexed else 8192)
    monkeypatch.setattr(sparse_cache, "MAX_RECENT", 32)
    model = make_llama(head_dim=64)
    sparse = f"{SPARSE},residual={residual}"
    wanted, logits, plain = answer(model, sparse)
    assert plain.plain_path == "there is no GPU" and not shim.launches
    monkeypatch.setattr(token, "why_unused", lambda *shape: None)
    found, by_kernels, report = answer(model, sparse)
    assert report.plain_path is None
    names = ["score", "select", "attend", "merge"] if indexed else ["attend", "merge"]
    n_layers = len(model.layers)
    assert [x.name for x in shim.launches][: 4 * len(names)] == names * 4
    assert len(shim.launches) >= 46 * n_layers * len(names)
    assert found == wanted
    # The kernels compare the index's scores in half precision, so a few chosen entries differ.
    assert mx.abs(by_kernels - logits).mean() < (0.005 if indexed else 1e-5)


@pytest.mark.parametrize("store", ["8bit", "file"])
def test_entries_in_a_store_take_the_plain_path(store, monkeypatch):
    monkeypatch.setattr(token, "why_unused", lambda *shape: None)
    reports = []
    sparse = f"{SPARSE},store={store}"
    steps(make_llama(head_dim=64), PROMPT, 4, sparse=sparse, on_report=reports.append)
    assert reports[0].plain_path == "the kernels read plain entries in memory"
