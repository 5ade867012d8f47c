import os
import signal
import subprocess

from command_lines import MODULE

SNAPKV = "budget=100,n_sink=4,n_window=32,obs_window=32,lookahead=4"
CHAT = ["chat", "--model", "demo", "-m", "24"]
POLICY = [*CHAT, "--snapkv", SNAPKV]
PROMPT = "\x1b[?2004h"  # prompt_toolkit switches bracketed paste on when it starts to read


def test_a_closed_standard_input_is_one_line():
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *MODULE, *CHAT]
    closed = subprocess.run(shell, capture_output=True, text=True)
    assert (closed.returncode, closed.stdout) == (2, "")
    assert closed.stderr.startswith("mlx-snapkv: standard input is closed")


def test_in_a_terminal_a_mistake_does_not_end_the_chat_and_ctrl_d_does(terminal, document):
    path, facts = document
    chat = terminal(*POLICY)
    for said in ("demo, policy snapkv:", "/help lists commands", PROMPT):
        chat.wait_for(said)
    chat.drive(("\x03", "Ctrl-D or /quit leaves the chat"), ("", PROMPT), ("given up\x03", PROMPT))
    assert "leaves the chat" not in chat.all.partition("leaves the chat")[2]
    chat.drive(
        ("/fiel\r", "did you mean '/file'?"),
        (f"/file {path}\r", "will be read with your next message"),
        (f"{facts[1].question}\r", facts[1].value),
        ("", PROMPT),
    )
    chat.leave("\x04")


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(terminal, document):
    path, _ = document
    chat = terminal(*POLICY, "-m", "100000")
    chat.wait_for(PROMPT)
    chat.drive(("once upon a time\r", "reading the prompt"))  # the model's answer never ends
    chat.drive(("", "\x1b[?25h"), ("", ". "))  # the bar is gone, and the cursor is back
    chat.process.send_signal(signal.SIGINT)
    chat.drive(("", "the conversation continues"), ("/stats\r", "tokens/s"))
    chat.drive((f"/file {path}\r", "will be read"))
    chat.leave()


def test_tab_completes_commands_and_file_names(terminal, document):
    chat = terminal(*CHAT, cwd=document[0].parent)
    chat.drive(
        ("", PROMPT),
        ("/he\t\r", "Leave the chat (also Ctrl-D)"),
        ("/policy keyd\t\r", "policy keydiff"),
        ("/file no\t\r", "notes of today.txt: "),
    )
    chat.leave()


def test_an_unsaved_conversation_is_not_replaced_without_a_question(terminal, document, tmp_path):
    path, facts = document
    (tmp_path / "mine.md").write_text("mine")
    # The working directory keeps paths short: a long question would be broken at the end of a line.
    chat = terminal(*POLICY, "--system-prompt", "Be kind.", cwd=tmp_path)
    question, kept = (
        "This conversation is not saved: replace it? [y/N]",
        "the conversation continues",
    )
    chat.drive(
        ("", PROMPT),
        ("/system Be brief.\r", "with that system prompt"),  # nothing is lost, so no question
        (f"/file {path}\r", "will be read"),
        (f"{facts[0].question}\r", facts[0].value),
        *(("/reset\r", question), ("\x03", kept)),
        *(("/load x.safetensors\r", question), ("\r", kept)),
        *(("/policy none\r", question), ("\r", kept)),
        ("/export mine.md\r", "exists: replace it? [y/N]"),
        ("n\r", "nothing was written"),
        ("/save talk.safetensors\r", "saved in"),
        ("/reset\r", "started a new conversation"),
        (f"/file {path}\r", "will be read"),
        (f"{facts[1].question}\r", facts[1].value),
        ("/load talk.safetensors\r", "[y/N]"),
        ("y\r", "tokens loaded"),
    )
    assert (tmp_path / "mine.md").read_text() == "mine"
    chat.leave()


def test_a_dumb_terminal_gets_no_escape_codes(terminal, document):
    path, facts = document
    chat = terminal(*POLICY, TERM="dumb")
    chat.wait_for("> ")
    leaves = "Ctrl-D or /quit leaves the chat"
    os.write(chat.fd, b"\x03")
    try:
        chat.wait_for(leaves, seconds=2)
    except AssertionError:  # a signal before the chat reads is noticed with the next signal
        chat.drive(("\x03", leaves))
    chat.drive(
        (f"/file {path}\n", "will be read"),
        (f"{facts[1].question}\n", facts[1].value),
        ("/reset\n", "[y/N]"),
        ("y\n", "started a new conversation"),
    )
    chat.leave("\x04")
    assert "\x1b" not in chat.all
