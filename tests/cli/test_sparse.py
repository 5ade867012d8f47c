"""Sparse attention on the command line: stores, printed output, saved prompts and chats."""

import json
import re

import pytest

from mlx_snapkv import Sparse

NAME = "sparse:budget=12.5%,read_top_k=128,when=always"
SPARSE = ["--sparse", NAME.partition(":")[2]]
READ = r"\d+ entries and \d+ means of the rest read by every token"


def asked(call, story, *options):
    path, facts = story
    text = ["--prompt-file", str(path), "--prompt", facts[0].question]
    return call("generate", "--model", "demo", *text, "-m", "12", *options)


def cost(err):
    return [line for line in err.splitlines() if " tokens will write at most " in line]


@pytest.mark.parametrize("store", ["8bit", "file"])
def test_the_first_line_says_what_will_be_read_and_the_last_line_what_was(
    call, story, tmp_path, store
):
    in_files = ["--store-dir", str(tmp_path)] if "file" in store else []
    code, out, err = asked(call, story, *SPARSE, "--store", store, *in_files)
    first, *_, last = err.splitlines()
    assert (code, out) == (0, story[1][0].value + "\n")
    assert re.match(r"a chunk will read at most [\d,]+ of 1,\d+ entries, and a token of ", first)
    assert first.endswith("can lose facts, and with read=dense they would read all")
    of_files = " of files" if in_files else ""
    assert re.search(
        rf"(\d+) prompt tokens, {READ}, at most \d+ by a chunk, KV memory [^,]*\), all \1 entries stay in "
        rf"[\d.]+ [kM]B{of_files} \| prompt",
        last,
    )
    assert len(cost(err)) == len(in_files) // 2
    assert not in_files or f" in {tmp_path} (" in cost(err)[0]
    assert not [*tmp_path.iterdir()]


def test_empty_options_are_the_defaults(call, story):
    """A short answer reads the full cache. With when=always, it reads 1/16 or 1,024 entries from the start."""
    code, out, _ = asked(call, story, "--sparse", "", "--json")
    report = json.loads(out)["compression"]
    assert code == 0 and report["policy"] == "sparse" and report["read_all"] == [[1, None]]
    code, out, _ = asked(call, story, "--sparse", "when=always", "--json")
    report = json.loads(out)["compression"]
    assert code == 0 and report["policy"] == "sparse:when=always"
    n = report["prompt_tokens"]
    assert report["read_per_token"] == Sparse().entries(n) < n
    assert report["kv_bytes_staying"] >= report["kv_bytes_before"]


@pytest.mark.parametrize("store", ["", "--store file"])
def test_a_text_is_saved_and_asked_with_its_own_setting(ask_saved, save, story, path, store):
    said = save(story[0], path, *SPARSE, *store.split()).splitlines()[-1]
    folder = r", and all entries in a folder beside it \([\d.]+ [kM]B\)" if store else ""
    assert re.fullmatch(
        r"\d+ prompt tokens, all 1,\d+ entries, \d+ read by a chunk, KV memory [^,]* \| saved in "
        rf"{re.escape(str(path))}{folder}",
        said,
    )
    fact = story[1][0]
    code, out, err = ask_saved(path, fact.question)
    assert (code, out) == (0, fact.value + "\n")
    # If entries are in files, the question chooses, too.
    chunk = r", at most \d+ by a chunk" if store else ""
    assert re.search(rf"prompt tokens, {READ}{chunk}, KV memory", err.splitlines()[-1])
    assert ("of files" in err) == bool(store)
    result = json.loads(ask_saved(path, fact.question, "--json")[1])
    name = f"{NAME},store=file" if store else NAME
    assert result["prompt_cache"]["policy"] == result["compression"]["policy"] == name


def test_a_saved_full_cache_is_asked_with_sparse_attention(ask_saved, save, story, path):
    save(story[0], path)
    fact = story[1][1]
    code, out, err = ask_saved(path, fact.question, *SPARSE)
    assert (code, out) == (0, fact.value + "\n")
    assert re.search(READ, err.splitlines()[-1])


def test_a_chat_continues_from_a_saved_sparse_prompt(call, save, story, path):
    save(story[0], path, *SPARSE, "--store", "file")
    text, facts = story
    first, second, *others = (fact.question for fact in facts)
    lines = [f"/load {path}", first, f"/save {path}", f"/load {path}", second]
    lines += ["/reset", f"/file {text}", *others]
    chat = ["chat", "--model", "demo", "--sparse", "budget=20%", "--store", "file"]
    code, out, err = call(*chat, "-m", "8", stdin="\n".join(lines).encode())
    assert (code, out.splitlines()) == (0, [fact.value for fact in facts])
    assert err.count(f"tokens loaded, policy {NAME},store=file, as it was") == 2


def test_a_short_text_is_saved_as_a_full_cache_and_continued(ask_saved, save, story, path):
    said = save(story[0], path, "--sparse", "budget=4000", "--store", "file")
    assert "full cache: the prompt's" in said and "fit the budget of 4000" in said
    _, out, err = ask_saved(path, story[1][0].question)
    assert out == story[1][0].value + "\n" and "full cache: " in err


def test_policy_in_a_chat_starts_a_conversation_with_sparse_attention(call, document):
    """The conversation has its own store, which is deleted with it."""
    path, facts = document
    lines = [
        "/policy sparse:top_k=60,when=always",
        f"/file {path}",
        facts[0].question,
        "/stats",
        "/policy",
    ]
    lines += ["/policy snapkv:top_k=60", f"/file {path}", facts[1].question, "/stats"]
    code, out, err = call("chat", "--model", "demo", "-m", "12", stdin="\n".join(lines).encode())
    assert (code, out.splitlines()[0]) == (0, facts[0].value)
    assert (
        "with policy sparse:top_k=60,when=always\n" in err
        and "\npolicy: sparse:top_k=60,when=always\n" in err
    )
    first, second = re.findall(r"\d+ prompt tokens, [^\n]*", err)
    assert re.search(READ, first) and " entries kept (" in second
    assert "entries stay" in first and "entries stay" not in second


def test_flags_of_the_store_apply_to_later_policies_of_a_chat_that_name_none(call):
    named = [f"/policy sparse:budget=9,store={store}" for store in ("8bit", "memory")]
    lines = ["/policy sparse:budget=9", *named, "/policy snapkv"]
    chat = ["chat", "--model", "demo", "--sparse", "budget=8,store=file"]
    code, _, err = call(*chat, "--store", "file", stdin="\n".join(lines).encode())
    policies = re.findall(r"with policy (\S+)", err)
    assert code == 0
    in_stores = ["sparse:budget=9,store=file", "sparse:budget=9,store=8bit", "sparse:budget=9"]
    assert policies == [*in_stores, "snapkv"]


@pytest.mark.parametrize("named", ["store=file", "store = file"])
def test_files_go_to_the_folder_of_the_flag_if_sparse_names_the_store(call, story, tmp_path, named):
    in_files = ["--sparse", f"{SPARSE[1]},{named}", "--store-dir", str(tmp_path)]
    code, out, err = asked(call, story, *in_files)
    assert (code, out) == (0, story[1][0].value + "\n")
    assert f" in {tmp_path} (" in cost(err)[0]


def test_a_chat_compares_with_the_answer_from_all_entries(call, story):
    path, facts = story
    lines = [f"/file {path}", facts[0].question, "/compare", "/stats", "/policy"]
    chat = ["chat", "--model", "demo", "-m", "12", *SPARSE]
    code, out, err = call(*chat, stdin="\n".join([*lines, facts[1].question]).encode())
    assert (code, out.splitlines()) == (0, [*[facts[0].value] * 2, facts[1].value])
    assert "from all entries: the same answer\n" in err
    assert "not compressed: the prompt's" in err
    assert "\npolicy: sparse:" in err


def test_compare_says_that_sampled_answers_may_always_differ(call, story):
    path, facts = story
    lines = "\n".join([f"/file {path}", facts[0].question, "/compare"])
    sampled = ["--temp", "9", "--seed", "1"]
    code, _, err = call(
        "chat", "--model", "demo", "-m", "12", *SPARSE, *sampled, stdin=lines.encode()
    )
    assert (
        code == 0 and "a different answer" in err and "sampled with temp 9 may always differ" in err
    )


def test_compare_in_a_chat_is_refused_after_entries_were_evicted(call, document):
    path, facts = document
    lines = f"/file {path}\n{facts[0].question}\n/compare\n".encode()
    chat = "chat", "--model", "demo", "-q", "-m", "1", "--snapkv", "top_k=60,lookahead=0"
    code, _, err = call(*chat, stdin=lines)
    assert code == 2 and "the evicted entries are gone: chat with --sparse" in err


def test_plans_count_the_memory_of_sparse_attention(call):
    asked = ["plan", "--model", "demo", "--context", "16k", "--json"]
    full, sparse = json.loads(call(*asked, "--sparse", "top_k=512")[1])["plans"]
    assert sparse["policy"] == "sparse:top_k=512"
    assert sparse["reading"] < full["reading"] / 2 and sparse["kv"] > full["kv"]
    # --kv-bits is for a policy's entries, so sparse attention is not listed.
    plans = json.loads(call(*asked, "--kv-bits", "8")[1])["plans"]
    assert not any((plan["policy"] or "").startswith("sparse") for plan in plans)
