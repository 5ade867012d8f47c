"""Sparse attention in requests: what tokens read, when they start to choose, and prompts left to mlx-lm."""

import mlx.core as mx
import numpy as np
import pytest
from entry_helpers import exact_up_to
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from model_configs import make_model
from request_helpers import assert_same, fail_in, forced, plain, random_tokens, steps
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError, generate_step, stream_generate
from mlx_snapkv.models import patch
from mlx_snapkv.sparse.options import CHUNK_SIZE, LAST_TOKENS, PAGE_SIZE, Sparse

SNAPKV = "snapkv:budget=40,n_sink=4,n_window=16,obs_window=8,lookahead=32"


# Grouped queries, sinks, a hybrid, shared entries, keys wider than values, learned positions.
FAMILIES = "llama gpt_oss qwen3_next gemma3n gemma4_text minicpm3 gpt2".split()


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_room_for_all_entries_but_one_the_answer_is_nearly_the_full_caches(
    name, index, monkeypatch
):
    exact_up_to(monkeypatch, 0 if index else 8192)
    model = make_model(name)
    prompt = random_tokens(100)
    full = plain(model, prompt, 8)

    def away(budget: int) -> float:
        sparse = f"budget={budget},n_sink=1,n_window=8,read=dense,when=always"
        sampler = forced(token for token, _ in full)
        found = steps(model, prompt, 8, sparse=sparse, sampler=sampler)
        return np.median([float(mx.abs(a - b).max()) for (_, a), (_, b) in zip(found, full)][1:])

    assert 0 < away(99) < 0.5 * away(20)  # tokens of both see unread entries as means


CHOOSES = "budget=40,n_sink=4,n_window=16,when=always"


@pytest.mark.parametrize(
    "method", [{"sparse": CHOOSES}, {"sparse": f"{CHOOSES},store=file"}, {"policy": SNAPKV}]
)
def test_sparse_tokens_choose_from_the_second_token_on(method):
    """The first token is computed with the end of the prompt. With lookahead, a policy waits longer."""
    model, reports = make_llama(), []
    prompt = random_tokens(100)
    answer = generate_step(prompt, model, max_tokens=40, on_report=reports.append, **method)
    n_before = next(n for n, _ in enumerate(answer, start=1) if reports)
    chooses = reports[0].read_per_token is not None
    assert (n_before, chooses) == ((1, True) if "sparse" in method else (32, False))
    assert len(list(answer)) == 40 - n_before


@pytest.mark.parametrize("store", ["memory", "file"])
def test_a_prompt_that_fits_the_budget_is_left_to_mlx_lm_without_patches(
    tiny_model, tokens, store, monkeypatch
):
    monkeypatch.delattr(patch, "_wrapped")
    of_100 = {"budget": "100%", "store": store}
    for sparse in (
        f"budget=200,store={store}",
        Sparse(top_k=196, n_window=50, store=store),
        of_100,
    ):
        reports = []
        found = steps(tiny_model, tokens, sparse=sparse, on_report=reports.append)
        assert_same(found, plain(tiny_model, tokens))
        assert "200 entries fit the budget" in reports[0].reason
    with pytest.raises(NameError, match="_wrapped"):
        steps(tiny_model, tokens, sparse=f"budget=199,when=always,store={store}")


WRONG = [
    ({"sparse": "top_k=9", "policy": "snapkv"}, "^[^\n]*sparse[^\n]*: give only one of them$"),
    ({"sparse": True, "snapkv": {"top_k": 9}}, "^[^\n]*sparse[^\n]*: give only one of them$"),
    ({"sparse": True, "policy": Sparse()}, "^policy and sparse both select sparse attention: give only one$"),
    ({"snapkv": True, "policy": Sparse()}, "^snapkv and policy both name a policy: give only one$"),
    ({"sparse": True, "policy": "auto"}, "^policy=auto chooses how entries are used, and so does sparse: give only"),
    ({"sparse": "budget=10%,top_k=9"}, "^sparse options top_k and budget say the same: give only one$"),
    ({"sparse": "top=9"}, "^unknown sparse option 'top'.*; known: top_k, "),
    ({"sparse": "residual=mean"}, "^sparse option residual must be means or none, got 'mean'$"),
    ({"sparse": "read=little"}, "^sparse option read must be dense or sparse, got 'little'$"),
    ({"sparse": "read_top_k=3"}, "^sparse option read_top_k must be a whole number of entries of at least 16 or"),
    ({"sparse": 5}, "^sparse must be a Sparse object, a dict or a string, got int$"),
    ({"sparse": True, "kv_bits": 8}, "^kv_bits quantises the entries that a policy keeps, .*: give store=8bit"),
    ({"sparse": "budget=40", "max_kv_size": 64}, "^max_kv_size can't be combined"),
]  # fmt: skip


@pytest.mark.parametrize("options, sentence", WRONG)
def test_an_impossible_option_is_one_sentence(tokens, options, sentence):
    with pytest.raises(SnapKVError, match=sentence):
        steps(make_llama(), tokens, **options)


@pytest.mark.parametrize("few, layer", [(0, 0), (8192, 0), (0, -1)])
def test_attention_that_gives_nan_is_one_sentence(tokens, few, layer, monkeypatch):
    """NaN scores must also not lead to writes outside the entries."""
    exact_up_to(monkeypatch, few)
    model = make_llama()
    projection = model.layers[layer].self_attn.k_proj
    projection.weight = projection.weight * mx.nan
    with pytest.raises(SnapKVError, match="the model's attention produced NaN"):
        steps(model, tokens, sparse="budget=40,n_sink=4,n_window=16,when=always")


def test_a_draft_model_is_refused(tokens):
    model, what = make_llama(), {"sparse": True, "draft_model": make_llama()}
    with pytest.raises(SnapKVError, match=r"^draft_model can't be combined with sparse: drop one"):
        stream_generate(model, None, tokens, **what)


@pytest.mark.parametrize("make, store", [(make_llama, "memory"), (make_qwen, "file")])
@pytest.mark.parametrize("at", ["first", "sparse", "dense", "token", "later"])
def test_a_request_that_fails_leaves_the_callers_caches_as_they_were(make, store, at, monkeypatch):
    """The failure occurs in the first chunk, in a chunk that chooses, in the last chunk, or at the first token.

    After the first token, the caches contain the prompt.
    """
    sparse, earlier, n = (
        f"budget=50%,read_top_k={PAGE_SIZE},when=always,store={store}",
        random_tokens(50),
        CHUNK_SIZE + 100 + LAST_TOKENS,
    )
    model, prompt = make(), random_tokens(n)
    # The calls have CHUNK_SIZE, 100, CHUNK_SIZE - 100, 99 and 1 tokens; then comes the answer.
    call = {"first": 1, "sparse": 2, "dense": 4, "token": 6, "later": 7}[at]
    for n_held in (0, 50):
        cache = make_prompt_cache(model)
        if n_held:
            steps(model, earlier, 1, sparse=sparse, prompt_cache=cache)
        states = [[np.array(x) for _, x in tree_flatten(c.state) if x is not None] for c in cache]
        before, held = list(cache), [getattr(c, "offset", None) for c in cache]
        with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="model failed"):
            fail_in(call, model, failing)
            steps(model, prompt, 9, sparse=sparse, prompt_cache=cache)
        if at == "later":
            n_read = n + 1 + (n_held and n_held + 1)
            assert {c.offset for c in cache if hasattr(c, "offset")} == {n_read}
            continue
        assert all(a is b for a, b in zip(cache, before, strict=True))
        assert [getattr(c, "offset", None) for c in cache] == held
        for c, wanted in zip(cache, states):
            found = [x for _, x in tree_flatten(c.state) if x is not None]
            assert all(map(np.array_equal, map(np.array, found), wanted))
