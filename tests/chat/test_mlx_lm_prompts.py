"""A conversation about a text that mlx-lm's own cache_prompt has read."""

import random
import sys

import mlx.core as mx
import pytest
from chat_helpers import SMALL, ask
from mlx_lm import cache_prompt, load
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, save_prompt_cache

from mlx_snapkv import Conversation, SnapKVError, prefill
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import is_right, make_haystack


@pytest.fixture(scope="module")
def loaded_llama():
    """(model, tokenizer) as mlx-lm loads them, in float16."""
    return load(str(MODELS["demo"]))


@pytest.fixture
def read_by_mlx_lm(tmp_path, monkeypatch, loaded_llama):
    """read(*options) -> (file, facts of its text)."""

    def read(*more):
        document, facts = make_haystack(loaded_llama[1], random.Random(5), 3, 400)
        path = tmp_path / "book.safetensors"
        options = ["--model", str(MODELS["demo"]), "--prompt-cache-file", str(path)]
        argv = ["mlx_lm.cache_prompt", *options, "--prompt", document + "\n\n", *more]
        monkeypatch.setattr(sys, "argv", argv)
        cache_prompt.main()
        return path, facts

    return read


BITS = ("--kv-bits", "8", "--kv-group-size", "32")


@pytest.mark.parametrize(
    "memory, bits", [("drop", ()), ("recall", BITS), ("recall:8bit", ()), ("recall:file", BITS)]
)
def test_every_turn_chooses_among_its_rows(loaded_llama, read_by_mlx_lm, memory, bits):
    path, facts = read_by_mlx_lm(*bits)
    chat = Conversation.load(path, *loaded_llama, policy=SMALL, memory=memory, max_tokens=12)
    right = []
    for fact in facts:
        answer = "".join(response.text for response in chat.send(fact.question))
        right.append(is_right(fact, answer))
        assert chat.report.compressed and chat.report.entries == 64
    assert right[0] and (memory == "drop" or all(right))


@pytest.mark.parametrize("bits", [(), BITS])
def test_without_a_policy_it_goes_on_in_full(loaded_llama, read_by_mlx_lm, bits):
    path, facts = read_by_mlx_lm(*bits)
    chat = Conversation.load(path, *loaded_llama, max_tokens=12)
    assert chat.n_unknown == len(chat.read) > 300
    for fact in facts:
        assert is_right(fact, "".join(response.text for response in chat.send(fact.question)))


def test_it_can_be_saved_as_a_conversation(loaded_llama, read_by_mlx_lm, tmp_path):
    path, facts = read_by_mlx_lm()
    chat = Conversation.load(path, *loaded_llama, policy=SMALL, memory="recall", max_tokens=12)
    ask(chat, facts[0].question)
    chat.save(tmp_path / "chat.safetensors")
    loaded = Conversation.load(tmp_path / "chat.safetensors", *loaded_llama, max_tokens=12)
    assert loaded.memory == "recall" and loaded.n_unknown == chat.n_unknown
    for fact in facts[1:]:
        assert ask(loaded, fact.question) == ask(chat, fact.question)


def test_a_rotating_cache_has_no_rows_to_choose_among(loaded_llama, tmp_path):
    model, tokenizer = loaded_llama
    cache = [RotatingKVCache(max_size=64) for _ in model.layers]
    model(mx.arange(100)[None], cache=cache)
    path = tmp_path / "book.safetensors"
    save_prompt_cache(str(path), cache)
    with pytest.raises(
        SnapKVError, match="RotatingKVCache has no entries that a policy can choose"
    ):
        Conversation.load(path, model, tokenizer, policy=SMALL)
    assert ask(Conversation.load(path, model, tokenizer, max_tokens=4), "What is it?")


def test_a_policy_given_is_for_files_that_have_none(loaded_llama, tmp_path):
    document, facts = make_haystack(loaded_llama[1], random.Random(5), 3, 400)
    for first in (None, SMALL):
        chat = Conversation(*loaded_llama, policy=first, max_tokens=12)
        chat.attach(document)
        ask(chat, facts[0].question)
        chat.save(tmp_path / "chat.safetensors")
        options = {"policy": "keydiff:budget=96,block=32", "memory": "drop", "max_tokens": 12}
        loaded = Conversation.load(tmp_path / "chat.safetensors", *loaded_llama, **options)
        assert loaded.policy == chat.policy or first is None
        ask(loaded, facts[1].question)
        assert loaded.report.entries == (96 if first is None else 64)


def test_a_compressed_prompt_whose_policy_is_not_told_needs_one(loaded_llama, tmp_path):
    model, tokenizer = loaded_llama
    path = tmp_path / "small.safetensors"
    save_prompt_cache(str(path), prefill(model, list(range(5, 205)), SMALL)[0])
    with pytest.raises(SnapKVError, match="needs a policy to go on with"):
        Conversation.load(path, model, tokenizer)
    with pytest.raises(SnapKVError, match="needs memory=drop, the other entries are gone"):
        Conversation.load(path, model, tokenizer, policy=SMALL, memory="recall")
    assert ask(Conversation.load(path, model, tokenizer, policy=SMALL, max_tokens=4), "What?")


def test_a_template_that_refuses_is_told(loaded_llama, tmp_path):
    model, tokenizer = loaded_llama
    path = tmp_path / "full.safetensors"
    cache = make_prompt_cache(model)
    model(mx.arange(100)[None], cache=cache)
    save_prompt_cache(str(path), cache)
    chat = Conversation.load(path, model, tokenizer)

    class Refusing:
        has_chat_template = True

        def apply_chat_template(self, messages, **options):
            raise ValueError("no")

    chat.tokenizer = Refusing()
    with pytest.raises(SnapKVError, match="the chat template refused the conversation: no"):
        chat.send("What?")
