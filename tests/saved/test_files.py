"""Prompt caches in files: what was read once goes on as if nothing had happened."""

import subprocess
import sys

import mlx.core as mx
import pytest
from disk_helpers import full_disk
from mlx_lm import load
from mlx_lm.models.cache import save_prompt_cache
from model_configs import make_model
from request_helpers import assert_same, plain, steps
from saved_helpers import KEYDIFF, SNAPKV, question, read, saved_file, spec
from tiny_models import make_llama, make_qwen

from mlx_snapkv import SnapKVError, saved
from mlx_snapkv.demo import MODELS
from mlx_snapkv.saved.files import fingerprint

# One of each state that a cache has: queries that wait to be counted or to vote, a ring that has turned, and so on.
KINDS = [
    f"{SNAPKV},on_full=keydiff",
    spec("h2o", "block"),
    TOVA := spec("tova", "block"),
    spec("expected_attention", "block"),
    "keydiff:budget=pyramid:40,schedule=once,n_window=8",
    f"{KEYDIFF} then snapkv:budget=24,n_sink=2,n_window=8,obs_window=8",
]


@pytest.mark.parametrize("policy", [None, *KINDS])
def test_a_prompt_goes_on_as_the_one_saved_from_its_start_and_from_the_middle(path, tokens, policy):
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
        assert_same(*(steps(model, question(seed=seed), n=20, prompt_cache=c) for c in caches))
        fed += len(question()) + 20
    assert saved.load(path, model).tokens == [0] * (fed - 29)  # answering did not change the file


def test_mlx_lms_files_load(path, tokens):
    model = make_llama(hidden_size=128)
    cache = [c.to_quantized(group_size=32, bits=8) for c in read(model, tokens, None)]
    save_prompt_cache(str(path), cache, {"model": "mine"})
    loaded = saved.load(path, model)
    assert (loaded.tokens, loaded.policy, loaded.notes) == (None, "none", {"model": "mine"})
    caches = loaded.prompt_cache, cache
    assert_same(*(plain(model, question(), prompt_cache=c) for c in caches))


def test_a_fingerprint_tells_weights_and_configurations_apart_in_any_process():
    program = (
        "import sys, mlx_lm; from mlx_snapkv.saved.files import fingerprint; "
        "print(fingerprint(mlx_lm.load(sys.argv[1])[0]))"
    )
    command = [sys.executable, "-c", program, str(MODELS["demo"])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == fingerprint(load(str(MODELS["demo"]))[0]), done.stderr
    mine = fingerprint(make_llama())
    assert fingerprint(make_llama()) == mine
    trained = make_llama()
    trained.model.norm.weight = trained.model.norm.weight * 1.001
    half = make_llama()
    half.set_dtype(mx.bfloat16)
    others = [make_llama(seed=1), trained, half, make_llama(rope_theta=5e5), make_qwen()]
    assert len({mine, *map(fingerprint, others)}) == 6


def test_a_place_that_can_not_be_written_is_told(tmp_path):
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
