from collections import defaultdict

import typer

from mlx_snapkv.cli.app import app as program
from mlx_snapkv.cli.command import in_flags
from mlx_snapkv.cli.config import commands_of

# Where a flag means something of a command's own.
OWN = {
    "--output",
    "--memory of plan",
    "--policy of inspect",
    "--policy of plan",
    "--policy of cache-prompt",
    "--max-tokens of serve",
}


COMMANDS = ("generate", "chat", "batch", "serve", "cache-prompt", "inspect", "plan")


def test_a_flag_is_the_same_in_every_command():
    meanings = defaultdict(set)
    for (name, *_), command in commands_of(typer.main.get_command(program)):
        for each in command.params if name in COMMANDS else ():
            flag = each.opts[0]
            if not {flag, f"{flag} of {name}"} & OWN:
                meanings[flag].add((tuple(each.opts), str(each.default), each.help))
    assert len(meanings) > 50
    assert {flag for flag, found in meanings.items() if len(found) > 1} == set()


def test_a_chat_may_need_it_later(call):
    assert call("chat", "--model", "demo", "--store-dir", ".", stdin=b"/quit\n")[0] == 0


def test_the_list_of_commands_is_whole_on_a_narrow_terminal(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for args in (["--help"], ["eval", "--help"]):
        listed = " ".join(call(*args)[1].partition("Commands:")[2].split())
        assert listed.endswith(".") and "..." not in listed.replace("LongBench, ...)", "")


def test_what_only_looks_like_an_argument_stays():
    for text in (
        "a/memory=recall.txt is no text",
        "x-memory=recall",
        "kv_bits.txt: there is no such file",
        "there is no memory left",
    ):
        assert in_flags(text) == text
