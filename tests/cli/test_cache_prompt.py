"""Saving a prompt and asking about it, as a user does."""

import json
import random
import re
import sys

import mlx.core as mx
import pytest
from mlx_lm import cache_prompt
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from model_folders import demo_with
from request_helpers import plain

from mlx_snapkv import Conversation, SnapKVError
from mlx_snapkv.chat.prompts import mlx_lm_suffix
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.cli.prompts import encode, opening_tokens
from mlx_snapkv.demo import MODELS
from mlx_snapkv.demo.questions import make_haystack
from mlx_snapkv.engine.prefill import mlx_generate


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A folder with a text of 600 tokens, one question about it, and the answer."""
    folder = tmp_path_factory.mktemp("book")
    _, tokenizer = load_model("demo")
    document, facts = make_haystack(tokenizer, random.Random(1), 4, 600)
    (folder / "book.txt").write_text(document + "\n")
    return folder, facts[0].question, facts[0].value


@pytest.fixture
def cache(book, call):
    """cache(name, *options) -> the file that cache-prompt wrote, and what it said."""
    folder, _, _ = book

    def make(name, *options, model="demo"):
        file = str(folder / name)
        text = str(folder / "book.txt")
        code, out, err = call(
            "cache-prompt", "--model", model, "--prompt-file", text, "-o", file, *options
        )
        assert (code, out) == (0, "")
        return file, err

    return make


def ask(call, book, file, *options, model="demo"):
    return call(
        "generate", "--model", model, "--prompt-cache-file", file, "--prompt", book[1], "-m", "12", *options
    )  # fmt: skip


@pytest.mark.parametrize("model", ["demo", "demo-qwen3-next"])
def test_a_saved_full_cache_answers_as_an_uninterrupted_prompt(call, book, cache, model):
    file, err = cache("full.safetensors", model=model)
    assert "full cache: no policy was given" in err and f"saved in {file}" in err
    code, out, _ = ask(call, book, file, "--json", model=model)
    saved = json.loads(out)
    assert code == 0 and saved["text"].strip() == book[2]
    text = str(book[0] / "book.txt")
    _, out, _ = call(
        "generate", "--model", model, "--prompt-file", text, "-p", book[1], "-m", "12", "--json"
    )
    whole = json.loads(out)
    assert saved["text"] == whole["text"]
    tokens = saved["prompt_cache"]["tokens"]
    assert tokens > 580 and tokens + saved["prompt_tokens"] == whole["prompt_tokens"]


def test_a_compressed_prompt_is_continued(call, book, cache):
    file, err = cache("small.safetensors", "--policy", "keydiff:budget=50%,block=64")
    assert "300 entries kept" in err
    code, out, err = ask(call, book, file)
    assert (code, out.strip()) == (0, book[2])
    assert "saved ones (keydiff:budget=50%,block=64), now 3" in err


def test_a_full_cache_is_compressed_on_loading(call, book, cache):
    file, err = cache("full.safetensors", "--quiet")
    assert err == ""
    _, out, _ = ask(call, book, file, "--policy", "keydiff:budget=50%", "--json")
    result = json.loads(out)
    assert result["text"].strip() == book[2]
    assert result["compression"]["entries_kept"] == [300, 300, 300]
    assert result["prompt_cache"]["policy"] == "keydiff:budget=50%"
    _, _, err = ask(call, book, file, "--policy", "keydiff:min_ctx=9000")
    assert "full cache: the saved prompt's 600 tokens are below min_ctx=9000" in err


@pytest.mark.parametrize(
    "model, schedule", [("demo", "schedule=block,block=64"), ("demo-qwen3-next", "schedule=once")]
)
def test_rows_are_quantised_when_saved_or_when_loaded(call, book, cache, model, schedule):
    policy = ["--policy", f"keydiff:budget=50%,{schedule}"]
    bits = ["--kv-bits", "8", "--kv-group-size", "32"]
    full, said = cache("full.safetensors", model=model)
    plain, quantised = [], []
    for options, found in (([], plain), (bits, quantised)):
        small, told = cache("small.safetensors", *policy, *options, model=model)
        assert "300 entries kept" in told
        for file, more in ((small, []), (full, policy + options)):
            code, answer, err = ask(call, book, file, *more, model=model)
            assert code == 0 and "saved ones (keydiff:budget=50%" in err and "now 3" in err
            found.append((answer, kv_memory(err)))
    for (answer, size), (same, less) in zip(plain, quantised, strict=True):
        assert answer == same and less < 0.35 * size < 0.35 * kv_memory(said)


def kv_memory(told):
    """Kilobytes of KV memory, of a closing line."""
    number, unit = re.search(r"KV memory ([\d.]+) (kB|MB)", told).groups()
    return float(number) * {"kB": 1, "MB": 1000}[unit]


def test_a_full_cache_is_quantised_by_mlx_lm(call, book, cache, monkeypatch):
    monkeypatch.setattr(
        mlx_generate.generate_step,
        "__kwdefaults__",
        {**mlx_generate.generate_step.__kwdefaults__, "quantized_kv_start": 100},
    )
    file, err = cache("eight.safetensors", "--kv-bits", "8")
    code, out, again = ask(call, book, file)
    assert (code, out.strip()) == (0, book[2]) and 0 < kv_memory(err) < kv_memory(again)
    code, _, err = ask(call, book, file, "--kv-bits", "8")
    assert code == 2 and "is quantised already" in err
    code, out, err = ask(call, book, file, "--policy", "keydiff:budget=50%,block=64")
    assert (code, out.strip()) == (0, book[2]) and 0 < kv_memory(err) < kv_memory(again)


def test_a_prompt_saved_by_mlx_lm_goes_on(call, book, monkeypatch, capsys):
    folder, _, value = book
    model, file = str(MODELS["demo"]), str(folder / "theirs.safetensors")
    text = (folder / "book.txt").read_text() + " "
    options = ["--model", model, "--prompt-cache-file", file, "--prompt", text]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.cache_prompt", *options])
    cache_prompt.main()
    capsys.readouterr()
    for options in ([], ["--policy", "keydiff:budget=50%"]):
        code, out, err = ask(call, book, file, *options, model=model)
        assert (code, out.strip()) == (0, value), err
    code, _, err = ask(call, book, file, model="demo-qwen3-next")
    assert (code == 2 and "cache 0" in err) or "caches" in err


def test_mistakes_are_told_in_one_sentence(call, book, cache, tmp_path):
    full, _ = cache("full.safetensors")
    small, _ = cache("small.safetensors", "--policy", "keydiff:budget=50%")
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"hello")
    nowhere = str(tmp_path / "no" / "book.safetensors")
    for file, options, message in [
        (full, ["--policy", "snapkv"], "holds no queries for snapkv to vote with"),
        (full, ["--policy", "snapkv"], "keydiff, streaming_llm, key_norm, lagkv, random"),
        (full, ["--policy", "keydiff then snapkv"], "one policy, not by two stages"),
        (small, ["--policy", "keydiff"], "already compressed, by keydiff:budget=50%"),
        (
            small,
            ["--kv-bits", "4"],
            "is compressed already, its entries stay as they are: drop --kv-bits",
        ),
        (full, ["--kv-bits", "5"], "--kv-bits must be 2, 3, 4, 6 or 8, got 5"),
        (full, ["--kv-bits", "8", "--kv-group-size", "9"], "--kv-group-size must be 32, 64 or 128"),
        (
            full,
            ["--policy", "keydiff", "--kv-bits", "8", "--kv-group-size", "128"],
            "one of [32, 64]",
        ),
        (full, ["--max-kv-size", "99"], "--max-kv-size can't be combined"),
        (full, ["--system-prompt", "x"], "--system-prompt can't be combined"),
        (full, ["--ignore-chat-template"], "--ignore-chat-template is settled"),
        (str(foreign), [], "is not a saved prompt cache"),
        (nowhere, [], "can't be read: No such file or directory"),
        ("book.txt", [], "must end in .safetensors"),
    ]:
        code, out, err = ask(call, book, file, *options)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    code, _, err = ask(call, book, full, model="demo-qwen3-next")
    assert code == 2 and "was made with another model or other weights" in err
    code, _, err = call("cache-prompt", "--model", "demo", "--prompt", "x", "-o", nowhere)
    assert code == 2 and "there is no folder" in err


def test_a_changed_template_is_told(call, book, cache, tmp_path):
    model = demo_with(tmp_path / "model")
    file, _ = cache("own.safetensors", model=str(model))
    config = model / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{{ bos_token }}", "{{ bos_token }}hello "))
    code, _, err = ask(call, book, file, model=str(model))
    assert code == 2 and "does not begin with the tokens" in err


def test_a_template_that_tells_the_date_gives_the_day_of_saving(book, call, cache, tmp_path):
    model = demo_with(tmp_path / "model")
    config = model / "tokenizer_config.json"
    config.write_text(
        config.read_text().replace("{{ bos_token }}", "{{ bos_token }}{{ strftime_now('%f') }} ")
    )
    file, _ = cache("dated.safetensors", model=str(model))
    code, _, err = ask(call, book, file, model=str(model))
    assert code == 0, err


@pytest.mark.parametrize(
    "question", ["Why?", "1", "\nand so", "  x", "(a)", "中", "🦜", ".", "a\n\n"]
)
def test_every_question_follows_the_saved_tokens(question):
    _, tokenizer = load_model("demo")
    for text in ("It was cold.", "It was cold.\n\n ", "x"):
        start = opening_tokens(tokenizer, text, "Be brief.")
        whole = encode(tokenizer, f"{text}\n\n{question}", "Be brief.", False)
        assert whole[: len(start)] == start and len(start) > 4


def test_without_a_template_no_second_beginning_is_put_in():
    _, tokenizer = load_model("demo")
    assert tokenizer.bos_token_id not in mlx_lm_suffix(tokenizer, "Why?", True)


def test_mlx_lms_file_of_another_name_is_refused(call, book, tmp_path):
    model, tokenizer = load_model("demo")
    cache = make_prompt_cache(model)
    plain(model, mx.array(tokenizer.encode("It was cold.")), n=0, prompt_cache=cache)
    file = str(tmp_path / "theirs.safetensors")
    save_prompt_cache(file, cache, {"model": "somebody/else"})
    code, _, err = ask(call, book, file)
    assert code == 2 and "was made with --model somebody/else, not with demo" in err


def test_a_saved_conversation_is_for_chat(call, book):
    model, tokenizer = load_model("demo")
    chat = Conversation(model, tokenizer, max_tokens=1)
    list(chat.send("hello"))
    file = str(book[0] / "chat.safetensors")
    chat.save(file)
    code, out, err = ask(call, book, file)
    assert (code, out) == (2, "") and "go on with it in mlx-snapkv chat, by /load" in err


def test_a_text_that_was_read_again_answers_every_question(call, book, cache):
    """By generate; a chat, whose turns would choose again, says so before it begins, with the file or without."""
    file, err = cache("again.safetensors", "--policy", "kvzip:budget=75%")
    assert "entries kept" in err
    code, out, err = ask(call, book, file)
    assert (code, out.strip()) == (0, book[2])
    with pytest.raises(SnapKVError, match="kvzip reads a prompt again as a whole"):
        Conversation.load(file, *load_model("demo"))
    code, out, err = call("chat", "--model", "demo", "--policy", "kvzip")
    assert (code, out) == (2, "") and "kvzip reads a prompt again as a whole" in err
