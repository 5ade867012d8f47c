"""The default size of a server's prefix cache, and the planned size of a prefix."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import make_llama, make_qwen

from mlx_snapkv import KeyDiff, SnapKV, Sparse, prefill
from mlx_snapkv.caches.layers import file_bytes, memory_bytes
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.planning import prefixes
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.entry_sizes import EntrySizes
from mlx_snapkv.planning.footprint import Footprint
from mlx_snapkv.planning.machine import mac
from mlx_snapkv.planning.prefixes import PrefixCacheSize, prefix_cache_size

GB = 10**9
SNAPKV = SnapKV(budget=200, n_sink=4, n_window=32, obs_window=32, lookahead=0)


@pytest.fixture
def of_8b():
    """Return a model with few weights and the cache of an 8B model: 131,072 bytes per token in half precision."""
    model = make_llama(
        num_hidden_layers=32,
        num_key_value_heads=8,
        num_attention_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
    )
    model.set_dtype(mx.float16)
    return model


def test_a_prompt_of_an_8bs_context_fits_where_the_memory_allows(of_8b):
    room = prefix_cache_size(of_8b, {}, mac(64 << 30))
    assert room.context == 131_072 and room.prompt_bytes == pytest.approx(131_072**2, rel=0.01)
    assert room.limit == room.prompt_bytes and " hold 1 prompt of 131,072 tokens" in str(room)
    half = mac(24 << 30).usable / 2
    small = prefix_cache_size(of_8b, {}, mac(24 << 30))
    assert 0.9 * half < small.limit < half
    assert "hold no prompt of 131,072 tokens, which takes 17.2 GB, but one of 6" in str(small)
    in_8_bits = prefix_cache_size(of_8b, {"policy": Sparse(store="8bit")}, mac(32 << 30))
    assert in_8_bits.prompt_bytes < room.prompt_bytes * 0.67
    assert " hold 1 prompt of" in str(in_8_bits)


def test_a_given_limit_is_used_and_other_limits_hold(of_8b):
    machine = mac(64 << 30)
    assert prefix_cache_size(of_8b, {}, machine, user_limit=5 * GB).limit == 5 * GB
    assert prefix_cache_size(of_8b, {}, machine, max_kv_bytes=GB).limit == GB
    short = prefix_cache_size(of_8b, {}, machine, max_context=4096)
    assert (short.limit, short.context) == (4 * GB, 4096)
    assert str(short) == "prefix cache: 4 GB hold 7 prompts of 4,096 tokens"


def test_entries_in_files_take_at_most_half_of_the_free_disk(of_8b, monkeypatch):
    options = {"policy": Sparse(store="file")}
    disk = type("Disk", (), {"free": 30 * GB})
    monkeypatch.setattr(prefixes.shutil, "disk_usage", lambda folder: disk)
    assert prefix_cache_size(of_8b, options, mac(8 << 30)).limit == 15 * GB
    disk.free = 100 * GB
    found = prefix_cache_size(of_8b, options, mac(8 << 30))
    assert found.limit == max(20 * GB, found.prompt_bytes)


@pytest.mark.parametrize("make", [make_llama, make_qwen])
@pytest.mark.parametrize(
    "config",
    [
        CompressionConfig(),
        CompressionConfig(Compress(SNAPKV)),
        CompressionConfig(Compress(KeyDiff(budget=200, block=32))),
        CompressionConfig(Sparse(budget=200, n_window=32)),
        CompressionConfig(Sparse(budget=200, n_window=32, store="file")),
    ],
    ids=["full", "once", "block", "memory", "file"],
)
def test_a_prefix_takes_the_planned_memory(make, config):
    model, tokens = make(head_dim=32), mx.random.randint(0, 64, (1000,))
    if config.setting is None or config.setting == Compress(SNAPKV):  # SnapKV compresses a copy
        cache = make_prompt_cache(model)
        mx.eval(model(tokens[None], cache=cache))
    else:
        cache, _ = prefill(model, tokens, config.setting)
    taken = memory_bytes(cache) + file_bytes(cache)
    footprint = Footprint(EntrySizes(model), config)
    assert footprint.prefix_bytes(len(tokens)) == pytest.approx(taken, rel=0.25)


def test_a_room_of_any_size_is_one_sentence():
    assert str(PrefixCacheSize(100, 50, 200)).count("hold no prompt of 50 tokens") == 1
    assert str(PrefixCacheSize(100, 50, 0)) == "prefix cache: 100 B"
