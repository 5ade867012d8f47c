import re

import pytest

SNAPKV = ["--snapkv", "budget=100,n_sink=4,n_window=32,obs_window=32,lookahead=4"]
SPARSE = ["--sparse", "budget=100,n_window=32,when=always"]


@pytest.fixture
def script(call):
    """Return a function that runs a chat with the given stdin lines, and returns (exit code, stdout lines, stderr)."""

    def run(lines, *options):
        stdin = "\n".join(lines).encode()
        code, out, err = call("chat", "--model", "demo", "-m", "24", *options, stdin=stdin)
        return code, out.splitlines(), err

    return run


def test_a_script_gets_answers_on_stdout_and_everything_else_on_stderr(script, document):
    path, facts = document
    questions = (fact.question for fact in facts)
    lines = [f'/file "{path}"', *questions, "/stats", "/help"]
    code, out, err = script([*lines, "/reset"], *SPARSE)
    assert (code, out) == (0, [fact.value for fact in facts])
    assert "notes of today.txt: " in err and "100 entries and" in err
    assert "tokens/s" in err
    assert "\n/file FILE               Attach a document to the next message.\n" in err
    assert all(f"\n{command} " in err for command in ("/reset", "/policy", "/quit"))


def test_a_quiet_chat_prints_only_the_output_of_commands_on_stderr(script, document):
    path, facts = document
    lines = [f"/file {path}", *(fact.question for fact in facts), "/stats"]
    ways = [*SPARSE, "--store", "file", "-q"]
    code, out, err = script(lines, *ways)
    assert (code, out) == (0, [fact.value for fact in facts])
    first, report, held, _ = err.splitlines()
    assert first.startswith("notes of today.txt: ") and "(float32)" in report
    assert re.fullmatch(r"held between turns: [\d.]+ k?B in memory, [\d.]+ [kM]B in files", held)


def test_a_policy_that_gains_nothing_is_reported_once(script, document, monkeypatch):
    from mlx_snapkv.engine.report import CompressionReport

    monkeypatch.setattr(CompressionReport, "warnings", ["slower than the full cache"])
    _, facts = document
    questions = [fact.question for fact in facts]
    code, _, err = script(
        [*questions, "/policy keydiff:budget=64,schedule=once", questions[0]], *SPARSE
    )
    assert code == 0 and err.count("warning: slower than the full cache\n") == 2
    assert "warning" not in script(questions, *SPARSE, "-q")[2]


def test_reset_policy_and_system_start_a_new_conversation(script, document):
    """An attached document is kept for the next message, except after /reset."""
    path, facts = document
    file = f"/file {path}"
    lines = [file, facts[0].question, "/reset", "/stats", file, "/policy none", "/policy"]
    lines += ["/reset", "/policy", "/system Be brief.", "/quit", "never sent"]
    code, out, err = script(lines, *SPARSE)
    assert (code, out) == (0, [facts[0].value])
    waiting = "with policy none, and the document will be read with your next message"
    for words in ("there is no turn yet", waiting, "with that system prompt\n"):
        assert words in err
    assert err.count("started a new conversation\n") == err.count("policy: none") == 2


def test_stats_name_the_block_and_policy_auto_selects_for_a_conversation(script, story):
    path, facts = story
    file, question = f"/file {path}", facts[0].question
    lines = [file, question, "/stats", "/policy auto", "/policy", file, question, "/stats"]
    code, out, err = script(lines, "--policy", "keydiff:budget=64,block=32")
    assert (code, out[-1]) == (0, facts[0].value)
    assert "(float32, with room for a block of 32)" in err
    assert "auto: the full cache, because all entries of " in err
    assert "\npolicy: none\n" in err and "no policy was given" in err


def test_the_settings_of_a_loaded_file_end_with_its_conversation(script, document, tmp_path):
    """The next full cache or new conversation uses the options of the command line again."""
    path, facts = document
    own, full = tmp_path / "own of today.safetensors", tmp_path / "full.safetensors"
    asked = [f"/file {path}", facts[0].question]
    code, out, err = script([*asked, f'/save "{own}"'], "--policy", "keydiff:budget=300")
    assert (code, out) == (0, [facts[0].value]) and f"saved in {own}" in err
    script([*asked, f"/save {full}"])
    lines = [f'/load "{own}"', f"/load {full}", *(fact.question for fact in facts), "/stats"]
    code, out, err = script([*lines, "/reset", f"/file {path}", facts[1].question], *SPARSE)
    assert (code, out) == (0, [f.value for f in (*facts, facts[1])])
    assert "policy keydiff:budget=300, as it was saved" in err
    assert re.search(r"tokens loaded, policy sparse:\S+\n", err) and "100 entries" in err


def test_undo_takes_turns_back_and_retry_answers_again(script, document):
    path, facts = document
    first, second = (fact.question for fact in facts[:2])
    lines = [f"/file {path}", first, "/retry", second, "/retry", "/stats", "/undo", "/undo"]
    code, out, err = script([*lines, second], *SNAPKV)
    assert code == 0 and out[:2] == [facts[0].value] * 2
    assert out[2] == out[3] and out[4:] == [facts[1].value]
    assert err.count("the answer is the same, since temp is 0") == 2
    held = r"held between turns: [\d.]+ kB in memory, [\d.]+ kB in memory for /undo\n"
    assert re.search(held, err)
    assert err.count("undid the turn: What is the") == 2
    assert "and the document will be read with your next message" in err


def test_files_are_listed_and_detached(script, document):
    path, facts = document
    lines = [f"/file {path}", "/file LICENSE", "/files", "/files detach LICENSE", facts[0].question]
    code, out, err = script([*lines, "/files", "/reset", "/files"], *SPARSE)
    assert (code, out) == (0, [facts[0].value])
    for words in ("1  notes of today.txt, will be read", "2  LICENSE, will be read", "detached LICENSE",
                  "   notes of today.txt, part of the conversation", "no file is attached"):  # fmt: skip
        assert words in err


def test_set_changes_sampling_between_turns(script, document):
    path, facts = document
    lines = ["/set", "/set temp 0.7", "/set --max-tokens 3", f"/file {path}", facts[0].question]
    code, out, err = script([*lines, "/set temp 0", "/reset", f"/file {path}", facts[0].question])
    others = "top_p 1, min_p 0, top_k 0, min_tokens_to_keep 1, xtc_probability 0, xtc_threshold 0.1"
    assert code == 0 and f"temp 0, {others}, max_tokens 24" in err
    assert f"temp 0.7, {others}, max_tokens 3" in err
    # A new conversation keeps the settings.
    assert facts[0].value.startswith(out[-1]) and out[-1] != facts[0].value


def test_a_conversation_is_exported_as_markdown(script, document, tmp_path):
    path, facts = document
    notes, talk = tmp_path / "mine.md", tmp_path / "talk.md"
    notes.write_text("mine")
    said = [f"/file {path}", facts[0].question, f'/export "{talk}"', facts[1].question]
    code, _, err = script([*said, f"/export {talk}", f"/export {notes}"], *SPARSE)
    assert code == 2 and f"/export {notes}: the file exists" in err
    text = talk.read_text()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# Chat with demo", *["## Question", "## Answer"] * 2]
    assert all(f"\n{words}\n" in text for f in facts[:2] for words in (f.question, f.value))
    assert notes.read_text() == "mine" and "*File: notes of today.txt*" in text and len(text) < 1000


@pytest.mark.parametrize(
    "line, words",
    [
        ("/fiel x", "unknown command /fiel (did you mean '/file'?)"),
        ("/sys\\\ntem", "unknown command /sys"),  # a backslash joins lines
        ("/undo 2", "/undo takes no arguments, got '2'"),
        ("/file nowhere.txt", "/file nowhere.txt: No such file or directory"),
        ("/file", "/file needs a file name"),
        ("/policy keydif", "did you mean 'keydiff'?"),
        ("/retry", "there is no question to answer again"),
        ("/set heat 1", "unknown setting heat: one of /set temp, /set top_p, "),
        ("/set temp 200", "/set temp must be from 0 to 100, got '200'"),
        ("/set max-tokens 1.5", "/set max_tokens: "),
        ("/set top_k 3000", "/set top_k must be less than the vocabulary's 1536, got 3000"),
        ("/files drop 1", "/files takes no arguments, or detach and a file's number or name, got"),
        ("/files detach 1", "/files detach needs the number or name of a file that has not been"),
        ("/export nowhere/talk.md", "nowhere/talk.md can't be written: there is no folder"),
        ("\udcff", "standard input is not UTF-8 text: convert it to text first"),
    ],
)
def test_a_mistake_in_a_script_ends_it_with_one_line(refused, line, words):
    lines = f"{line}\nnever sent".encode(errors="surrogateescape")
    assert words in refused("chat", "--model", "demo", stdin=lines)
