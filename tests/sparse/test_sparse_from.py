"""Entries read sparsely are marked in caches and files, so that they are never mistaken for the full cache's."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from tiny_models import make_llama

from mlx_snapkv import Sparse, generate_step, prefill, saved
from mlx_snapkv.caches.layers import first_sparse_position
from mlx_snapkv.sparse.options import CHUNK_SIZE, PAGE_SIZE
from mlx_snapkv.sparse.prompt_caches import copy_to_store

OPTIONS = f"budget=50%,read_top_k={4 * PAGE_SIZE},when=always"
TEXT = mx.array(np.random.default_rng(1).integers(1, 64, 3 * CHUNK_SIZE))
QUESTION = mx.arange(1, 6)


@pytest.mark.parametrize("store", ["memory", "8bit", "file"])
def test_every_store_and_file_knows_its_first_sparsely_read_entry(store, tmp_path):
    """The entries before it equal the full cache's."""
    model = make_llama(head_dim=64)
    sparse = Sparse.from_string(f"{OPTIONS},store={store}")
    caches, _ = prefill(model, TEXT, sparse=sparse)
    first = first_sparse_position(caches)
    assert first == CHUNK_SIZE  # the second chunk chooses
    saved.save(tmp_path / "text.safetensors", model, caches, TEXT, sparse)
    loaded = saved.load(tmp_path / "text.safetensors", model).prompt_cache
    moved = copy_to_store(model, loaded, sparse)
    assert first_sparse_position(loaded) == first_sparse_position(moved) == first
    dense = f"budget=64,read=dense,when=always,store={store}"
    list(generate_step(QUESTION, model, max_tokens=1, prompt_cache=moved, sparse=dense))
    assert first_sparse_position(moved) == first
    trim_prompt_cache(moved, moved[0].offset - first)
    assert moved[0].offset == first and first_sparse_position(moved) is None
    full = make_prompt_cache(model)
    model(TEXT[None, :first], cache=full)
    if store == "memory":
        keys = moved[1].keys_and_values()[0]
        assert mx.allclose(keys, full[1].keys_and_values()[0], atol=1e-5)
    in_full, _ = prefill(model, TEXT, sparse=replace(sparse, read="dense"))
    assert first_sparse_position(in_full) is None
