import json
import shlex

import pytest
from speed_helpers import WINS_LATER, remember

from mlx_snapkv.cli import saved_prompt
from mlx_snapkv.cli.loading import load_without_weights
from mlx_snapkv.planning import auto, long_prompts
from mlx_snapkv.planning.machine import Machine

PLAN = ["plan", "--model", "demo"]


def test_plan_prints_a_table_for_one_context(call):
    code, out, _ = call(*PLAN, "--context", "16k", "--memory", "450MB")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "The trained length of demo is 16,384 tokens."
    rows = [line.split() for line in lines if "B " in line and "may" not in line]
    assert rows[1][:5] == ["16k", "full", "cache", "50.3", "MB"] and rows[1][-1] == "no"
    assert [(row[0], row[-1]) for row in rows[2:4]] == [
        ("sparse", "yes"),
        ("snapkv", "recommended"),
    ]
    assert "300 MB of 450 MB is available to models." in " ".join(out.split())
    assert "recommended: snapkv, because the full cache would take" in lines[-2]
    asked = "mlx-snapkv generate --model demo --prompt-file FILE --prompt QUESTION"
    assert shlex.split(lines[-1]) == [*asked.split(), "--policy", "snapkv"]


@pytest.mark.parametrize(
    "options, said",
    [
        ("--context 8k --policy auto --kv-memory 10MB", "would take 26.7 MB, and 10 MB is available"),
        ("--context 8k --policy auto --kv-memory 1kB", "No setting fits 8k tokens into 1 kB."),
        ("--context 2000 --policy keydiff:budget=4096", "because you asked for it, and it fits"),
        ("--context 2000 --policy keydiff:budget=4096", "Nothing is compressed: the prompt's 2000 entries fit the"),
        ("--context 32k --policy snapkv:top_k=64", "tokens are more than the model's trained length of 16384"),
    ],
)  # fmt: skip
def test_plan_says_what_it_recommends_and_why(call, options, said):
    code, out, _ = call(*PLAN, *options.split())
    assert code == 0 and said in " ".join(out.split())


def test_a_named_policy_is_recommended_if_it_fits(call):
    # The full cache would fit, too; then a machine on which the policy does not fit.
    for policy, memory, taken in (
        ("tova:budget=512", "10GB", "tova:budget=512"),
        ("snapkv", "100MB", "keydiff:budget=2048 then snapkv:top_k=512"),
    ):
        asked = ["--context", "64k", "--memory", memory, "--policy", policy]
        (found,) = json.loads(call(*PLAN, *asked, "--json")[1])["taken"]
        assert found["policy"] == taken
        assert f"--policy {shlex.quote(taken)}" in found["command"]


@pytest.mark.parametrize("usable", [10**9, 100 * 10**6, 30 * 10**6])
@pytest.mark.parametrize("n", [9000, 16_000, 20_000])
def test_auto_selects_the_recommended_setting(call, demo_llama, monkeypatch, n, usable):
    """Plan and auto see the same machine and plan for a question, both with much and with little memory."""
    monkeypatch.setattr(auto, "this_machine", lambda: Machine(usable, usable))
    _, _, taken = auto.resolve(demo_llama[0], n, auto.QUESTION, {}, policy="auto")
    of_mac = f"{usable * 3 // 2 // 1000}kB"  # a Mac's GPU may use two thirds
    out = call(*PLAN, "--context", str(n), "--memory", of_mac, "--json")[1]
    (found,) = json.loads(out)["taken"]
    assert found["fits"] == taken.fits
    if taken.fits:
        setting = taken.config.setting
        assert found["policy"] == (setting and str(setting))
        assert (taken.config.flags or "QUESTION") in found["command"]


def test_plan_lists_contexts_up_to_the_trained_length(call):
    """A policy is listed only for contexts in which it evicts entries."""
    code, out, _ = call(*PLAN)
    rows = [line.split() for line in out.splitlines()]
    contexts = [row[0] for row in rows if row[1:3] == ["full", "cache"]]
    assert code == 0 and contexts == ["4k", "8k", "16k"]
    four = next(row for row in rows if row[:1] == ["4k"])
    assert four[3:5] == ["12.6", "MB"]
    assert sum(row[:1] == ["snapkv"] for row in rows) == 2
    found = json.loads(call(*PLAN, "--json")[1])
    assert found["trained_length"] == 16_384
    taken = {taken["context"]: taken["policy"] for taken in found["taken"]}
    assert taken == dict.fromkeys((4096, 8192, 16_384))


def test_other_commands_say_that_a_prompt_will_not_fit(call, story, tmp_path, monkeypatch):
    monkeypatch.setattr(long_prompts, "this_machine", lambda: Machine(10**7, 10**7))
    path, _ = story
    said = "this machine has 10 MB for models; no policy makes them fit, and --max-kv-bytes 0 reads"
    text = ["--model", "demo", "--prompt-file", str(path)]
    code, out, err = call("generate", *text, "-m", "1")
    assert code == 2 and not out and said in err
    assert call("generate", *text, "-m", "1", "--max-kv-bytes", "0")[0] == 0
    small = ["--policy", "keydiff:budget=128,block=64"]
    assert "this machine" not in call("generate", *text, "-m", "1", *small)[2]
    assert said in call("chat", "--model", "demo", stdin=f"/file {path}\nWho?\n".encode())[2]
    assert said in call("cache-prompt", *text, "-o", str(tmp_path / "story.safetensors"))[2]


def test_a_saved_prompt_has_to_fit_in_memory(call, story, tmp_path, monkeypatch):
    path, _ = story
    saved = str(tmp_path / "a {story}.safetensors")
    assert call("cache-prompt", "--model", "demo", "--prompt-file", str(path), "-o", saved)[0] == 0
    asked = ["--model", "demo", "--prompt-cache-file", saved, "--prompt", "Who?", "-m", "1"]
    monkeypatch.setattr(saved_prompt, "this_machine", lambda: Machine(5 * 10**6, 5 * 10**6))
    code, out, err = call("generate", *asked)
    assert code == 2 and not out and f"{saved} and the model take " in err
    assert "this machine has 5 MB for models; --max-kv-bytes 0 answers anyway" in err
    assert call("generate", *asked, "--max-kv-bytes", "0")[0] == 0
    code, out, err = call("generate", *asked, "--max-kv-bytes", "1MB")
    assert code == 2 and not out and "of KV memory, but --max-kv-bytes is 1 MB: raise it" in err


BLOCKS = ["--policy", "keydiff:budget=128,block=64"]
IN_FILES = ["--sparse", "top_k=64", "--store", "file"]


@pytest.mark.parametrize(
    "saving, asking, status",
    [
        ([], [], 2),
        ([], BLOCKS, 0),
        ([], IN_FILES, 0),
        (BLOCKS, ["-m", "300"], 0),
        (IN_FILES, ["-m", "300"], 0),
    ],
)
def test_a_saved_prompt_needs_the_memory_of_its_own_entries(
    call, story, tmp_path, saving, asking, status
):
    """The limit is below the size of all entries, and above the size of the entries that stay in memory."""
    path, _ = story
    saved = str(tmp_path / "story.safetensors")
    text = ["--model", "demo", "--prompt-file", str(path)]
    assert call("cache-prompt", *text, "-o", saved, *saving)[0] == 0
    asked = ["--model", "demo", "--prompt-cache-file", saved, "--prompt", "Who?", "-m", "1"]
    assert call("generate", *asked, *asking, "--max-kv-bytes", "2MB")[0] == status


@pytest.fixture
def loaded():
    return load_without_weights("demo")


def test_plan_says_from_which_length_sparse_decoding_pays(call, loaded, record):
    """From that length, plan also recommends sparse attention, but not for another machine."""
    asked = [*PLAN, "--context", "32k"]
    assert "no request has measured yet whether sparse decoding pays" in call(*asked)[1]
    found = json.loads(call(*asked, "--json")[1])
    assert found["sparse_pays"] == {"basis": "unknown", "tokens": None}
    assert not found["taken"][0]["policy"]
    remember(loaded, WINS_LATER)
    out = " ".join(call(*asked)[1].split())
    assert "On this machine, sparse decoding pays from 16,384 tokens on (measured)." in out
    found = json.loads(call(*asked, "--json")[1])
    assert found["taken"][0]["policy"] == "sparse"
    other = json.loads(call(*asked, "--memory", "64GB", "--json")[1])
    assert other["taken"][0]["policy"] is None and other["sparse_pays"] is None


def test_doctor_says_from_which_length_sparse_decoding_pays(call, loaded, record):
    for model in ([], ["--model", "demo"]):
        record.unlink(missing_ok=True)
        assert (
            "no request has measured yet"
            in json.loads(call("doctor", *model, "--json")[1])["speed of demo"]
        )
        remember(loaded, WINS_LATER)
        assert (
            "decoding pays from 16,384"
            in json.loads(call("doctor", *model, "--json")[1])["speed of demo"]
        )
