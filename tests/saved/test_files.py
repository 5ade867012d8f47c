"""Prompt caches in files: saved prompts are continued, and unusable files are rejected in one sentence."""

import random

import mlx.core as mx
import pytest
from disk_helpers import full_disk
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache, save_prompt_cache
from model_configs import make_model
from request_helpers import assert_same, plain, steps
from saved_helpers import KEYDIFF, SNAPKV, question, read, saved_file, spec
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError, saved
from mlx_snapkv.saved import files

pytestmark = pytest.mark.usefixtures("short_blocks")

# A policy for each kind of cache state: queries that wait to be counted or to vote, a ring that has turned, ...
KINDS = [
    f"{SNAPKV},on_full=slide",
    spec("h2o", "block"),
    TOVA := spec("tova", "block"),
    spec("expected_attention", "block"),
    "keydiff:budget=40,schedule=once,n_window=8",
    f"{KEYDIFF} then snapkv:budget=24,n_sink=2,n_window=8,obs_window=8",
]


@pytest.mark.parametrize("policy", [None, *KINDS])
def test_a_loaded_prompt_continues_as_the_saved_one_with_and_without_an_answer(
    path, tokens, policy
):
    model, fed = (make_llama if policy in KINDS[::2] else make_qwen)(), len(tokens)
    if policy == TOVA:
        model = make_model("plamo")  # query heads are tiled over KV heads
    cache = read(model, tokens, policy)
    for seed in (3, 4):
        saved.save(path, model, cache, [0] * fed, policy or "none", {"text": "ünï"})
        loaded = saved.load(path, model)
        assert loaded.tokens == [0] * fed
        assert loaded.policy == (policy or "none") and loaded.notes == {"text": "ünï"}
        caches = loaded.prompt_cache, cache
        assert_same(*(steps(model, question(seed=seed), n=8, prompt_cache=c) for c in caches))
        fed += len(question()) + 8
    assert saved.load(path, model).tokens == [0] * (fed - 17)  # answering did not change the file


def test_mlx_lms_files_load(path, tokens):
    model = make_llama(hidden_size=128)
    cache = [c.to_quantized(group_size=32, bits=8) for c in read(model, tokens, None)]
    save_prompt_cache(str(path), cache, {"model": "mine"})
    loaded = saved.load(path, model)
    assert (loaded.tokens, loaded.policy, loaded.notes) == (None, "none", {"model": "mine"})
    caches = loaded.prompt_cache, cache
    assert_same(*(plain(model, question(), prompt_cache=c) for c in caches))


def test_a_fingerprint_tells_weights_and_configurations_apart():
    mine = files.fingerprint(make_llama())
    assert files.fingerprint(make_llama()) == mine
    trained = make_llama()
    trained.model.norm.weight = trained.model.norm.weight * 1.001
    half = make_llama()
    half.set_dtype(mx.bfloat16)
    others = [make_llama(seed=1), trained, half, make_llama(rope_theta=5e5), make_qwen()]
    assert len({mine, *map(files.fingerprint, others)}) == 6


def test_a_path_that_can_not_be_written_is_refused(tmp_path):
    for name in ("book.bin", "none/book.safetensors", "a\0b.safetensors", "."):
        with pytest.raises(SnapKVError):
            saved.require_writable(tmp_path / name)


def test_a_failure_leaves_the_old_file_and_no_other(path, tokens):
    model = make_llama()
    before = saved_file(path, model, tokens).read_bytes()
    cache = read(model, tokens, KEYDIFF)
    with pytest.raises(SnapKVError, match="hold 200 tokens, the prompt has 3"):
        saved.save(path, model, cache, [1, 2, 3])
    with full_disk(len(before) // 2), pytest.raises(SnapKVError) as error:
        saved.save(path, model, cache, tokens)
    assert str(error.value) == f"{path} can't be written: File too large"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def damaged(data):
    """Yield the data with every kind of damage, and data in other formats."""
    head = 8 + int.from_bytes(data[:8], "little")
    for length in (0, 5, 8, 9, head // 2, head - 1, head, head + 1, len(data) // 2, len(data) - 1):
        yield data[:length]
    yield data + b"\0"
    in_head = random.Random(0).sample(range(10, head - 8), 18)
    for place in [0, 1, 5, 7, 8, 9, *in_head, head, (head + len(data)) // 2, len(data) - 1]:
        yield data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    yield from (b"hello", b"\0" * 4096, b"{}", b"PK" * 999, (2).to_bytes(8, "little") + b"{}")


def foreign_caches(model, tokens):
    """Yield caches that mlx-lm would save but that do not fit this model."""
    good = read(model, tokens, None)
    yield good[:1]
    yield [*good, good[0]]
    yield make_prompt_cache(model)
    yield [CacheList(good[0]), good[1]]
    for other in (make_qwen(), make_llama(num_key_value_heads=4), make_llama(head_dim=16)):
        yield read(other, tokens, None)
    half = make_llama()
    half.set_dtype(mx.bfloat16)
    yield read(half, tokens, None)
    yield [good[0], read(model, tokens[:50], None)[0]]
    keys, values = good[0].keys, good[0].values
    states = [(keys, values, 10_000), (keys, values, 1.5), (keys, values[:, :, :100], 200)]
    for state in [*states, (keys, None, 200), ("keys", "values", 200)]:
        yield [KVCache.from_state(state), good[1]]
    for policy, wrong in (
        (f"{SNAPKV},on_full=slide", {"_n_entries": 0, "_pinned_positions": mx.zeros(3)}),
        (KEYDIFF, {"_n_entries": 10_000, "offset": 1.5, "_kept_positions": mx.zeros(3)}),
    ):
        compressed = read(model, tokens, policy)
        for name, value in wrong.items():
            broken = type(compressed[0]).from_state(compressed[0].state)
            setattr(broken, name, value)
            yield [broken, compressed[1]]


def test_damaged_and_foreign_files_are_refused_in_one_sentence(path, tokens):
    model = make_llama()

    def refused(asked=model):
        with pytest.raises(SnapKVError) as error:
            saved.load(path, asked)
        assert str(path) in str(error.value) and "\n" not in str(error.value)

    data = saved_file(path, model, tokens).read_bytes()
    for other in (make_llama(seed=1), make_qwen(), make_llama(num_hidden_layers=3)):
        refused(other)
    for content in damaged(data):
        path.write_bytes(content)
        refused()
    for name, metadata in (("a", {"x": "y"}), ("0.0", {"1.0": "KVCache", "2.0": ""})):
        mx.save_safetensors(str(path), {name: mx.zeros(3)}, metadata)
        refused()
    for cache in foreign_caches(model, tokens):
        save_prompt_cache(str(path), cache)
        refused()
    path.write_bytes(data)
    assert saved.load(path, model).tokens == tokens.tolist()


def test_another_format_is_refused(path, tokens, monkeypatch):
    model = make_llama()
    saved_file(path, model, tokens)
    written = files.FORMAT
    monkeypatch.setattr(files, "FORMAT", written + 1)
    why = f"has format {written}, but this version reads format {written + 1}: save the prompt"
    with pytest.raises(SnapKVError, match=why):
        saved.load(path, model)
