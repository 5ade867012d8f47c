import json
import re
import sys
from datetime import datetime

import pytest
from mlx_lm import cache_prompt
from mlx_lm.models.cache import save_prompt_cache
from model_folders import demo_with, wide_demo

from mlx_snapkv import Conversation
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.cli.prompts import encode_question, opening_tokens

HALF = ["--policy", "keydiff:budget=50%,block=64"]
SPARSE = ["--sparse", "budget=25%"]


@pytest.fixture(scope="module")
def book(text_file, tmp_path_factory):
    """Return a folder with a text of 600 tokens, a question about it, and the answer."""
    folder = tmp_path_factory.mktemp("book")
    path, facts = text_file(folder / "book.txt", 600, seed=1, n_facts=4)
    path.write_text(path.read_text() + "\n")
    return folder, facts[0].question, facts[0].value


@pytest.fixture
def cache(book, save):
    """Return a function that saves the text under a name, and returns the file and stderr."""

    def make(name, *options, model="demo"):
        file = str(book[0] / name)
        return file, save(book[0] / "book.txt", file, *options, model=model)

    return make


@pytest.fixture(scope="module")
def files():
    """Return an empty dict for saved files, keyed by the options of cache-prompt."""
    return {}


@pytest.fixture
def saved_once(cache, files):
    """Return a function from options to a saved file. Tests share the files, so they must only read them."""

    def make(*options):
        if options not in files:
            files[options], _ = cache(f"saved {len(files)}.safetensors", *options)
        return files[options]

    return make


@pytest.fixture
def ask(ask_saved, book):
    return lambda file, *options, **how: ask_saved(file, book[1], *options, **how)


def kv_memory(told):
    """Return the kilobytes of KV memory reported in a command's last line."""
    number, unit = re.search(r"KV memory ([\d.]+) (kB|MB)", told).groups()
    return float(number) * {"kB": 1, "MB": 1000}[unit]


def test_a_saved_full_cache_answers_as_an_uninterrupted_prompt(call, book, cache, ask):
    file, err = cache("full.safetensors")
    assert "full cache: no policy was given" in err and f"saved in {file}" in err
    saved = json.loads(ask(file, "--json")[1])
    text = str(book[0] / "book.txt")
    asked = ["--prompt-file", text, "-p", book[1], "-m", "12", "--json"]
    whole = json.loads(call("generate", "--model", "demo", *asked)[1])
    assert saved["text"] == whole["text"] and saved["text"].strip() == book[2]
    tokens = saved["prompt_cache"]["tokens"]
    assert tokens > 580 and tokens + saved["prompt_tokens"] == whole["prompt_tokens"]


def test_a_prompt_is_compressed_and_quantised_when_saved_or_when_loaded(cache, ask, book):
    model = "demo-qwen3-next"
    bits = ["--kv-bits", "8", "--kv-group-size", "32"]
    full, said = cache("full.safetensors", model=model)
    plain, quantised = [], []
    for options, found in (([], plain), (bits, quantised)):
        small, told = cache("small.safetensors", *HALF, *options, model=model)
        assert "300 entries kept" in told
        for file, more in ((small, []), (full, HALF + options)):
            code, answer, err = ask(file, *more, model=model)
            assert (code, answer.strip()) == (0, book[2])
            assert "saved ones (keydiff:" in err and "now 3" in err
            found.append(kv_memory(err))
    for size, less in zip(plain, quantised, strict=True):
        assert less < 0.35 * size < 0.35 * kv_memory(said)


def test_a_full_cache_is_quantised_by_mlx_lm_and_only_once(book, cache, ask):
    """If a policy is used, the report is about the policy."""
    full, plain = cache("full.safetensors")
    result = json.loads(ask(full, *HALF, "--json")[1])
    assert result["compression"]["entries_kept"] == [300, 300, 300]
    assert result["prompt_cache"]["policy"] == HALF[1]
    _, _, err = ask(full, "--policy", "keydiff:min_ctx=9000")
    assert "full cache: the prompt's 600 tokens are below min_ctx=9000" in err
    file, quantised = cache("eight.safetensors", "--kv-bits", "8")
    assert kv_memory(quantised) < 0.35 * kv_memory(plain)
    for policy in ([], HALF):
        code, out, err = ask(file, *policy)
        assert (code, out.strip()) == (0, book[2]), err
    code, _, err = ask(file, "--kv-bits", "8")
    assert code == 2 and "is already quantised" in err


def test_a_prompt_saved_by_mlx_lm_is_continued(ask, book, monkeypatch, capsys, tmp_path):
    """mlx-lm saves the prompt in the dtype that the command computes in."""
    model, file = str(wide_demo(tmp_path / "wide")), str(book[0] / "theirs.safetensors")
    text = (book[0] / "book.txt").read_text() + " "
    options = ["--model", model, "--prompt-cache-file", file, "--prompt", text]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.cache_prompt", *options])
    cache_prompt.main()
    capsys.readouterr()
    for options in ([], HALF):
        code, out, err = ask(file, *options, model=model)
        assert (code, out.strip()) == (0, book[2]), err


def test_a_template_with_a_date_keeps_the_time_of_saving(cache, ask, tmp_path):
    """If the template has changed since then, the file is rejected."""
    model = demo_with(tmp_path / "model")
    config = model / "tokenizer_config.json"
    original = config.read_text()
    dated = original.replace("{{ bos_token }}", "{{ bos_token }}{{ strftime_now('%f') }} ")
    config.write_text(dated)
    file, _ = cache("dated.safetensors", model=str(model))
    code, _, err = ask(file, model=str(model))
    assert code == 0, err
    saving = datetime(2026, 1, 2, 3, 4, 5, 678)
    _, tokenizer = load_model(str(model))
    start = opening_tokens(tokenizer, "It was cold.", None, saving)
    assert "000678" in tokenizer.decode(start)
    config.write_text(original.replace("{{ bos_token }}", "{{ bos_token }}hello "))
    code, _, err = ask(file, model=str(model))
    assert code == 2 and "does not begin with the tokens" in err


@pytest.mark.parametrize("question", ["Why?", "\nand so", "  x", "中", "🦜", "a\n\n"])
def test_every_question_follows_the_saved_tokens(question):
    _, tokenizer = load_model("demo")
    for text in ("It was cold.", "It was cold.\n\n ", "x"):
        start = opening_tokens(tokenizer, text, "Be brief.")
        whole = encode_question(tokenizer, text, question, "Be brief.", None)
        assert whole[: len(start)] == start and len(start) > 4


KEYDIFF = ["--policy", "keydiff:budget=128,block=64,n_window=32", "--kv-group-size", "32"]


@pytest.mark.parametrize(
    "others, waits", [([], True), (["--quantized-kv-start", "9"], False), (KEYDIFF, False)]
)
def test_a_full_cache_that_is_too_short_to_be_quantised_is_noted(cache, ask, others, waits):
    file, _ = cache("plain.safetensors")
    code, _, err = ask(file, "--kv-bits", "8", *others)
    note = "note: --kv-bits quantises a full cache only from 5,000 tokens on"
    assert code == 0 and (note in err) == waits


def test_the_announcement_for_a_saved_text_counts_no_answer_tokens(cache):
    _, said = cache("window.safetensors", "--policy", "streaming_llm:budget=50%,schedule=once")
    assert re.match(r"300 of 6\d\d entries will be kept: KV memory", said)


@pytest.mark.parametrize(
    "saved, options, message",
    [
        ([], ["--policy", "keydiff then snapkv"], "a saved full cache holds none: give --sparse, with which"),
        ([], [*HALF, "--kv-bits", "8", "--kv-group-size", "128"], "one of [32, 64]"),
        ([], ["--system-prompt", "x"], "--system-prompt can't be combined"),
        ([], ["--model", "demo-qwen3-next"], "was made with another model or other weights"),
        (HALF, ["--policy", "keydiff"], "is already compressed, and the evicted entries are gone: drop --policy"),
        (HALF, ["--store", "memory"], "the evicted entries are gone: drop --store"),
        (HALF, ["--kv-bits", "4"], "is already compressed, and its entries stay so"),
        (HALF, ["--sparse", ""], "is already compressed, and the evicted entries are gone: drop --sparse"),
        (SPARSE, HALF, f"has its own setting, sparse:{SPARSE[1]}: drop --policy"),
        (SPARSE, ["--sparse", "top_k=9"], f"has its own setting, sparse:{SPARSE[1]}: drop --sparse"),
        (SPARSE, ["--kv-bits", "4"], "evicts nothing: give --store 8bit instead of --kv-bits"),
        ([], ["--store", "memory"], "--store memory says where sparse attention keeps all entries, but no"),
        ([], ["--snapkv", "top_k=9"], "--snapkv: snapkv needs queries, and a saved full cache holds none"),
        (HALF, ["--snapkv", "top_k=9"], "is already compressed, and the evicted entries are gone: drop --snapkv"),
    ],
)  # fmt: skip
def test_options_that_a_saved_prompt_can_not_have_are_refused(
    saved_once, refused, saved, options, message
):
    file = saved_once(*saved)
    asked = ["--model", "demo", "--prompt-cache-file", file, "--prompt", "Who?"]
    assert message in refused("generate", *asked, *options)


def test_other_files_are_refused_as_saved_prompts(refused, demo_llama, tmp_path):
    """One is chat's conversation, one was saved by mlx-lm for another model, and the others are not saved prompts."""
    model, tokenizer = demo_llama
    talk, theirs, notes = (tmp_path / f"{name}.safetensors" for name in ("talk", "theirs", "notes"))
    chat = Conversation(model, tokenizer, max_tokens=1)
    list(chat.send("hello"))
    chat.save(talk)
    save_prompt_cache(str(theirs), chat.prompt_cache, {"model": "other/model"})
    notes.write_bytes(b"hello")
    for file, message in (
        (talk, "to continue a saved chat, use /load in mlx-snapkv chat"),
        (theirs, "was made with --model other/model, not demo"),
        (notes, "is not a saved prompt cache"),
        (tmp_path / "book.txt", "must end in .safetensors"),
    ):
        asked = ["--prompt-cache-file", str(file), "--prompt", "Who?"]
        assert message in refused("generate", "--model", "demo", *asked)
