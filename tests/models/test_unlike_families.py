"""Models whose attention function does not get all inputs, or whose layers read entries of other layers."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from model_configs import CONFIGS, make_model
from request_helpers import assert_same, plain, steps
from saved_helpers import spec

from mlx_snapkv import SnapKVError, prefill, saved
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.compress.policy import POLICIES
from mlx_snapkv.compress.recording import RecordingKVCache
from mlx_snapkv.models import attention_classes, capture
from mlx_snapkv.models.patch import recording

pytestmark = pytest.mark.usefixtures("short_blocks")

LATENT = ["deepseek_v3", "mistral4", "kimi_linear", "longcat_flash"]
LENDING = ["gemma3n", "gemma4_text", "iquestloopcoder"]
OWN_CALLS = ["gemma2", "plamo2"]
NAMES = ["deepseek_v3", "kimi_linear", "mistral4", *LENDING, *OWN_CALLS]
TOKENS = mx.array(np.random.default_rng(1).integers(1, 128, 64))
SNAPKV = "snapkv:top_k=10,n_sink=2,n_window=8,obs_window=8,pool_kernel=3,lookahead=4"
SPECS = [spec(name, "once") for name in POLICIES]


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return make_model(request.param)


def is_type(model, *names):
    return type(model).__module__.rpartition(".")[2] in names


def layers_of(model, cache=None):
    return attention_layers(model, make_prompt_cache(model) if cache is None else cache)


def test_queries_do_not_depend_on_the_chunks(model):
    """Some models use different code for single tokens than for chunks."""
    found = []
    for chunks in ([64], [57, 1, 3, 1, 1, 1]):
        caches = make_prompt_cache(model)
        for layer in layers_of(model):
            layer.put(caches, RecordingKVCache(40, 64, 64, layer))
        with recording(attention_classes(model)):
            for end, n in zip(np.cumsum(chunks), chunks):
                model(TOKENS[None, int(end) - n : int(end)], cache=caches)
        found.append([layer.cache_in(caches).queries for layer in layers_of(model, caches)])
    assert all(mx.allclose(x, y, atol=1e-4) for x, y in zip(*found, strict=True))


def test_every_policy_keeps_its_budget_or_is_refused(model):
    for policy in SPECS:
        if policy.startswith("expected") and is_type(model, "gemma2"):
            with pytest.raises(SnapKVError, match="can't score models that cap their logits"):
                prefill(model, TOKENS, policy)
            continue
        cache, _ = prefill(model, TOKENS, policy)
        assert {layer.layer_cache_in(cache).n_entries for layer in layers_of(model, cache)} == {40}
        assert mx.all(mx.isfinite(model(TOKENS[None, :1], cache=cache)))


@pytest.mark.parametrize("name", LATENT)
def test_keys_are_latents_with_positional_keys_and_values_are_latents(name):
    """This is also true of a block cache that has evicted twice."""
    model = make_model(name)
    full = make_prompt_cache(model)
    plain(model, TOKENS, n=1, prompt_cache=full)
    cache, _ = prefill(model, TOKENS, "keydiff:budget=20,block=20")
    for layer in layers_of(model, cache):
        latents, positional = layer.cache_in(full).keys_and_values()
        held = layer.cache_in(cache).held()
        if layer.number == 0:  # later layers' entries depend on evictions in the first
            at = held.positions[..., None]
            wanted = [mx.take_along_axis(x, at, axis=2) for x in (latents, positional)]
            assert mx.allclose(held.keys, mx.concatenate(wanted, axis=-1), atol=1e-5)
            assert mx.allclose(held.values, wanted[0], atol=1e-5)
        both = mx.concatenate(held.dequantized(), axis=-1)
        for read, whole in ((held.read_keys, both), (held.read_values, held.dequantized()[0])):
            assert mx.array_equal(read(3, 9), whole[:, :, 3:9])


@pytest.mark.parametrize(
    "options",
    [
        {"policy": SNAPKV, "kv_bits": 8},
        {"sparse": "budget=20,store=8bit"},
    ],
    ids=str,
)
def test_entries_that_mlx_lm_reads_plain_are_not_quantised(model, options):
    if is_type(model, "gemma3n"):
        return  # its borrowing layers read through the cache
    refusals = r"quantised .*: (drop kv_bits|give store=memory)$|sparse attention is not possible"
    with pytest.raises(SnapKVError, match=refusals):
        steps(model, TOKENS, **options)


QUANTISABLE = {
    "gemma3n": {"text_config": CONFIGS["gemma3n"]["text_config"] | {"head_dim": 32}},
    "gemma4_text": CONFIGS["gemma4_text"] | {"num_kv_shared_layers": 0},
}


@pytest.mark.parametrize("name", QUANTISABLE)
def test_layers_that_read_through_a_cache_may_read_quantised_entries(name):
    model = make_model(name, QUANTISABLE[name])
    cache = make_prompt_cache(model)
    answer = steps(model, TOKENS, policy=SNAPKV, kv_bits=8, kv_group_size=32, prompt_cache=cache)
    assert len(answer) == 12
    assert all(layer.cache_in(cache).quantization.bits == 8 for layer in layers_of(model, cache))


def test_a_loaded_file_continues_as_the_saved_caches(model, tmp_path):
    """mlx-lm may load the file as well. Its caches then don't know their layers."""
    policy = "h2o:budget=20,block=8"
    cache, _ = prefill(model, TOKENS, policy)
    own, theirs = (str(tmp_path / name) for name in ("own.safetensors", "theirs.safetensors"))
    saved.save(own, model, cache, TOKENS, policy)
    save_prompt_cache(theirs, cache)
    wanted = steps(model, TOKENS[:9], n=10, prompt_cache=cache)
    for loaded in (saved.load(own, model).prompt_cache, load_prompt_cache(theirs)):
        assert_same(steps(model, TOKENS[:9], n=10, prompt_cache=loaded), wanted)


def test_a_call_that_fails_leaves_nothing_for_the_next():
    """The call fails after a layer has lent its entries, but before the last borrower has read them."""
    model = make_model("gemma4_text")
    wanted = steps(model, TOKENS, policy=SNAPKV)
    layer = model.layers[4]
    mlp, layer.mlp = layer.mlp, None
    with pytest.raises(TypeError, match="not callable"):
        steps(model, TOKENS, policy=SNAPKV)
    assert not capture._thread.lenders
    layer.mlp = mlp
    assert_same(steps(model, TOKENS, policy=SNAPKV), wanted)


def test_lent_entries_need_a_cache_that_knows_its_readers():
    model = make_model("gemma3n")
    caches = make_prompt_cache(model)
    caches[3] = RecordingKVCache(0, 64, 64)
    with (
        recording(attention_classes(model)),
        pytest.raises(SnapKVError, match="other layers also read these entries"),
    ):
        model(TOKENS[None], cache=caches)
