"""A text read within a fixed budget, with every entry at hand: answered, talked about, saved and asked."""

import json
import re

import pytest

POLICY = "keydiff:budget=96,block=128 then snapkv:top_k=60,n_window=32,obs_window=32,pool_kernel=21,pool=avg"
BOOK = ["--policy", POLICY, "--memory"]


def asked(call, story, *options):
    path, facts = story
    text = ["--prompt-file", str(path), "--prompt", facts[0].question]
    return call("generate", "--model", "demo", *text, "-m", "12", *options)


def cost(err):
    return [line for line in err.splitlines() if " tokens will take at most " in line]


@pytest.mark.parametrize("memory", ["recall:4bit", "recall:file"])
def test_what_it_takes_is_said_first_and_what_it_took_at_the_end(call, story, tmp_path, memory):
    in_files = ["--store-dir", str(tmp_path)] if "file" in memory else []
    code, out, err = asked(call, story, *BOOK, memory, *in_files)
    (first,), last = cost(err), err.splitlines()[-1]
    assert (code, out) == (0, story[1][0].value + "\n") and first in err.splitlines()[:2]
    where = "on disk" if in_files else "in memory"
    found = re.search(
        rf"(\d+) prompt tokens, 96 entries read by every token, KV memory [^,]*\), (\d+) resident \([^)]*\), "
        rf"all \1 {where} \(([^)]*)\), \d+ tokens read twice \| prompt",
        last,
    )
    assert found and int(found[2]) <= 96 + 128
    assert not in_files or f"{found[3]} on disk in {tmp_path} (" in first
    assert not [*tmp_path.iterdir()] and not cost(asked(call, story, *BOOK, "drop")[2])


def test_a_book_is_saved_and_asked(ask_saved, save, story, path):
    found = re.fullmatch(
        rf"(\d+) prompt tokens, (\d+) entries resident, KV memory [^,]* \| saved in {re.escape(str(path))}, and all "
        r"entries in a folder beside it \([\d.]+ [kM]B\)",
        save(story[0], path, *BOOK, "recall:file:4bit").splitlines()[-1],
    )
    assert found and int(found[2]) <= 96 + 128 < int(found[1])
    fact = story[1][0]
    code, out, err = ask_saved(path, fact.question)
    assert (code, out) == (0, fact.value + "\n")
    assert "on disk" in err.splitlines()[-1]
    result = json.loads(ask_saved(path, fact.question, "--json")[1])
    assert result["prompt_cache"]["policy"].startswith("keydiff:budget=96")
    assert result["compression"]["book"]["stored"] > 1500


def test_a_chat_goes_on_from_it_and_says_what_long_turns_cost(call, save, story, path):
    save(story[0], path, *BOOK, "recall:file")
    text, facts = story
    first, second, *others = (fact.question for fact in facts)
    lines = [f"/load {path}", first, f"/save {path}", f"/load {path}", second]
    lines += ["/reset", f"/file {text}", *others]
    chat = ["chat", "--model", "demo", *BOOK, "recall:file", "-m", "8"]
    code, out, err = call(*chat, stdin="\n".join(lines).encode())
    assert (code, out.splitlines()) == (0, [fact.value for fact in facts])
    assert err.count("tokens loaded, policy keydiff") == 2 and len(cost(err)) == 1


def test_a_short_text_is_saved_in_full(ask_saved, save, story, path):
    policy = POLICY.replace(":", ":min_ctx=4000,", 1)
    said = save(story[0], path, "--policy", policy, "--memory", "recall:file")
    assert "full cache: the prompt's" in said and "below min_ctx=4000" in said
    assert list(path.parent.iterdir()) == [path]
    assert ask_saved(path, story[1][0].question)[1] == story[1][0].value + "\n"
