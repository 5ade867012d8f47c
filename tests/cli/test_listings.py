"""The lists printed by `policies` and `models`. Every command that `policies --choose` suggests is run."""

import json
import re
import shlex

import pytest

from mlx_snapkv import models
from mlx_snapkv.cli.listings import CHOICES, default_options
from mlx_snapkv.compress.policy import POLICIES


def test_every_policy_its_paper_and_all_its_options_are_listed(call):
    code, out, err = call("policies", "--choose")
    assert code == 0 and all(choice.command in out and choice.when in out for choice in CHOICES)
    code, out, err = call("policies")
    assert (code, err) == (0, "")
    pairs = out.splitlines()
    assert len(pairs) == 2 * len(POLICIES)
    for title, options, (name, cls) in zip(pairs[::2], pairs[1::2], POLICIES.items(), strict=True):
        assert title.startswith(f"{name}: {cls.summary}") and cls.paper in title
        assert [option.partition("=")[0] for option in options.split(",")] == [
            f"{'   ' * (i == 0)} {option}" for i, option in enumerate(cls.options())
        ]


@pytest.mark.parametrize("name", POLICIES)
def test_the_defaults_as_printed_make_the_default_policy(name):
    cls = POLICIES[name]
    text = ",".join(f"{option}={value}" for option, value in default_options(cls).items())
    assert cls.from_string(text) == cls()


def test_both_lists_of_models_are_printed(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call("models")
    assert code == 0 and set(models.SUPPORTED) | set(models.REFUSED) <= set(out.split())
    assert re.search(rf"\n mamba  .*{re.escape(models.REFUSED['mamba'])}", out)
    found = json.loads(call("models", "--json")[1])
    assert "llama" in {row["model_type"] for row in found["supported"]}
    assert all(row["why"] for row in found["refused"])


ASKED = [choice for choice in CHOICES if choice.command.split()[1] in ("generate", "chat")]


def words(choice, model, text, question="What?"):
    """Return the words to type after `mlx-snapkv` for a choice."""
    filled = choice.command.replace("MODEL", model).replace("TEXT", str(text))
    return [question if word == "QUESTION" else word for word in shlex.split(filled)[1:]]


@pytest.mark.parametrize("choice", ASKED, ids=lambda choice: choice.when)
def test_every_listed_command_that_answers_is_right(call, story, choice):
    path, facts = story
    name, *given = words(choice, "demo", path, facts[0].question)
    typed = f"/file {path}\n{facts[0].question}\n".encode()
    code, out, err = call(name, *given, stdin=typed if name == "chat" else b"")
    assert code == 0, err
    assert out.splitlines()[-1].strip() == facts[0].value


def test_the_listed_cache_prompt_command_saves_a_usable_prompt(call, ask_saved, story, tmp_path):
    path, facts = story
    (choice,) = (choice for choice in CHOICES if "cache-prompt" in choice.command)
    copy = tmp_path / "story"
    copy.write_text(path.read_text())
    assert call(*words(choice, "demo", copy), "-q")[0] == 0
    code, out, _ = ask_saved(f"{copy}.safetensors", facts[1].question)
    assert (code, out.strip()) == (0, facts[1].value)
