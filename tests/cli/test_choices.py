"""`mlx-snapkv policies --choose`: every command of the table is tried, as the command line takes it."""

import shlex

import pytest
import write_docs

from mlx_snapkv.cli.listings import CHOICES

COMMANDS = dict(write_docs.commands())
ASKED = [choice for choice in CHOICES if choice.command.split()[1] in ("generate", "chat")]


def words(choice, model, text, question="What?"):
    """What is typed for a choice, after `mlx-snapkv`."""
    filled = choice.command.replace("MODEL", model).replace("TEXT", str(text))
    return [question if word == "QUESTION" else word for word in shlex.split(filled)[1:]]


def test_all_of_them_are_printed(call):
    code, out, _ = call("policies", "--choose")
    assert code == 0
    for choice in CHOICES:
        assert choice.command in out and choice.when in out
    assert call("policies")[1].startswith("snapkv: ")


def test_every_command_is_one():
    for choice in CHOICES:
        name, *given = words(choice, "demo", "story.txt")
        assert COMMANDS[name].make_context(name, given).params["model"] == "demo"


@pytest.mark.parametrize("choice", ASKED, ids=lambda choice: choice.when)
def test_every_one_that_answers_does(call, story, choice):
    path, facts = story
    name, *given = words(choice, "demo", path, facts[0].question)
    typed = f"/file {path}\n{facts[0].question}\n".encode()
    code, out, err = call(name, *given, stdin=typed if name == "chat" else b"")
    assert code == 0, err
    assert out.splitlines()[-1].strip() == facts[0].value


def test_what_is_saved_can_be_asked(call, story, tmp_path):
    path, facts = story
    (choice,) = (choice for choice in CHOICES if "cache-prompt" in choice.command)
    copy = tmp_path / "story"
    copy.write_text(path.read_text())
    assert call(*words(choice, "demo", copy), "-q")[0] == 0
    saved = ("--prompt-cache-file", f"{copy}.safetensors", "--prompt", facts[1].question)
    code, out, _ = call("generate", "--model", "demo", *saved, "-q")
    assert (code, out.strip()) == (0, facts[1].value)
