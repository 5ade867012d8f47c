"""The benchmark on small models: counts and bytes, but not speed."""

import pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from model_configs import make_model

from mlx_snapkv import SnapKVCache, Sparse
from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.measure.contenders import contenders, decoding_cache
from mlx_snapkv.measure.speed import (
    N_IN_TURN,
    measure_decoding,
    measure_speed,
    speed_table,
    time_steps_in_turn,
)
from mlx_snapkv.planning.settings import resolve_compress
from mlx_snapkv.sparse.cache import SparseKVCache
from mlx_snapkv.sparse.clusters import CLUSTER_SIZE

ENTRY = 2 * 4 * 2 * 32 * 4  # bytes: keys and values * layers * KV heads * head size * float32
SIXTEENTH = resolve_compress(policy="snapkv:budget=6.25%,on_full=slide")
BLOCKS = resolve_compress(policy="keydiff:budget=512,block=256")
SPARSE = Sparse(budget="6.25%")


@pytest.fixture(scope="module")
def model():
    return make_model("llama", {"head_dim": 32})


def names(found):
    return [contender.name for contender in found]


def test_a_policy_that_evicts_nothing_is_not_measured(model):
    gated = resolve_compress(policy="snapkv:top_k=20,n_window=64,min_ctx=1001")
    wide = resolve_compress(policy="keydiff:budget=2048")
    found = names(contenders(model, 1000, [gated, wide, SIXTEENTH, SPARSE]))
    ours = [str(SIXTEENTH), str(SPARSE)]
    assert found == ["full cache", "--max-kv-size 62", "--kv-bits 8", "--kv-bits 4", *ours]
    assert names(contenders(model, 1000, [wide])) == ["full cache", "--kv-bits 8", "--kv-bits 4"]


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_only_full_attention_layers_are_filled(name):
    model = make_model(name)
    for contender in contenders(model, 1024, [SIXTEENTH, SPARSE]):
        cache, plain = decoding_cache(model, contender, 1024), make_prompt_cache(model)
        layers = attention_layers(model, plain)
        for layer in layers:
            kind = type(layer.cache_in(plain))
            if contender.policy:
                kind = SparseKVCache if contender.policy is SPARSE else SnapKVCache
            elif contender.bits or contender.rotates:
                kind = QuantizedKVCache if contender.bits else RotatingKVCache
            assert type(layer.cache_in(cache)) is kind
        others = set(range(len(plain))) - {layer.index for layer in layers}
        assert all(type(cache[i]) is type(plain[i]) for i in others)


def test_a_cache_that_mlx_lm_cannot_decode_from_is_not_measured():
    found = measure_decoding(make_model("gpt_oss", {"head_dim": 32}), 1024, [SIXTEENTH, SPARSE], 1)
    # Quantised entries don't take attention sinks.
    ours = [str(SIXTEENTH), str(SPARSE)]
    assert names(c for c, _ in found) == ["full cache", "--max-kv-size 64", *ours]


def test_a_turn_has_one_unmeasured_step(model):
    read = []

    def counting(token, cache):
        read.append(cache)
        return model(token, cache=cache)

    caches = [make_prompt_cache(model), make_prompt_cache(model)]
    times = time_steps_in_turn(counting, caches, N_IN_TURN + 2)
    assert [len(seconds) for seconds in times] == [N_IN_TURN + 2] * 2
    first, second = caches
    turns = [(first, N_IN_TURN), (second, N_IN_TURN), (second, 2), (first, 2)]
    assert [id(cache) for cache in read] == [id(c) for c, n in turns for _ in range(1 + n)]
    assert all(layer_cache.offset == 0 for cache in caches for layer_cache in cache)


@pytest.fixture(scope="module")
def speed(model):
    """Run a small benchmark, check its progress reports, and return its rows."""
    started, saved = {}, []
    rows = measure_speed(
        model,
        [SIXTEENTH, SPARSE, BLOCKS],
        contexts=[1024, 1100],
        prompts=[1024, 1200],
        trials=1,
        steps=2,
        on_start=started.__setitem__,
        on_rows=lambda so_far: saved.append(len(so_far)),
    )
    assert started == {"decoding": 2, "reading": 2}
    assert saved == sorted(saved) and len(saved) == 4 and saved[-1] == len(rows)
    return rows


def test_rows_have_the_bytes_of_the_arrays(speed):
    rows = {(row["context"], row["contender"]): row for row in speed}
    full, ours = rows[1024, "full cache"], rows[1024, str(SIXTEENTH)]
    assert full["kv_bytes"] == 1024 * ENTRY
    assert ours["kv_bytes"] == rows[1024, "--max-kv-size 64"]["kv_bytes"] == 64 * ENTRY
    assert rows[1024, "--kv-bits 4"]["kv_bytes"] < full["kv_bytes"] / 5
    index_and_means = rows[1024, str(SPARSE)]["kv_bytes"] - full["kv_bytes"] - ours["kv_bytes"]
    n_means = 1024 // CLUSTER_SIZE
    # The tokens that were decoded while measuring are counted, too.
    n_decoded = 2 * 6
    assert n_means * ENTRY <= index_and_means <= (n_decoded + n_means) * ENTRY
    assert all(row["step_seconds"] > 0 for row in speed if row["context"] < 1200)
    assert full["peak_bytes"] > 1024 * ENTRY and ours["read_seconds"] > 0


def test_prefill_is_measured_for_the_full_cache_and_all_policies(speed):
    read = [row["contender"] for row in speed if row["context"] == 1024 and "read_seconds" in row]
    assert read == ["full cache", str(SIXTEENTH), str(SPARSE), str(BLOCKS)]
    assert not any("read_seconds" in row for row in speed if row["context"] == 1100)


def test_the_table_has_ratios_to_the_full_cache(speed):
    table = speed_table(speed)
    rows = {(row[0], row[1]): row for row in table.rows}
    assert rows["1,024", "full cache"][3].endswith(", 1.00x")
    assert rows["1,024", "full cache"][5].endswith(" s, 1.00x")
    step = [row["step_seconds"] for row in speed if row["context"] == 1024]
    assert rows["1,024", "--kv-bits 4"][3] == f"{1 / step[3]:.1f}, {step[0] / step[3]:.2f}x"
    assert rows["1,100", "full cache"][5:] == ["", ""]
    assert rows["1,200", str(BLOCKS)][3] == "" and "x" in rows["1,200", str(BLOCKS)][5]
