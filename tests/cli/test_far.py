"""A text longer than the model was trained to, in the terminal."""

import random

import pytest
from mlx_lm.utils import load_tokenizer
from model_folders import demo_with

from mlx_snapkv.demo.questions import make_haystack

LENGTH = 512
THEN = "keydiff:budget=96,block=128,n_sink=4 then snapkv:top_k=60,n_sink=4,n_window=32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The embedded LLaMA as one trained to few tokens, and a text of three times as many, with its question."""
    folder = tmp_path_factory.mktemp("far")
    tokenizer = load_tokenizer(demo_with(folder / "model", max_position_embeddings=LENGTH))
    document, facts = make_haystack(tokenizer, random.Random(2), 3, 3 * LENGTH)
    (folder / "book.txt").write_text(document)
    return folder, facts[0]


@pytest.fixture
def run(call, folder):
    """run(command, *options) -> (exit code, stdout, stderr), of that model."""

    def invoke(command, *options, **how):
        return call(command, "--model", str(folder[0] / "model"), *options, **how)

    return invoke


def test_generate_tells_that_it_was_pulled_together(run, folder):
    folder, fact = folder
    text = ["--prompt-file", str(folder / "book.txt"), "--prompt", fact.question, "-m", "12"]
    ways = ["--policy", THEN, "--memory", "recall"]
    code, out, err = run("generate", *text, *ways)
    assert code == 0 and fact.value in out
    closing = err.strip().splitlines()[-1]
    assert f"pulled together beyond the {LENGTH} tokens that the model was trained to" in closing
    code, _, err = run("generate", *text, *ways, "--far", "keep")
    assert code == 0 and "pulled" not in err


def test_chat_and_cache_prompt(run, folder):
    folder, fact = folder
    book = str(folder / "book.txt")
    lines = f"/file {book}\n{fact.question}\n/stats\n"
    ways = ["--policy", THEN, "--memory", "recall", "--far", "pull", "-m", "12"]
    code, out, err = run("chat", *ways, stdin=lines.encode())
    assert code == 0 and fact.value in out and "pulled together" in err
    saved = ["--prompt-file", book, "-o", str(folder / "x.safetensors")]
    code, _, err = run("cache-prompt", *saved, "--policy", "keydiff:budget=96,block=128")
    assert code == 0 and "pulled together" in err


def test_a_prompt_that_is_left_beyond_is_told_of(run, folder):
    folder, fact = folder
    book = ["--prompt-file", str(folder / "book.txt")]
    said = f"more than the {LENGTH} that this model was trained to read: answers may be wrong"
    helps = "; a policy that evicts while it reads, such as keydiff:budget=4096, brings them nearer"
    asked = ["generate", *book, "--prompt", fact.question, "-m", "1"]
    snapkv = ["--snapkv", "top_k=60,n_sink=4,n_window=32"]
    for ways in ([], snapkv):
        code, _, err = run(*asked, *ways)
        assert code == 0 and f"{said}{helps}" in err
    for ways in (["--policy", THEN], [*snapkv, "--far", "keep"], ["--quiet"]):
        code, _, err = run(*asked, *ways)
        assert code == 0 and said not in err
    code, _, err = run("chat", stdin=f"/file {folder / 'book.txt'}\n".encode())
    assert code == 0 and said in err
    code, _, err = run("cache-prompt", *book, "-o", str(folder / "beyond.safetensors"))
    assert code == 0 and said in err
