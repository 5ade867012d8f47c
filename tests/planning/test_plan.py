"""What is planned, against the memory that MLX then has in use."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import pytest
from measure_plan import FAMILIES, POLICIES, family, used
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tiny_models import make_llama

from mlx_snapkv import SnapKVError, plan_memory
from mlx_snapkv.demo import MODELS
from mlx_snapkv.planning.fit import Fit
from mlx_snapkv.planning.machine import Machine, mac, this_machine
from mlx_snapkv.planning.plan import CANDIDATES, fitting
from mlx_snapkv.planning.weightless import _write_empty, without_weights

KEYDIFF, SNAPKV = POLICIES


def off_by(model, n_prompt, policy=None, **options):
    """By which share of what is used the plan is wrong.

    A plan is of the most: one run in thirty gives a layer's scores back earlier, and uses 5% less.
    """
    options = {"max_tokens": 8, "prefill_step_size": 256} | options
    plan = plan_memory(model, n_prompt, policy, **options)
    most = used(model, plan, 1, **options)
    if most < plan.peak / 1.03:
        most = max(most, used(model, plan, 2, **options))
    return abs(plan.peak / most - 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name):
    model = family(name)
    assert off_by(model, 500) < 0.05
    if name != "deepseek_v3":  # which policies don't serve
        assert off_by(model, 500, KEYDIFF) < 0.05


@pytest.mark.parametrize(
    "policy, bits",
    [
        (None, None), (SNAPKV, None), (KEYDIFF, 8), (SNAPKV, 4), (f"{KEYDIFF} then {SNAPKV}", None),
        ("tova:budget=256", None), ("keydiff:budget=1024,block=128", None),
        ("keydiff:budget=pyramid:300,block=250", None), ("h2o:budget=256", None),
        ("expected_attention:budget=256", None),
        ("snapkv:budget=25%,on_full=grow,min_ctx=0,n_sink=4,n_window=32", None),
    ],
)  # fmt: skip
def test_the_embedded_models(demo_llama, policy, bits):
    assert off_by(demo_llama[0], 1500, policy, kv_bits=bits) < 0.05


def test_full_entries_that_mlx_lm_quantises_on_the_way():
    model = make_llama(hidden_size=128)
    for n in (5100, 5700):
        assert off_by(model, n, kv_bits=8, kv_group_size=32) < 0.05


@pytest.mark.parametrize("policy", [None, KEYDIFF, SNAPKV])
def test_an_embedded_hybrid(demo_qwen, policy):
    assert off_by(demo_qwen[0], 500, policy, prefill_step_size=128) < 0.05


def test_a_short_prompt_and_a_single_token(demo_llama):
    assert off_by(demo_llama[0], 40, SNAPKV) < 0.05
    plan = plan_memory(demo_llama[0], 1, SNAPKV)
    assert plan.reason and plan.kv == 3 * 2 * 2 * 64 * 4
    with pytest.raises(SnapKVError, match="at least 1 token, got 0"):
        plan_memory(demo_llama[0], 0)


def test_the_weights_are_not_loaded_and_count_the_same(demo_llama):
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = without_weights(MODELS["demo"])
    model.set_dtype(mx.float32)
    plan = plan_memory(model, 131_072, KEYDIFF)
    assert mx.get_peak_memory() - before < 500_000 < plan.weights
    assert plan == plan_memory(demo_llama[0], 131_072, KEYDIFF)


def test_a_model_is_as_it_was_when_it_has_been_planned():
    model = make_llama()
    weights = dict(tree_flatten(model.parameters()))
    plan_memory(model, 100)
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(x, weights[name]) for name, x in after.items()) and len(after) > 10


def test_quantised_weights_and_headers_alone(tmp_path):
    """A model as on the hub: its weights' files have headers, and a hole where the weights would be."""
    config = json.loads((MODELS["demo"] / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=64, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "real.safetensors"), weights)
    with (tmp_path / "real.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    _write_empty(tmp_path / "model.safetensors", header)
    config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 20_000
    found = plan_memory(without_weights(tmp_path), 500).weights
    assert found == sum(x.nbytes for x in weights.values())
    shutil.rmtree(tmp_path)


def test_what_reads_twice_and_what_has_no_room_is_said(demo_llama):
    with pytest.raises(SnapKVError, match="kvzip reads a prompt twice"):
        plan_memory(demo_llama[0], 1000, "kvzip:budget=25%")
    short = plan_memory(demo_llama[0], 1000, "snapkv:budget=10%,n_sink=64,n_window=64,min_ctx=0")
    assert short.peak == plan_memory(demo_llama[0], 1000).peak  # it stays full
    with pytest.raises(SnapKVError, match="kv_bits must be 2, 3, 4, 6, 8, got 5"):
        plan_memory(demo_llama[0], 1000, kv_bits=5)


def test_the_first_that_fits_is_taken(demo_llama):
    model, n = demo_llama[0], 16_384
    peaks = [plan_memory(model, n, policy).peak for policy in CANDIDATES]
    assert sorted(peaks, reverse=True) == peaks
    for policy, peak in zip(CANDIDATES, peaks):
        assert fitting(model, n, peak).policy == policy
    assert fitting(model, n, peaks[-1] - 1) is None


def test_beyond_the_trained_length_tokens_are_to_be_brought_nearer_if_that_fits(demo_llama):
    model, n = demo_llama[0], 16_385
    full, snapkv, keydiff = (plan_memory(model, n, policy) for policy in CANDIDATES[:3])
    assert "more than the 16384" in full.beyond and "16384" in snapkv.beyond
    assert keydiff.beyond is None
    assert fitting(model, n, full.peak).policy == keydiff.policy


def test_a_prompt_that_will_not_fit_is_told_with_what_would(demo_llama):
    model, n = demo_llama[0], 65_536
    warn = Fit(model, None).warning
    assert warn(2000) is None
    fit = Fit(model, None)
    fit._machine = Machine(10**9, 10**9)
    said = fit.warning(n)
    assert said.startswith("65536 tokens will take about 2.5") and "has 1 GB for models" in said
    policy = said.partition("--policy ")[2].split()[0]
    assert plan_memory(model, n, policy).peak < 10**9
    assert fit.warning(4096) is None  # counted, since it is not small by far
    fit._machine = Machine(10**6, 10**6)
    assert "no policy known here" in fit.warning(n)
    assert Fit(model, None, max_kv_size=64).warning(10**6) is None


def test_machines():
    assert mac(24 << 30).usable == 16 << 30 and mac(64 << 30).usable == 48 << 30
    here = this_machine()
    assert 1 << 28 < here.usable <= here.memory
