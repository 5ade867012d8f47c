"""Configurations of transformers 5 are read like those with `rope_theta`, or rejected by name."""

import importlib

import mlx.core as mx
import pytest
from model_configs import config

from mlx_snapkv import SnapKVError, models
from mlx_snapkv.models.rope_parameters import unread_parameters

BASE, OTHER = {"rope_theta": 12_345.0, "rope_type": "default"}, {"rope_theta": 500.0}
LINEAR = {"rope_theta": 12_345.0, "rope_type": "linear", "factor": 4.0}
SCALING = {"type": "linear", "rope_type": "linear", "factor": 4.0}
# Families of mlx-lm that read `rope_parameters` themselves, or another field, and families without RoPE.
ALONE = set(
    """exaone_moe gemma4 gemma4_text granitemoehybrid laguna lfm2 lfm2-vl lfm2_moe mellum ministral3 mistral3 mistral4
    muse_glimmer olmo_hybrid prism_hadamard_qwen35 qwen3 qwen3_5 qwen3_5_moe qwen3_vl spark2_5
    dbrx gpt2 gpt_bigcode jamba kimi_k3 kimi_linear nemotron_h""".split()
)
# Families without a field for the base.
BASELESS = set("gptj openelm phixtral plamo2 qwen".split())
# Families without a field for the scaling.
UNSCALED = set(
    """Klear baichuan_m1 cohere cohere2 ernie4_5 ernie4_5_moe gemma gemma2 glm glm4 gpt_neox helium lille-130m
    llama4_text mimo_v2_flash minimax nanochat phi plamo plamo3 stablelm starcoder2 talkie""".split()
)
# Families that mlx-lm can't build with LINEAR, or with no scaling.
UNBUILT = set("deepseek_v2 hunyuan hunyuan_v1_dense minicpm3 phi3 phimoe".split())


def changed(name, removed=(), **values):
    """Return a tiny model's configuration with fields removed and set, in its text model if it has one."""
    whole = config(name)
    text = whole.get("text_config", whole)
    for key in ("rope_theta", "rope_scaling", "rotary_emb_base", *removed):
        text.pop(key, None)
    text.update(values)
    return whole


def ropes(config):
    """Return the unit vectors as rotated by the RoPE of each layer of mlx-lm's model."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    found = models.cache_owners(module.Model(module.ModelArgs.from_dict(config)))
    rope = [x.family.rope_of(x.attention) for x in found if x.attention is not None]
    return [each(mx.eye(16)[None, :, None], offset=9) for each in rope if each is not None]


def read(config):
    return {**config, **unread_parameters(config).changes}


def assert_same_rope(found, wanted):
    pairs = list(zip(ropes(found), ropes(wanted), strict=True))
    assert pairs and all(mx.array_equal(*pair).item() for pair in pairs)


@pytest.mark.parametrize("name", sorted(models.SUPPORTED))
def test_every_family_gets_its_rope_from_rope_parameters_or_is_refused(name):
    new = changed(name, rope_parameters=BASE)
    if name in ALONE:
        assert read(new) == new
    elif name in BASELESS:
        with pytest.raises(SnapKVError, match=f"{name!r} does not read that and has no rope_theta"):
            unread_parameters(new)
    elif name in UNBUILT:
        found = unread_parameters(changed(name, rope_parameters=LINEAR)).values
        assert found == {"rope_theta": 12_345.0, "rope_scaling": SCALING}
    else:
        base = {"rotary_emb_base" if name == "gpt_neox" else "rope_theta": 12_345.0}
        assert_same_rope(read(new), changed(name, **base, rope_scaling=None))
        scaled = changed(name, rope_parameters=LINEAR)
        if name in UNSCALED:
            with pytest.raises(SnapKVError, match=f"{name!r} .* has no rope_scaling,.* linear"):
                unread_parameters(scaled)
        else:
            assert_same_rope(read(scaled), changed(name, **base, rope_scaling=SCALING))


PARTIAL = ["partial_rotary_factor", "rotary_pct", "rotary_dim"]


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("glm4_moe", "partial_rotary_factor", 0.25),
        ("gpt_neox", "rotary_pct", 0.25),
        ("minimax", "rotary_dim", 4),
        ("deepseek_v3", "qk_rope_head_dim", 8),
    ],
)
def test_a_partial_rotary_factor_sets_the_familys_own_field(name, field, value):
    new = changed(name, PARTIAL, rope_parameters=BASE | {"partial_rotary_factor": 0.25})
    assert read(new).get(field) == value


def test_a_partial_rotary_factor_without_a_field_is_refused():
    with pytest.raises(SnapKVError, match=r"'glm' .* has no partial_rotary_factor"):
        unread_parameters(changed("glm", rope_parameters=BASE | {"partial_rotary_factor": 0.5}))
    for name, factor in (("glm", 1.0), ("recurrent_gemma", 0.5)):
        rope = BASE | {"partial_rotary_factor": factor}
        found = unread_parameters({"model_type": name, "rope_parameters": rope})
        assert found.values == {"rope_theta": 12_345.0}


@pytest.mark.parametrize(
    "name, full, sliding, plain",
    [
        ("gemma3_text", LINEAR, OTHER, {"rope_scaling": SCALING, "rope_local_base_freq": 500.0}),
        ("gemma3", BASE, OTHER, {"rope_local_base_freq": 500.0}),
        ("gemma3n", BASE, OTHER, {"rope_local_base_freq": 500.0}),
        ("mimo_v2_flash", BASE, OTHER, {"swa_rope_theta": 500.0}),
        ("olmo3", LINEAR, BASE, {"rope_scaling": SCALING}),
        ("llama", BASE, BASE, {}),
    ],
)
def test_values_for_each_layer_type_set_the_familys_own_fields(name, full, sliding, plain):
    both, local = {"full_attention": full, "sliding_attention": sliding}, list(plain)
    new = changed(name, local, rope_parameters=both)
    assert_same_rope(read(new), changed(name, local, rope_theta=12_345.0, **plain))


@pytest.mark.parametrize(
    "name, full, sliding",
    [("llama", BASE, OTHER), ("olmo3", BASE, OTHER), ("gemma3_text", BASE, LINEAR)],
)
def test_values_for_each_layer_type_without_fields_are_refused(name, full, sliding):
    both = {"full_attention": full, "sliding_attention": sliding}
    with pytest.raises(SnapKVError, match=f"{name!r} .* one RoPE for full_attention and sliding"):
        unread_parameters(changed(name, rope_parameters=both))


def test_fields_that_a_configuration_has_are_not_changed():
    for values in ({"rope_theta": 7.0}, {"rope_theta": 7.0, "rope_scaling": SCALING}):
        new = changed("llama", rope_parameters=LINEAR, **values)
        assert read(new) == {"rope_scaling": read(new)["rope_scaling"], **new}
    assert unread_parameters(config("llama")).changes == {}


@pytest.mark.parametrize("kind", ["llama", "mistral4"])
def test_the_text_model_of_a_wrapper_decides(kind):
    text = {"model_type": kind, "rope_parameters": BASE}
    found = unread_parameters({"model_type": "mistral3", "text_config": text})
    assert found.values == ({"rope_theta": 12_345.0} if kind == "llama" else {})
    with pytest.raises(SnapKVError, match="must be an object, got 7"):
        unread_parameters({"model_type": "llama", "rope_parameters": 7})
