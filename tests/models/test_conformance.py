"""Every supported model type as a tiny random model, also quantised or with adapters: queries, votes, decoding."""

import copy
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest
from attention_spy import calls_of, heads_read, read_and_spy, softmax_votes
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from model_configs import LAYERS, LLAMA4_ROPE, REFUSED_CONFIGS, config, make_model
from request_helpers import plain, steps

from mlx_snapkv import TOVA, BlockKVCache, KeyDiff, SnapKVCache, generate_step, prefill
from mlx_snapkv.caches.layers import all_caches, attention_layers
from mlx_snapkv.compress.policies import SnapKV
from mlx_snapkv.errors import UnsupportedModelError
from mlx_snapkv.models import REFUSED, SUPPORTED
from mlx_snapkv.models.table import supported_types

TOKENS = mx.array(np.random.default_rng(0).integers(1, 128, 48))
SIZES = {"top_k": 6, "n_sink": 2, "n_window": 8, "obs_window": 8}
WAYS = {"pool_kernel": 1, "lookahead": 0, "on_full": "slide"}
POLICY = SnapKV(**SIZES, **WAYS)
SHORT_WINDOW = SnapKV(top_k=6, n_sink=2, n_window=4, obs_window=4, **WAYS)


def add_adapters(model):
    linear_to_lora_layers(model, 4, {"rank": 4, "scale": 8.0, "dropout": 0.0})
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = mx.random.normal(module.lora_b.shape)
    model.eval()


CHANGES = {
    "4-bit weights": lambda model: nn.quantize(model, group_size=32, bits=4),
    "adapters": add_adapters,
}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
CHANGED = [f"{name}, {change}" for name in ("llama", "gpt_oss") for change in CHANGES]
CHANGED += ["deepseek_v3, 4-bit weights", "qwen3_next, adapters"]


@pytest.fixture(scope="module", params=[*SUPPORTED, *CHANGED])
def model(request):
    name, _, change = request.param.partition(", ")
    model = make_model(name, LATENT if change and name == "deepseek_v3" else None)
    if change:
        before = model(TOKENS[None])
        CHANGES[change](model)
        assert not mx.allclose(model(TOKENS[None]), before, atol=1e-4)
    return model


@pytest.fixture(scope="module")
def theirs(model):
    """Return the tokens and log-probabilities of mlx-lm's own generation."""
    return plain(model, TOKENS, n=3)


def layers_of(model):
    return attention_layers(model, make_prompt_cache(model))


def test_queries_and_votes_are_the_attentions_own(model, monkeypatch):
    """Queries equal those of the real call bit for bit. Votes use the call's heads, scale, mask and sinks."""
    request, calls = read_and_spy(model, TOKENS, POLICY, monkeypatch)
    for layer in attention_layers(model, request.caches):
        cache = layer.cache_in(request.caches)
        own, rows = calls_of(layer, cache, calls), cache.held()
        votes = [softmax_votes(c, 8, heads_read(layer, c, rows.keys)) for c in own]
        assert np.allclose(rows.votes[0], np.mean(votes, axis=0), atol=2e-5)
        # Callers with their own queries use the family's scale and sinks.
        scale = layer.family.scale_of(layer.attention, rows.keys.shape[3])
        for call in own:
            assert scale == pytest.approx(call["scale"])
            assert (layer.family.sinks_of(layer.attention) is None) == (call["sinks"] is None)


def test_decoding_with_all_entries_equals_mlx_lm(model):
    caches = [make_prompt_cache(model) for _ in range(2)]
    for cache in caches:
        model(TOKENS[None], cache=cache)
        mx.eval([c.state for c in cache])
    for layer in attention_layers(model, caches[0]):
        full = layer.cache_in(caches[0])
        keys, values = full.keys_and_values()
        pinned = mx.broadcast_to(mx.arange(40, dtype=mx.uint32), (*keys.shape[:2], 40))
        layer.put(caches[0], SnapKVCache(keys, values, pinned, offset=full.offset, n_window=64))
    for turn in (TOKENS[:1], TOKENS[1:2], TOKENS[2:9], TOKENS[9:10]):
        ours, theirs = (model(turn[None], cache=cache) for cache in caches)
        assert np.allclose(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_long_turn_equals_its_tokens_one_by_one(model):
    """The turn is longer than the window, so every layer needs the compressed cache's mask."""
    cache, _ = prefill(model, TOKENS, SHORT_WINDOW)
    caches = [cache, copy.deepcopy(cache)]
    turn = TOKENS[:6]
    at_once = model(turn[None], cache=caches[0])[0]
    for i in range(turn.size):
        logits = model(turn[None, i : i + 1], cache=caches[1])[0, 0]
        assert np.allclose(logits, at_once[i], atol=1e-4, rtol=1e-3)


def test_a_request_is_compressed(model, theirs):
    reports, cache, layers = [], make_prompt_cache(model), layers_of(model)
    options = {"policy": POLICY, "prompt_cache": cache, "on_report": reports.append}
    ours = steps(model, TOKENS, n=3, **options)
    assert len(ours) == 3 and all(mx.all(mx.isfinite(logprobs)) for _, logprobs in ours)
    assert {layer.cache_in(cache).size() for layer in layers} == {POLICY.budget}
    untouched = set(range(len(cache))) - {layer.index for layer in layers}
    assert all(reports[0].entries_kept[i] is None for i in untouched)
    # The first token equals mlx-lm's, because it was decoded from all entries.
    assert ours[0][0] == theirs[0][0]


def test_a_request_with_a_block_policy_stays_within_its_budget(model):
    cache, sizes = make_prompt_cache(model), []
    options = {"policy": TOVA(budget=6, n_window=2, block=4), "prompt_cache": cache}
    for _, logprobs in generate_step(TOKENS[:12], model, max_tokens=6, **options):
        assert mx.all(mx.isfinite(logprobs))
        sizes.append([c.size() for c in bounded(cache)])
    n = len(layers_of(model))
    # At 10 entries, budget + block, the next update evicts down to the budget.
    assert sizes == [[size] * n for size in (7, 8, 9, 10, 7, 8)]


def test_a_block_cache_below_its_budget_equals_mlx_lm(model, theirs):
    """The answer could exceed the budget, so the request gets a block cache, but nothing is ever evicted."""
    cache = make_prompt_cache(model)
    policy = KeyDiff(budget=50, block=64)
    ours = steps(model, TOKENS, n=3, policy=policy, prompt_cache=cache)
    assert len(bounded(cache)) == len(layers_of(model))
    for (a, x), (b, y) in zip(ours, theirs, strict=True):
        assert a == b and np.allclose(x.astype(mx.float32), y.astype(mx.float32), atol=1e-5)


def bounded(cache):
    return [c for c in all_caches(cache) if isinstance(c, BlockKVCache)]


def test_every_model_type_of_mlx_lm_is_listed_once():
    folder = Path(mlx_lm.models.__file__).parent
    defines = re.compile(r"^(class|from .*) Model\b", re.M)
    types = {p.stem for p in folder.glob("*.py") if defines.search(p.read_text())}
    assert not set(SUPPORTED) & set(REFUSED)
    assert types == {*SUPPORTED, *REFUSED}
    assert ("llama", "iquestcoder, mistral, xverse") in [row[:2] for row in supported_types()]


@pytest.mark.parametrize("name", sorted(REFUSED_CONFIGS))
def test_unsupported_types_are_refused_by_name(name):
    model = make_model(name, REFUSED_CONFIGS[name])
    with pytest.raises(UnsupportedModelError, match=f"type '{name}' can't be compressed: \\w"):
        generate_step(TOKENS, model, policy=POLICY)


def test_a_refused_type_in_a_wrapper_and_a_model_of_another_package_are_refused():
    model = make_model("pixtral")
    model.language_model = make_model("recurrent_gemma", REFUSED_CONFIGS["recurrent_gemma"])
    with pytest.raises(UnsupportedModelError, match=r"'pixtral' can't .*: all of its attention l"):
        layers_of(model)
    model = make_model("llama")
    model.__class__ = type("Model", (type(model),), {"__module__": "elsewhere.llama"})
    with pytest.raises(UnsupportedModelError, match=r"'elsewhere\.llama' .* does not know it"):
        layers_of(model)


def test_wrappers_may_give_sliding_layers_plain_caches_and_hold_latents():
    """The pixtral wrapper gives all layers of its language model plain caches, even those with a sliding window."""
    text = config("llama") | {"layer_types": LAYERS}
    cache, report = prefill(make_model("pixtral", {"text_config": text}), TOKENS, POLICY)
    assert [type(c).__name__ for c in cache] == ["KVCache", "SnapKVCache"] * 2
    assert report.entries_kept == [None, POLICY.budget] * 2
    text = config("deepseek_v2") | {"model_type": "mistral4"}
    text["rope_parameters"] = LLAMA4_ROPE | {"mscale_all_dim": 1.0, "factor": 1.0}
    model = make_model("mistral3", {"text_config": text})
    assert all(layer.latent for layer in layers_of(model))
    assert prefill(model, TOKENS, POLICY)[1].entries_kept == [POLICY.budget] * 4
