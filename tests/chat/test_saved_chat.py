import sys

import mlx.core as mx
import pytest
from chat_helpers import SMALL, all_right, ask, begun, is_answered
from mlx_lm import cache_prompt, load
from mlx_lm.models.cache import RotatingKVCache, save_prompt_cache
from saved_helpers import read

from mlx_snapkv import Conversation, SnapKV, SnapKVError, prefill, saved
from mlx_snapkv.demo import MODELS

BITS = {"kv_bits": 8, "kv_group_size": 32}
WAYS = [
    (None, BITS | {"quantized_kv_start": 0}),
    (SMALL, BITS),
    (SMALL + ",min_ctx=500", {}),  # compressed in a later turn, or never
    ("h2o:budget=64,block=32", {}),
    ("keydiff:budget=96,block=32 then snapkv:budget=64,n_sink=4,n_window=32", BITS),
]


@pytest.mark.parametrize(
    ("demo_model", "policy", "bits"),
    [*(("demo_llama", *way) for way in WAYS), ("demo_qwen", *WAYS[1])],
    indirect=["demo_model"],
)
def test_a_loaded_conversation_continues_as_the_saved_one(demo_model, haystack, policy, bits, path):
    conversation = begun(demo_model, haystack, 1, policy=policy, **bits)
    conversation.save(path)
    loaded = Conversation.load(path, *demo_model, max_tokens=12, **bits)
    assert loaded.policy == conversation.policy
    assert loaded.messages == conversation.messages
    for fact in haystack[1][1:]:
        assert ask(loaded, fact.question) == ask(conversation, fact.question)
    assert loaded.messages == conversation.messages
    if SMALL in str(policy):  # an answer may also end before its compression
        answer = conversation.send(haystack[1][1].question)
        next(answer), next(answer)
        answer.close()
        conversation.save(path)
        loaded = Conversation.load(path, *demo_model, max_tokens=12, **bits)
        assert ask(loaded, haystack[1][2].question) == ask(conversation, haystack[1][2].question)


def test_loaded_entries_get_the_requested_bits_with_the_next_turn(demo_llama, haystack, path):
    begun(demo_llama, haystack, 1, policy=SMALL, **BITS).save(path)
    loaded = Conversation.load(path, *demo_llama, max_tokens=12, kv_bits=4, kv_group_size=32)
    assert {cache.bits for cache in loaded.prompt_cache} == {8}
    ask(loaded, haystack[1][1].question)
    assert {cache.bits for cache in loaded.prompt_cache} == {4}


@pytest.mark.parametrize("policy", [SMALL, "keydiff:budget=64,block=32"])
def test_without_requested_bits_loaded_entries_keep_theirs(demo_llama, haystack, policy, path):
    begun(demo_llama, haystack, 1, policy=policy, **BITS).save(path)
    loaded = Conversation.load(path, *demo_llama, max_tokens=12)
    ask(loaded, haystack[1][1].question)
    assert {cache.quantization.bits for cache in loaded.prompt_cache} == {8}


def test_an_empty_conversation_is_not_saved_and_another_file_is_not_loaded(
    path, tokens, demo_llama
):
    with pytest.raises(SnapKVError, match="nothing to save"):
        Conversation(*demo_llama).save(path)
    assert not path.exists()
    saved.save(path, demo_llama[0], read(demo_llama[0], tokens, None), tokens)
    with pytest.raises(SnapKVError, match="neither a conversation nor a text"):
        Conversation.load(path, *demo_llama)


@pytest.mark.parametrize("policy", [SMALL, SnapKV.from_keyword(SMALL.partition(":")[2])], ids=type)
def test_a_policy_applies_only_to_a_saved_conversation_without_one(
    demo_llama, haystack, path, policy
):
    conversation = begun(demo_llama, haystack, 1, system="Be brief.")
    conversation.attach("another text")
    conversation.save(path)
    loaded = Conversation.load(path, *demo_llama, policy=policy, max_tokens=12)
    for name in (
        "messages",
        "user_inputs",
        "attached",
        "pending_tokens",
        "read",
        "system",
        "n_unknown",
    ):
        assert getattr(loaded, name) == getattr(conversation, name)
    assert is_answered(loaded, haystack[1][1]) and loaded.report.entries == 64
    loaded.save(path)
    again = Conversation.load(path, *demo_llama, policy="keydiff:budget=9")
    assert again.policy == loaded.policy


# Prompts saved by mlx-lm's own cache_prompt.


@pytest.fixture(scope="module")
def loaded_llama():
    """Return the built-in LLaMA in float16, as loaded by mlx-lm."""
    return load(str(MODELS["demo"]))


@pytest.fixture(scope="module")
def read_by_mlx_lm(tmp_path_factory, loaded_llama, haystack):
    """Return a file with the document's quantised cache, as saved by mlx-lm."""
    path = tmp_path_factory.mktemp("mlx_lm") / "prompt.safetensors"
    options = ["--model", str(MODELS["demo"]), "--prompt-cache-file", str(path)]
    options += ["--prompt", haystack[0] + "\n\n", "--kv-bits", "8", "--kv-group-size", "32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mlx_lm.cache_prompt", *options])
        cache_prompt.main()
    return path


@pytest.mark.parametrize("policy", [SMALL, None])
def test_turns_continue_from_entries_saved_by_mlx_lm(
    loaded_llama, read_by_mlx_lm, haystack, policy, path
):
    ways = {"policy": policy, "max_tokens": 12}
    chat = Conversation.load(read_by_mlx_lm, *loaded_llama, **ways)
    right = all_right(chat, haystack[1][:2])
    assert chat.report.entries == (64 if policy else 0)
    assert right[0] and (right[1] or policy == SMALL)
    chat.save(path)
    loaded = Conversation.load(path, *loaded_llama, max_tokens=12)
    assert loaded.n_unknown == chat.n_unknown > 300
    assert ask(loaded, haystack[1][2].question) == ask(chat, haystack[1][2].question)


def test_a_rotating_cache_has_no_entries_to_choose_among(loaded_llama, path):
    model, _ = loaded_llama
    cache = [RotatingKVCache(max_size=64) for _ in model.layers]
    model(mx.arange(100)[None], cache=cache)
    save_prompt_cache(str(path), cache)
    words = "RotatingKVCache has no entries that a policy can choose"
    with pytest.raises(SnapKVError, match=words):
        Conversation.load(path, *loaded_llama, policy=SMALL)
    assert ask(Conversation.load(path, *loaded_llama, max_tokens=4), "What is it?")


def test_a_compressed_prompt_saved_without_its_policy_needs_one(loaded_llama, path):
    save_prompt_cache(str(path), prefill(loaded_llama[0], list(range(5, 205)), SMALL)[0])
    with pytest.raises(SnapKVError, match="needs a policy to continue"):
        Conversation.load(path, *loaded_llama)
    with pytest.raises(SnapKVError, match="evicted entries are gone: drop sparse"):
        Conversation.load(path, *loaded_llama, sparse=True)
    assert ask(Conversation.load(path, *loaded_llama, policy=SMALL, max_tokens=4), "What?")
