"""The front door: what is written by a script is as it would write it, links lead somewhere, commands are real."""

import itertools
import re
import shlex
from pathlib import Path

import commands_page
import policies_page
import pytest
import write_docs

from mlx_snapkv.policies import POLICIES, Policy, resolve_policy

ROOT = Path(__file__).parents[2]
HAND_WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = dict(commands_page.commands())
PLACEHOLDERS = ("...", "COMMAND")


@pytest.mark.parametrize("path", write_docs.pages())
def test_a_generated_page_is_what_the_script_writes(path):
    assert (ROOT / path).read_text(encoding="utf-8") == write_docs.pages()[path], "run make docs"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, place = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if place:
            assert place in _places(file), target


def _places(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_command_shown_can_be_given(page):
    for words in _shown(page.read_text(encoding="utf-8")):
        name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
        assert name is not None, words
        given = words[len(name.split()) :]
        known = {o for p in COMMANDS[name].params for o in [*p.opts, *p.secondary_opts]}
        assert {word for word in given if re.match(r"--?[a-z]", word)} <= known, words
        for option, value in itertools.pairwise(given):
            if option in ("--policy", "--snapkv"):
                resolve_policy(**{option.strip("-"): value})


def _shown(text: str) -> list[list[str]]:
    """The words after `mlx-snapkv` of every command in a block of code, up to a redirection."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.partition("mlx-snapkv ")[2] for line in lines if "mlx-snapkv " in line]
    split = [shlex.split(line.partition(" < ")[0], comments=True) for line in found]
    return [[w for w in words if w not in PLACEHOLDERS] for words in split]


def test_commands_are_found_in_the_docs():
    """Else the test of them would be one of nothing."""
    shown = _shown((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [words[0] for words in shown] == "generate generate chat cache-prompt generate".split()


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_of_a_policy_is_explained_in_its_docstring(name):
    cls = POLICIES[name]
    told = policies_page.meanings(Policy) | policies_page.meanings(cls)
    assert set(cls.options()) <= set(told)


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "story.txt").write_text("The access code of the amber falcon is 482913.\n")
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1].strip() == "482913"
