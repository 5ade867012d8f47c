"""A long text that is read into a book, saved, and asked, as a user does."""

import json
import re

import pytest

BOOK = "keydiff:budget=96,block=128 then snapkv:top_k=60,n_window=32,obs_window=32,pool_kernel=21,pool=avg"


@pytest.fixture
def save(call, story):
    """save(file, *options) -> exit code, and what was said."""

    def invoke(file, *options):
        text = ["--prompt-file", str(story[0]), "-o", str(file)]
        code, out, err = call("cache-prompt", "--model", "demo", *text, *options)
        assert out == "" and "Traceback" not in err
        return code, err.splitlines()[-1]

    return invoke


def asked(call, file, fact, *options):
    question = ["--prompt", fact.question, "-m", "12"]
    return call(
        "generate", "--model", "demo", "--prompt-cache-file", str(file), *question, *options
    )


@pytest.mark.parametrize("memory", ["recall:file", "recall:file:4bit", "recall:8bit"])
def test_a_book_is_saved_and_asked(call, save, story, path, memory):
    code, said = save(path, "--policy", BOOK, "--memory", memory)
    found = re.fullmatch(
        rf"(\d+) prompt tokens, (\d+) entries resident, KV memory [^,]* \| saved in {re.escape(str(path))}, and all "
        r"entries in a folder beside it \([\d.]+ [kM]B\)",
        said,
    )
    assert code == 0 and found and int(found[2]) <= 96 + 128 < int(found[1])
    for fact in story[1]:
        code, out, err = asked(call, path, fact)
        assert (code, out) == (0, fact.value + "\n")
        assert ("on disk" if "file" in memory else "in memory") in err.splitlines()[-1]
    _, out, _ = asked(call, path, story[1][0], "--json")
    result = json.loads(out)
    assert result["prompt_cache"]["policy"].startswith("keydiff:budget=96")
    assert result["compression"]["book"]["stored"] > 1500


def test_a_chat_goes_on_from_it(call, save, story, path):
    save(path, "--policy", BOOK, "--memory", "recall:file")
    questions = [fact.question for fact in story[1]]
    lines = [f"/load {path}", questions[0], f"/save {path}", f"/load {path}", *questions[1:]]
    code, out, err = call("chat", "--model", "demo", stdin="\n".join(lines).encode())
    assert (code, out.splitlines()) == (0, [fact.value for fact in story[1]])
    assert "memory recall:file, as it was saved" in err


def test_a_short_text_is_saved_in_full(call, save, story, path):
    roomy = BOOK.replace("keydiff:", "keydiff:min_ctx=4000,")
    code, said = save(path, "--policy", roomy, "--memory", "recall:file")
    assert code == 0 and "full cache: the prompt's" in said and "below min_ctx=4000" in said
    assert list(path.parent.iterdir()) == [path]
    code, out, _ = asked(call, path, story[1][0])
    assert (code, out) == (0, story[1][0].value + "\n")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--memory", "recall:4bit"], "stored otherwise: give --memory recall:file or recall"),
        (["--policy", "keydiff:budget=64"], f"is a book, saved with the policy {BOOK}: drop the policy"),
        (["--snapkv", "top_k=60", "--memory", "recall"], "is a book, saved with the policy"),
    ],
)  # fmt: skip
def test_what_a_book_can_not_be_asked_with(call, save, story, path, options, message):
    save(path, "--policy", BOOK, "--memory", "recall:file")
    code, out, err = asked(call, path, story[1][0], *options)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]
