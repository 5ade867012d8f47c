import ast
from collections import defaultdict
from pathlib import Path

import pytest
import typer

import mlx_snapkv
from mlx_snapkv.cli.app import app as program
from mlx_snapkv.cli.command import message_with_flags
from mlx_snapkv.cli.config import commands_of
from mlx_snapkv.errors import Option, OptionError, SnapKVError

# Flags that mean something else in one command.
OWN = {
    "--output",
    "--store of plan",
    "--policy of inspect",
    "--policy of plan",
    "--policy of cache-prompt",
    "--max-tokens of serve",
}


COMMANDS = ("generate", "chat", "batch", "serve", "cache-prompt", "inspect", "plan")


def test_a_flag_means_one_thing_in_every_command():
    meanings = defaultdict(set)
    for (name, *_), command in commands_of(typer.main.get_command(program)):
        for each in command.params if name in COMMANDS else ():
            flag = each.opts[0]
            if not {flag, f"{flag} of {name}"} & OWN:
                meanings[flag].add((tuple(each.opts), str(each.default), each.help))
    assert len(meanings) > 50
    assert {flag for flag, found in meanings.items() if len(found) > 1} == set()


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
def test_help_shows_the_options_that_matter_first_and_each_on_one_line(call, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "100")
    lines = call(name, "--help")[1].splitlines()
    first_panel = lines.index("Options:"), lines.index("KV cache:")
    shown = " ".join(lines[slice(*first_panel)])
    assert first_panel[1] < 25 and len(lines) < 60
    for flag in ("--model", "--policy", "--snapkv", "--sparse", "--temp", "--max-tokens"):
        assert f"{flag} " in shown
    command = typer.main.get_command(program).commands[name]
    described = [line for line in lines if line.startswith("  -")]
    assert len(described) == len(command.params) + 1  # --help is one more
    assert not any(line.startswith("   " * 3) for line in lines[first_panel[0] :])


def test_a_chat_takes_store_dir_without_a_store_because_a_later_policy_may_use_it(call):
    assert call("chat", "--model", "demo", "--store-dir", ".", stdin=b"/quit\n")[0] == 0


def test_the_list_of_commands_is_not_cut_on_a_narrow_terminal(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for args in (["--help"], ["eval", "--help"]):
        listed = " ".join(call(*args)[1].partition("Commands:")[2].split())
        assert listed.endswith(".") and "..." not in listed


def test_errors_write_options_as_their_reader_types_them():
    options = Option("store", "memory"), Option("kv_bits")
    error = SnapKVError("{} needs {} and {}", "a/store=memory.txt", *options)
    assert str(error) == "a/store=memory.txt needs store=memory and kv_bits"
    assert message_with_flags(error) == "a/store=memory.txt needs --store memory and --kv-bits"
    assert message_with_flags(SnapKVError("FILE: {}", error)).endswith(
        "needs --store memory and --kv-bits"
    )
    assert (
        message_with_flags(OptionError("kv_bits", "2 or 4", 3)) == "--kv-bits must be 2 or 4, got 3"
    )
    assert message_with_flags(SnapKVError("{kv_bits} is no JSON")) == "{kv_bits} is no JSON"


def test_every_option_that_an_error_names_is_a_flag():
    commands = [command for _, command in commands_of(typer.main.get_command(program))]
    flags = {each.name for command in commands for each in command.params}
    package = Path(mlx_snapkv.__file__).parent
    calls = [x for path in package.rglob("*.py") for x in ast.walk(ast.parse(path.read_text()))]
    named = {
        call.args[0].value
        for call in calls
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Option", "OptionError")
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    named -= {name for name in named if not name.isidentifier()}  # typer's options
    assert {"store", "draft_model"} <= named <= flags
