"""A text longer than the model was trained to, in the terminal."""

import random

import pytest
from mlx_lm.utils import load_tokenizer
from model_folders import demo_with

from mlx_snapkv.demo.questions import make_haystack

LENGTH = 512
THEN = "keydiff:budget=96,block=128,n_sink=4 then snapkv:top_k=60,n_sink=4,n_window=32"
BEYOND = f"more than the {LENGTH} that this model was trained to read: answers may be wrong"


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """The embedded LLaMA as one trained to few tokens, a text of three times as many, and a fact in it."""
    folder = tmp_path_factory.mktemp("far")
    model = demo_with(folder / "model", max_position_embeddings=LENGTH)
    document, facts = make_haystack(load_tokenizer(model), random.Random(2), 3, 3 * LENGTH)
    (folder / "book.txt").write_text(document)
    return str(model), str(folder / "book.txt"), facts[0]


def test_entries_are_pulled_together_where_a_policy_evicts_while_it_reads(call, far, tmp_path):
    model, book, fact = far
    ways = ["--policy", THEN, "--memory", "recall", "-m", "12"]
    asked = ["generate", "--model", model, "--prompt-file", book, "--prompt", fact.question, *ways]
    code, out, err = call(*asked)
    pulled = f"pulled together beyond the {LENGTH} tokens that the model was trained to"
    assert code == 0 and fact.value in out and pulled in err.splitlines()[-1] and BEYOND not in err
    code, _, err = call(*asked, "--far", "keep")
    assert code == 0 and "pulled" not in err
    lines = f"/file {book}\n{fact.question}\n/stats\n"
    code, out, err = call("chat", "--model", model, *ways, "--far", "pull", stdin=lines.encode())
    assert code == 0 and fact.value in out and pulled in err
    saved = ["--prompt-file", book, "-o", str(tmp_path / "x.safetensors"), "--policy", THEN[:36]]
    code, _, err = call("cache-prompt", "--model", model, *saved)
    assert code == 0 and pulled in err


def test_a_prompt_that_is_left_beyond_is_told_of(call, far):
    model, book, _ = far
    asked = ["generate", "--model", model, "--prompt-file", book, "-m", "1", "--snapkv", "top_k=60"]
    code, _, err = call(*asked)
    helps = "; a policy that evicts while it reads, such as keydiff:budget=4096, brings them nearer"
    assert code == 0 and f"{BEYOND}{helps}" in err
    code, _, err = call(*asked, "--far", "keep")
    assert code == 0 and BEYOND not in err
    code, _, err = call("chat", "--model", model, stdin=f"/file {book}\n".encode())
    assert code == 0 and BEYOND in err
