"""Generated docs match their scripts, links lead somewhere, and commands in the docs exist."""

import itertools
import re
import shlex
import sys
from pathlib import Path

import associations_page
import evaluate
import fork_helpers
import mlx.core as mx
import policies_page
import pytest
import quality_page
import readme_results
import sparse_page
import tables
import typer
import write_docs

from mlx_snapkv.cli.app import app
from mlx_snapkv.cli.config import commands_of
from mlx_snapkv.cli.listings import CHOICES
from mlx_snapkv.compress.policy import POLICIES, Policy
from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.planning.auto import (
    CANDIDATES,
    CONVERSATION,
    EVICTING,
    KEEP_ALL,
    QUESTION,
    SNAPKV,
    SPARSE_8BIT,
    SPARSE_IN_FILES,
)
from mlx_snapkv.planning.settings import resolve_compress

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HAND_WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "scripts/evaluation/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# The beginning of a command line in a page, and the commands of each program.
PROGRAMS = {"mlx-snapkv": app, "python scripts/evaluate.py": evaluate.app}
COMMANDS = {
    program: {" ".join(p): c for p, c in commands_of(typer.main.get_command(commands))}
    for program, commands in PROGRAMS.items()
}
PLACEHOLDERS = ("...", "COMMAND")


@pytest.mark.parametrize("path", write_docs.pages())
def test_a_generated_page_equals_the_scripts_output(path):
    assert (ROOT / path).read_text(encoding="utf-8") == write_docs.pages()[path], "run make docs"


def test_the_page_of_quality_says_what_was_not_scored():
    """A policy may lack a setting, and answers may end before the compression."""
    full, own = ({"method": m, "setting": "known", "pieces": 2, "texts": 2} for m in ("full", "p"))
    full |= {"tokens": 60, "judged": 60, "same": 1.0, "entries": 900, "kv_bytes": 5000}
    full["kl"] = {"mean": 0.0, "low": 0.0, "high": 0.0}
    own |= {"tokens": 60, "judged": 0, "same": None, "kl": None, "entries": 90, "kv_bytes": 500}
    part = {"summary": [full, own | {"setting": "text", "kl": full["kl"], "same": 0.5}, own]}
    about, *_, row = quality_page._fidelity(part)
    assert about == "Pieces: 2. Files: 2."
    assert row.endswith("| 0.000 | 0.500 | not scored |  | 0.00 |")
    assert quality_page._fidelity(part)[4].startswith("| `full` | 900 | 5 kB |  |  | 0.000 |")


def test_the_page_of_quality_has_sentences_only_about_its_own_parts():
    parts = write_docs.load("quality")["parts"]
    blocks = next(part for part in parts if part["part"] == "ruler-blocks-smollm2")
    of_blocks, of_nothing = ("\n".join(quality_page._notes(given)) for given in ([blocks], []))
    assert "Read in blocks" in of_blocks
    assert "SmolLM2" in of_blocks and "Gemma" not in of_blocks
    assert "SmolLM2" not in of_nothing and "Read in blocks" not in of_nothing


def test_entries_of_policies_that_evict_in_blocks_are_a_range():
    rows = [
        {"method": method, "entries": n}
        for method, n in (("keydiff:budget=25%", 342), ("snapkv:budget=25%", 342), ("full", None))
    ]
    assert [quality_page.entries_text(row) for row in rows] == ["342 to 854", "342", "all"]


def test_gains_at_tasks_at_which_the_full_cache_fails_show_nothing():
    full, own, other = (
        {"method": method, "asked": 8, "score": sum(scores) / 2, "by_task": dict(zip("ab", scores))}
        for method, scores in (("full cache", (0.25, 1.0)), ("own", (0.5, 1.0)), ("x", (0.0, 1.0)))
    )
    (remark,) = quality_page._empty_gains([full, own, other])
    assert remark.startswith(
        "`own` exceeds the full cache only in `a` (50 against 25), in 4 questions"
    )
    own["by_task"] = dict.fromkeys("ab", 0.5)
    (remark,) = quality_page._empty_gains([full | {"by_task": {"a": 0.25, "b": 0.0}}, own])
    assert "`a` (50 against 25) and `b` (50 against 0), in 8 questions" in remark


@pytest.mark.parametrize(
    "full, sparse, shows", [(0.25, 0.5, False), (0.5, 0.75, True), (1, 1, True)]
)
def test_the_readme_says_if_gains_show_nothing(monkeypatch, full, sparse, shows):
    rows = {FULL_CACHE: {"by_task": {"a": full}}, "sparse:budget=6.25%": {"by_task": {"a": sparse}}}
    monkeypatch.setattr(readme_results, "_ruler_parts", lambda: [("M", rows)])
    assert ("shows nothing" in readme_results._gains()) != shows


def test_few_documents_per_task_have_no_interval():
    row = {"asked": 16, "entries": None, "score": 0.5, "by_task": dict.fromkeys("abcd", 0.5)}
    own = row | {"method": "own", "setting": "known"}
    own["difference"] = {"mean": 0.0, "low": -0.5, "high": 0.5}
    part = {"summary": [own | {"method": FULL_CACHE}, own]}
    assert quality_page._scores(part)[-1].endswith("| 50.0 | +0.0 |")
    own["asked"] = 20
    assert quality_page._scores(part)[-1].endswith("| 50.0 | +0.0 (-50.0 to +50.0) |")


def test_questions_of_several_parts_are_counted_once(monkeypatch):
    """Sparse attention was asked for more facts than the policies. The first text's are in both parts."""
    place = {"length": 8, "variant": "several"}
    fact = place | {"question": "Q?", "fact": "F.", "answer": "A."}

    def part(asked, methods_and_settings):
        rows = [
            place
            | {"method": method, "setting": setting, "asked": asked, "full": asked // 2}
            | {"found": asked // 2, "kept": asked // 2 - (method != FULL_CACHE)}
            for method, setting in methods_and_settings
        ]
        made = {"command": "x", "date": "today", "commit": "0", "machine": "one"}
        missed = [
            fact | dict(zip(("method", "setting"), each)) for each in methods_and_settings[1:]
        ]
        return made | {"model": "smollm2-135m-instruct", "rows": rows, "missed": missed}

    full, own = (FULL_CACHE, "later"), ("snapkv:budget=12.5%", "known")
    sparse = ("sparse:budget=6.25%", "later")
    parts = [part(8, [full, own, sparse]), part(32, [full, sparse])]
    monkeypatch.setattr(associations_page, "load", {"associations": {"parts": parts}}.get)
    row = "| `smollm2-135m-instruct` | 8 | several (32) | 16 | 4 of 8 (75%) | 16 (94%) |"
    assert associations_page.associations()[-1] == row
    about, *_, row = associations_page.kept()
    assert "asked 32 questions about 32 of them. The full cache answered 16 correctly." in about
    assert row == "| SmolLM2 135M, 8 | eight facts (32) | 16 |  | 15 |  | 3 of 4 |  |  |  |"
    assert "Shown are 2 of 2" in associations_page.missed()[0]


def test_the_page_of_quality_has_sections_for_associations_and_long_answers(monkeypatch):
    spans = [{"start": 0, "stop": 64, "n": 4, "kl": 0.25, "same": 0.5}]
    row = {"model": "m", "kind": "summary", "method": "p", "spans": spans}
    row |= {"tokens": [64, 64], "differs": [64, 3]}
    made = {"command": "python x.py", "date": "today", "commit": "0", "machine": "one"}
    results = {"associations": {"parts": []}, "long-answers": made | {"rows": [row]}}
    for module in (associations_page, sparse_page):
        monkeypatch.setattr(module, "load", results.get)
    found = quality_page.page(made | {"parts": []})
    assert found.count("\n## ") == 3
    assert "| `m` | summary (2) | `p` | 0.250, 0.50 | 3, never |" in found


def test_every_table_has_one_place_in_the_docs():
    found = [
        re.findall(r"<!-- ([a-z-]+) -->", page.read_text(encoding="utf-8")) for page in HAND_WRITTEN
    ]
    assert sorted(name for names in found for name in names) == sorted(tables.TABLES)


def test_the_readme_is_short_and_its_commands_are_found():
    assert len(README.splitlines()) <= 150
    shown = [words[0] for words in _shown(README)]
    assert shown == "generate doctor plan demo generate compare chat cache-prompt generate".split()


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_relative_link_has_a_target(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, place = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if place:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            places = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert place in places, target  # GitHub makes these names of titles


def test_every_file_of_the_architecture_exists():
    """NAME and COMMAND are placeholders for any policy or command."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:\w+/)+\w+\.py\b", page))
    assert len(named) > 40
    missing = [name for name in named if not (ROOT / "mlx_snapkv" / name).exists()]
    assert set(missing) <= {"compress/policies/NAME.py", "cli/COMMAND.py"}
    rooms = {name.partition("/")[0] for name in named} | {"planning"}
    assert rooms >= {"engine", "compress", "sparse", "caches", "entries", "models", "batch", "chat"}
    assert rooms >= {"server", "saved", "completions"}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_command_in_the_docs_exists(page, program):
    commands = COMMANDS[program]
    for words in _shown(page.read_text(encoding="utf-8"), program):
        name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in commands), None)
        assert name is not None, words
        given = words[len(name.split()) :]
        known = {o for p in commands[name].params for o in [*p.opts, *p.secondary_opts]}
        assert {word for word in given if re.match(r"--?[a-z]", word)} <= known, words
        for option, value in itertools.pairwise(given):
            if option in ("--policy", "--snapkv") and value != "auto":
                resolve_compress(**{option.strip("-"): value})


def _shown(text: str, program: str = "mlx-snapkv") -> list[list[str]]:
    """Return the words after `program` for every command in a code block, up to a redirection."""
    blocks = [b for kind, b in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if not kind]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.partition(f"{program} ")[2] for line in lines if f"{program} " in line]
    split = [shlex.split(line.partition(" < ")[0], comments=True) for line in found]
    return [[w for w in words if w not in PLACEHOLDERS] for words in split]


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_of_a_policy_is_explained_in_its_docstring(name):
    cls = POLICIES[name]
    told = policies_page.meanings(Policy) | policies_page.meanings(cls)
    assert set(cls.options()) <= set(told)


@pytest.fixture(scope="module")
def readme_run(tmp_path_factory):
    """Run the README's commands in order, exactly as printed. Return their outputs and the folder."""
    folder = tmp_path_factory.mktemp("reader")
    readme = README.replace("\\\n", " ")
    printed = []
    # The first block has placeholders.
    for block in re.findall(r"^```\n(.*?)^```", readme, re.M | re.S)[1:]:
        typed = ""
        if block.startswith("mlx-snapkv chat"):
            block, _, typed = block.partition("\n")
        for line in re.findall(r"^(?!make |\. \.venv/bin/activate$).+", block, re.M):
            source, _, words = re.fullmatch(r"(cat (\S+) \| )?mlx-snapkv (.*)", line).groups()
            given = (folder / source.split()[1]).read_text() if source else typed
            command = [sys.executable, "-m", "mlx_snapkv", *shlex.split(words)]
            done = fork_helpers.run(
                command, input=given, capture_output=True, text=True, cwd=folder
            )
            assert done.returncode == 0, (line, done.stderr)
            printed.append(done.stdout.splitlines())
    return printed, folder


def test_the_readmes_commands_run_as_printed(readme_run):
    (doctor, plan, demo, auto, compared, *answers), _ = readme_run
    assert any("mlx-lm" in line for line in doctor)
    assert any("recommended" in line for line in plan)
    assert any(line.count("3/3") == 2 for line in demo)  # the full cache and sparse attention
    oak, hawk = "6475938", "157815"
    assert compared.count(oak) == 4  # from the full cache and three policies
    assert [auto, *answers] == [[oak], [hawk], [], [hawk]]


def test_the_python_blocks_of_the_page_run_in_order(readme_run, monkeypatch, capsys):
    monkeypatch.chdir(readme_run[1])
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(code, "docs/python.md", "exec"), names)
        if "model" in names:  # a CPU computes float32 several times as fast as this model's dtype
            names["model"].set_dtype(mx.float32)
    assert (
        capsys.readouterr().out.splitlines()[-1].strip() == "[' 157815', ' 6475938'] [None, None]"
    )


def setting_of(words):
    """Return a command's setting and store."""
    said = dict(itertools.pairwise(words))
    if "--sparse" in said:
        return f"sparse:{said['--sparse']}", said.get("--store", "memory")
    policy = f"snapkv:{said['--snapkv']}" if "--snapkv" in said else said.get("--policy")
    return policy, said.get("--store")


CHOSEN = {setting_of(shlex.split(choice.command)) for choice in CHOICES}
ANSWERING = ("generate", "chat", "serve", "batch", "cache-prompt")


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_pages_use_only_settings_of_the_table(page):
    """Commands with the built-in model may differ, because its documents are short."""
    for words in _shown(page.read_text(encoding="utf-8")):
        if words[0] in ANSWERING and "demo" not in words and setting_of(words)[0] is not None:
            assert setting_of(words) in CHOSEN, words


def test_autos_candidates_are_in_the_order_of_the_docs():
    """The full cache comes first, followed by the settings for a question or for a conversation."""
    last = *EVICTING[1:], SPARSE_IN_FILES
    assert CANDIDATES[QUESTION] == (KEEP_ALL, SNAPKV, SPARSE_8BIT, *last)
    assert CANDIDATES[CONVERSATION] == (KEEP_ALL, SPARSE_8BIT, SPARSE_IN_FILES, *EVICTING)
    for given in (
        "chat --sparse budget=6.25% --store 8bit",
        "chat --sparse top_k=1024 --store file",
        "generate --snapkv top_k=4096",
    ):
        assert f"`mlx-snapkv {given}` |" in README
