import gc
import shlex
import time

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from model_configs import REFUSED_CONFIGS, make_model
from tiny_models import make_llama

from mlx_snapkv import KeyDiff, SnapKV, SnapKVError, Sparse, generate_step, plan_memory
from mlx_snapkv.caches.layers import memory_bytes
from mlx_snapkv.cli.plan import PLANNED_CONTEXTS
from mlx_snapkv.demo import MODELS
from mlx_snapkv.entries.quantization import count_bytes
from mlx_snapkv.planning import long_prompts, scores
from mlx_snapkv.planning.auto import CANDIDATES, QUESTION
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.long_prompts import LongPrompts
from mlx_snapkv.planning.machine import Machine, mac, this_machine
from mlx_snapkv.planning.memory_plan import Planner
from mlx_snapkv.planning.settings import setting_named
from mlx_snapkv.planning.shapes import without_weights
from mlx_snapkv.planning.units import format_bytes

KEYDIFF = "keydiff:budget=256,block=128"
SNAPKV = "snapkv:top_k=128,n_window=64,min_ctx=0"
POLICIES = [config.setting and str(config.setting) for config in CANDIDATES[QUESTION]]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("policy", [None, KEYDIFF, SNAPKV, f"{KEYDIFF} then {SNAPKV}"])
def test_entries_take_no_more_than_was_planned(name, policy):
    """Memory is measured after the prompt and after the answer."""
    model, n, reports = make_model(name), 700, []
    if policy is not None and name == "lfm2":
        policy = policy.replace("budget=256", "budget=320")
    planner = Planner(model, max_tokens=8, prefill_step_size=256)
    plan, most = planner.memory_and_peak(n, CompressionConfig(policy and setting_named(policy)))
    cache = make_prompt_cache(model)
    options = {"max_tokens": 8, "prefill_step_size": 256, "prompt_cache": cache}
    for _ in generate_step(tokens_of(n), model, policy=policy, on_report=reports.append, **options):
        pass
    assert reports[0].reason is None or policy is None
    held = memory_bytes(cache)
    assert held <= most <= plan.peak - plan.weights
    assert plan.kv <= most


@pytest.mark.parametrize(
    "n, max_tokens", [(100, 20), (100, 900), (590, 900), (2000, 9), (2000, 900)]
)
def test_a_long_answer_of_a_policy_that_evicts_in_blocks_takes_no_more_than_was_planned(
    n, max_tokens
):
    """If the prompt is shorter than the budget, the answer's entries come on top until they fill the budget."""
    model = make_llama()
    planner = Planner(model, max_tokens=max_tokens)
    config = CompressionConfig(setting_named("keydiff:budget=600,block=64"))
    _, most = planner.memory_and_peak(n, config)
    cache = make_prompt_cache(model)
    options = {"policy": config.setting, "max_tokens": max_tokens, "prompt_cache": cache}
    held = [
        count_bytes([(layer.keys, layer.values) for layer in cache])
        for _ in generate_step(tokens_of(n), model, **options)
    ]
    assert max(held) <= most <= 2 * max(held)


@pytest.mark.parametrize("step", [64, 512])
def test_a_quantised_store_takes_no_more_than_was_planned(step):
    """The peak of the prompt and of the answer, whose tokens dequantise the keys of all layers."""
    model, n = make_llama(head_dim=64, num_hidden_layers=8), 1200
    sparse = "budget=10%,store=8bit"
    plan = plan_memory(model, n, sparse=sparse, max_tokens=4, prefill_step_size=step)
    options = {"sparse": sparse, "max_tokens": 4, "prefill_step_size": step}
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in generate_step(tokens_of(n), model, **options):
        pass
    assert mx.get_peak_memory() - before <= plan.peak - plan.weights


def tokens_of(n):
    return mx.random.randint(1, 60, (n,), key=mx.random.key(0))


@pytest.fixture(scope="module")
def planners(demo_llama, demo_qwen):
    return [Planner(model, prefill_step_size=512) for model in (demo_llama[0], demo_qwen[0])]


def parts(plan):
    return np.array([plan.kv, plan.reading, plan.answering])


@settings(max_examples=25)
@given(st.integers(1, 200_000), st.integers(1, 5000), st.sampled_from([None, KEYDIFF, SNAPKV]))
def test_a_longer_prompt_takes_no_less_and_fewer_bits_no_more(planners, n, more, policy):
    for planner in planners:
        plain, eight, four = (planner.plan(n, policy, bits) for bits in (None, 8, 4))
        assert (parts(plain) >= parts(eight)).all() and (parts(eight) >= parts(four)).all()
        for policy, short, bits, n_parts in (
            (None, n, None, 3),
            (None, n + 5000, 8, 3),  # mlx-lm quantises from 5,000 tokens on
            (KEYDIFF, n + 256, 8, 2),
        ):
            one, longer = (planner.plan(x, policy, bits) for x in (short, short + more))
            assert (parts(one) <= parts(longer))[:n_parts].all()


def test_a_gpus_fused_kernel_stores_no_scores(demo_llama, monkeypatch):
    """Only head sizes 64, 80 and 128 have a fused kernel. Other heads are planned as on a CPU."""
    n, cpu = 65_537, plan_memory(demo_llama[0], 65_537)
    monkeypatch.setattr(scores, "on_gpu", lambda: True)
    stored = 4 * 2048 * n * 4
    assert cpu.reading - plan_memory(demo_llama[0], n).reading == stored
    assert plan_memory(make_llama(hidden_size=128, num_hidden_layers=3), n).reading > stored


def test_a_plan_computes_nothing_and_takes_less_than_a_second(demo_llama):
    mx.clear_cache()
    mx.reset_peak_memory()
    before, started = mx.get_active_memory(), time.process_time()
    model = without_weights(MODELS["demo"])
    planner = Planner(model)
    plans = [planner.plan(n, policy) for n in PLANNED_CONTEXTS for policy in POLICIES]
    assert time.process_time() - started < 1
    assert mx.get_peak_memory() - before < 500_000 < plans[0].weights
    model.set_dtype(mx.float32)
    assert plan_memory(model, 131_072, KEYDIFF) == plan_memory(demo_llama[0], 131_072, KEYDIFF)


@pytest.mark.parametrize(
    "name, n, options, words",
    [
        ("demo", 0, {}, "at least 1 token, got 0"),
        ("demo", 1000, {"kv_bits": 5}, "kv_bits must be 2, 3, 4, 6, 8, got 5"),
        ("deepseek_v32", 1000, {"policy": KEYDIFF}, "can't be compressed"),
        ("demo", 1000, {"policy": Sparse(), "snapkv": "top_k=9"}, "give only one of them"),
    ],
)
def test_impossible_plans_are_refused(name, n, options, words):
    refused = REFUSED_CONFIGS.get(name)
    model = make_model(name, refused) if refused else without_weights(MODELS[name])
    assert plan_memory(model, 1000).peak > plan_memory(model, 1000).weights
    with pytest.raises(SnapKVError, match=words):
        plan_memory(model, n, **options)


def test_prompts_that_are_not_compressed_are_planned_in_full(demo_llama):
    """One prompt is a single token. For the other, the policy would keep no entry."""
    plan = plan_memory(demo_llama[0], 1, SNAPKV)
    assert plan.reason and plan.kv == 3 * 2 * 2 * 64 * 4
    short = plan_memory(demo_llama[0], 1000, "snapkv:budget=0.01%")
    assert short.peak == plan_memory(demo_llama[0], 1000).peak


def test_a_prompt_that_will_not_fit_is_refused_with_a_policy_that_fits(demo_llama, monkeypatch):
    def refusal(n, usable, limit=None, **options):
        monkeypatch.setattr(long_prompts, "this_machine", lambda: Machine(usable, usable))
        prompts = LongPrompts(demo_llama[0], **options)
        try:
            prompts.require_memory(n, max_kv_bytes=limit)
        except SnapKVError as error:
            return str(error)
        return None

    model, n = demo_llama[0], 65_536
    said = refusal(n, 10**9)
    peak = format_bytes(plan_memory(model, n).peak)
    assert said.startswith(f"65536 tokens will take about {peak}") and "has 1 GB for models" in said
    assert said.endswith(" and max_kv_bytes=0 reads them anyway")
    policy = shlex.split(said.partition("--policy ")[2])[0]
    assert plan_memory(model, n, policy).peak < 10**9
    assert refusal(4096, 10**9) is None
    assert "no policy makes them fit" in refusal(n, 10**6)
    assert refusal(n, 10**6, limit=0) is None
    assert refusal(n, 10**6, max_kv_size=64) is None
    assert "max_kv_bytes is 100 MB: raise it" in refusal(n, 10**12, limit=10**8)
    assert refusal(n, 10**6, limit=10**9) is None


@pytest.mark.parametrize("options, n", [({}, 30_000), ({"policy": SnapKV(budget=64)}, 100)])
def test_tokens_read_before_count_unless_a_policy_evicts(demo_llama, monkeypatch, options, n):
    monkeypatch.setattr(long_prompts, "this_machine", lambda: Machine(2**31, 2**31))
    prompts = LongPrompts(demo_llama[0], **options)
    prompts.require_memory(n)
    if options:
        prompts.require_memory(n, 10**6)
    else:
        with pytest.raises(SnapKVError, match=r"^1030000 tokens will take"):
            prompts.require_memory(n, 10**6)


def test_other_errors_of_planning_are_not_hidden(demo_llama, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(Planner, "memory_and_peak", fails)
    with pytest.raises(ZeroDivisionError):
        LongPrompts(demo_llama[0]).require_memory(1000)


def test_a_mac_may_use_two_thirds_or_three_quarters_of_its_memory():
    assert [mac(n << 30).usable >> 30 for n in (24, 64)] == [16, 48]
    assert 1 << 28 < this_machine().usable <= this_machine().memory


@pytest.mark.parametrize(
    "n, options, said",
    [
        (1000, {}, None),
        (4096, {}, "all 4,096 entries will be kept (12.6 MB); --policy auto"),
        (4096, {"policy": SnapKV(budget=512)}, "512 of 4,096 entries will be kept from the answer's token 3 on"),
        (4096, {"policy": SnapKV(budget=512)}, "KV memory 12.6 MB → 1.57 MB"),
        (4096, {"policy": SnapKV(budget=512), "kv_bits": 8}, "KV memory 12.6 MB → 442 kB"),
        (4096, {"policy": KeyDiff(budget=512)}, "KV memory 12.6 MB → 3.15 MB, room for a block of 512"),
        (300, {"policy": SnapKV(budget=512)}, "nothing will be evicted: the prompt's 300 entries fit the budget"),
        (300, {"policy": SnapKV(budget=512)}, "for example --policy snapkv:top_k=32"),
        (4096, {"policy": SnapKV(budget=512, lookahead=32)}, "from the answer's token 34 on"),
        (4096, {"policy": Sparse(budget=512, read="sparse")},
         "and a token of the answer at most 512 from the 18th on, while that is faster; all"),
        (800, {"policy": Sparse()}, "all entries will be read: the prompt's 800 entries fit the budget of 1024"),
        (1691, {"policy": Sparse(budget=50, read="sparse")}, "the prompt will be read in full, a token"),
        (4096, {"policy": Sparse(budget=512)},
         "in full, a token of the answer will read at most 512 of 4,096"),
    ],
)  # fmt: skip
def test_kept_entries_are_announced_before_the_prompt_is_read(demo_llama, n, options, said):
    told = LongPrompts(demo_llama[0], **options).kept_text(n)
    assert told is said is None or said in told
