"""`mlx-snapkv plan`, and the sentence that other commands say before they read what will not fit."""

import json
import shlex

import pytest

from mlx_snapkv.engine.machine import Machine
from mlx_snapkv.planning import long_prompts


@pytest.fixture
def small_machine(monkeypatch):
    """A machine of 10 MB."""
    monkeypatch.setattr(long_prompts, "this_machine", lambda: Machine(10**7, 10**7))


def test_a_table_of_one_context(call):
    code, out, _ = call("plan", "--model", "demo", "--context", "16k", "--memory", "300MB")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "demo was trained to read 16,384 tokens."
    rows = [line.split() for line in lines if "B " in line and "may" not in line]
    assert rows[1][:5] == ["16k", "full", "cache", "50.3", "MB"] and rows[1][-1] == "no"
    assert rows[2][0] == "snapkv:top_k=4096" and rows[2][-1] == "recommended"
    assert "200 MB of 300 MB may be used." in " ".join(out.split())
    assert "recommended: snapkv:top_k=4096, because the question chooses" in lines[-2]
    command = shlex.split(lines[-1])
    assert command[:4] == ["mlx-snapkv", "generate", "--model", "demo"]
    # The votes are the question's.
    assert command[4:8] == ["--prompt-file", "FILE", "--prompt", "QUESTION"]
    assert command[8:] == ["--policy", "snapkv:top_k=4096"]


def test_auto_keeps_to_the_memory_given(call):
    asked = ("plan", "--model", "demo", "--context", "8k", "--policy", "auto", "--kv-memory")
    for size, said in (
        ("1GB", "recommended: full cache"),
        ("10MB", "would take 26.7 MB, and 10 MB may be used"),
        ("1kB", "Nothing fits 8k tokens into 1 kB."),
    ):
        code, out, _ = call(*asked, size)
        assert code == 0 and said in out


def test_the_policy_asked_for_is_taken_where_it_fits(call):
    # where the full cache would fit as well, and where the policy does not
    for policy, memory, taken in (
        ("tova:budget=512", "10GB", "tova:budget=512"),
        ("snapkv:top_k=4096", "100MB", "keydiff:budget=2048 then snapkv:top_k=512"),
    ):
        asked = ["--context", "64k", "--memory", memory, "--policy", policy]
        code, out, _ = call("plan", "--model", "demo", *asked, "--json")
        (found,) = json.loads(out)["taken"]
        assert code == 0 and found["policy"] == taken
        assert f"--policy {shlex.quote(taken)}" in found["command"]


def test_all_contexts_up_to_the_trained_length(call):
    """A policy is shown from where it changes something, and bits from where mlx-lm quantises."""
    code, out, _ = call("plan", "--model", "demo")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and [row[0] for row in rows if row[1:3] == ["full", "cache"]] == [
        "4k",
        "8k",
        "16k",
    ]
    four = next(row for row in rows if row[:1] == ["4k"])
    assert four[3:7] == ["12.6", "MB", "-", "-"]
    assert sum(row[:1] == ["snapkv:top_k=4096"] for row in rows) == 2
    assert "recommended: snapkv:top_k=4096" in out  # of 16k; below, the full cache
    found = json.loads(call("plan", "--model", "demo", "--json")[1])
    assert found["trained_length"] == 16_384
    taken = {taken["context"]: taken["policy"] for taken in found["taken"]}
    assert taken == {4096: None, 8192: None, 16_384: "snapkv:top_k=4096"}


def test_a_policy_that_changes_nothing_is_shown_if_it_was_asked_for(call):
    asked = ["--context", "2000", "--policy", "keydiff:budget=4096"]
    lines = call("plan", "--model", "demo", *asked)[1].splitlines()
    assert "because you asked for it, and it fits" in lines[-3]
    assert lines[-1].startswith("Nothing is compressed: the prompt's 2000 entries fit the budget")


def test_more_tokens_than_the_model_was_trained_to(call):
    asked = ["plan", "--model", "demo", "--context", "32k"]
    _, out, _ = call(*asked)
    assert out.splitlines()[-1].endswith("'keydiff:budget=8192 then snapkv:top_k=2048'")
    assert "because it evicts while it reads" in out
    far = "32768 tokens are more than the 16384 that this model was trained to read"
    policy = ["--policy", "snapkv:top_k=64,min_ctx=0"]
    assert far in call(*asked, *policy)[1].splitlines()[-1]
    full, asked_for = json.loads(call(*asked, *policy, "--json")[1])["plans"]
    assert far in full["beyond"] and far in asked_for["beyond"]


def test_nothing_fits(call):
    code, out, _ = call("plan", "--model", "demo-tasks", "--context", "3000", "--memory", "1MB")
    assert code == 0 and out.splitlines()[-1] == "Nothing fits 3000 tokens into 667 kB."


def test_generate_says_that_a_prompt_will_not_fit(call, story, small_machine):
    path, _ = story
    asked = ["generate", "--model", "demo", "--prompt-file", str(path), "-m", "1"]
    code, _, err = call(*asked)
    assert code == 0 and "this machine has 10 MB for models" in err
    code, _, err = call(*asked, "--policy", "keydiff:budget=128,block=64")
    assert code == 0 and "this machine" not in err


def test_chat_and_cache_prompt_say_so_too(call, story, small_machine, tmp_path):
    path, _ = story
    said = "this machine has 10 MB for models; no policy known here makes them fit"
    code, _, err = call("chat", "--model", "demo", stdin=f"/file {path}\n".encode())
    assert code == 0 and said in err
    output = str(tmp_path / "story.safetensors")
    code, _, err = call("cache-prompt", "--model", "demo", "--prompt-file", str(path), "-o", output)
    assert code == 0 and said in err
