"""Quantised rows with every policy and schedule: the budget holds, the answer is near, files go on exactly."""

import json
import sys

import fork_helpers
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from request_helpers import assert_same, assert_unpatched, is_quantised, steps
from saved_helpers import CONTINUE, KEYDIFF, SNAPKV, SPECS, question, spec
from tiny_models import make_llama

from mlx_snapkv import BlockKVCache, SnapKVCache, saved
from mlx_snapkv.entries.quantization import Quantised, Quantization
from mlx_snapkv.policies.snapkv import ON_FULL

BITS = [8, 4]
CASES = [*SPECS, *(f"{SNAPKV},on_full={way}" for way in ON_FULL if way != "reselect")]


@pytest.fixture(scope="module")
def model():
    return make_llama(head_dim=32)


def said(model, tokens, policy, bits, n=40):
    """The caches after an answer of fixed tokens, the log-probabilities of each, and the report."""
    cache, reports, answer = make_prompt_cache(model), [], iter(range(n + 1))
    items = steps(
        model,
        tokens,
        n,
        policy=policy,
        prompt_cache=cache,
        on_report=reports.append,
        sampler=lambda logprobs: mx.array([next(answer) % 64]),
        **({} if bits is None else {"kv_bits": bits, "kv_group_size": 32}),
    )
    assert_unpatched()
    return cache, mx.stack([logprobs for _, logprobs in items]), reports[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("policy", CASES)
def test_every_cache_is_quantised_and_within_its_bound(model, tokens, policy, bits):
    cache, _, report = said(model, tokens, policy, bits)
    plain, _, unquantised = said(model, tokens, policy, None)
    assert report.entries_kept == unquantised.entries_kept
    for mine, theirs in zip(cache, plain, strict=True):
        assert is_quantised(mine) and (mine.bits, mine.group_size) == (bits, 32)
        assert mine.offset == theirs.offset and mine.size() == theirs.size()
        if isinstance(mine, BlockKVCache) and "on_full=grow" not in policy:
            assert mine.size() <= mine.capacity == mine.quota.entries + mine.block
        assert mine.nbytes < theirs.nbytes
    assert report.kv_bytes_after < unquantised.kv_bytes_after
    assert report.kv_bytes_before == unquantised.kv_bytes_before


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("policy", CASES)
def test_it_is_the_plain_run_with_rounded_rows(model, tokens, policy, bits, monkeypatch):
    """mlx-lm's quantised attention on packed rows against its plain attention on the same rows, unpacked."""
    cache, near, _ = said(model, tokens, policy, bits)
    pack, unpack = Quantization.pack, Quantization.unpack
    monkeypatch.setattr(Quantization, "pack", lambda self, rows: unpack(self, pack(self, rows)))
    monkeypatch.setattr(Quantization, "unpack", lambda self, rows: rows)
    monkeypatch.delattr(Quantised, "bits")  # which mlx-lm's attention asks for
    rounded, exact, _ = said(model, tokens, policy, bits)
    for one, other in zip(cache, rounded, strict=True):
        assert mx.array_equal(one.positions, other.positions)
    # A value near the middle of two steps may be rounded either way by the two orders of summing up.
    assert mx.abs(near - exact).max() < 0.01


@pytest.mark.parametrize("policy", CASES)
def test_the_answer_with_8_bits_is_near_the_unquantised_one(demo_llama, ask, policy):
    """As a rule: where an eviction chose another row, a token's distribution may well be another."""
    model, tokenizer = demo_llama
    prompt, _ = ask(tokenizer, 200, 3)
    near, exact = (said(model, mx.array(prompt), policy, bits, n=20)[1] for bits in (8, None))
    distances = (mx.exp(exact) * (exact - near)).sum(axis=-1)
    assert mx.sort(distances)[10] < 0.05


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("policy", CASES)
def test_saved_and_loaded_in_the_middle_of_an_answer(path, model, tokens, policy, bits):
    cache, _, _ = said(model, tokens, policy, bits, n=7)
    saved.save(path, model, cache, [0] * cache[0].offset)
    loaded = saved.load(path, model).prompt_cache
    for one, other in zip(loaded, cache, strict=True):
        assert type(one) is type(other) and one.bits == bits
        assert mx.array_equal(one.positions, other.positions)
    assert_same(
        steps(model, question(3), n=60, prompt_cache=loaded),
        steps(model, question(3), n=60, prompt_cache=cache),
    )
    for one, other in zip(loaded, cache, strict=True):
        assert is_quantised(one) and mx.array_equal(one.positions, other.positions)


@pytest.mark.parametrize("bits", BITS)
def test_a_new_process_gives_the_same_answers(tmp_path, demo_llama, demo_qwen, ask, bits):
    work, answers = [], []
    models = {"demo": demo_llama, "demo-qwen3-next": demo_qwen}
    for name, (model, tokenizer) in models.items():
        prompt, _ = ask(tokenizer, 120, 0)
        rest, files = prompt[-9:], []
        for n, policy in enumerate([KEYDIFF, spec("h2o", "block"), SNAPKV]):
            cache = make_prompt_cache(model)
            steps(model, mx.array(prompt), 4, policy=policy, prompt_cache=cache, kv_bits=bits)
            offset = next(c.offset for c in cache if isinstance(c, (SnapKVCache, BlockKVCache)))
            files.append(str(tmp_path / f"{name}{n}.safetensors"))
            saved.save(files[-1], model, cache, [0] * offset)
            answers.append([t for t, _ in steps(model, mx.array(rest), prompt_cache=cache)])
        work.append([name, rest, files])
    done = fork_helpers.run(
        [sys.executable, "-c", CONTINUE, json.dumps(work)], capture_output=True, text=True
    )
    assert json.loads(done.stdout) == answers, done.stderr
