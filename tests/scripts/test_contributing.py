"""CONTRIBUTING's recipes, each followed literally in a copy of the package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx_lm.models
import pytest

import mlx_snapkv

ROOT = Path(mlx_snapkv.__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def make_copy(source, target, edits):
    """Link the contents of `source` into `target`, except for edited files. `edits` maps paths to text functions.

    A path that `source` lacks becomes a new file.
    """
    target.mkdir(parents=True)
    for entry in source.iterdir():
        below = {
            path.removeprefix(f"{entry.name}/"): edit
            for path, edit in edits.items()
            if path.startswith(f"{entry.name}/")
        }
        if below:
            make_copy(entry, target / entry.name, below)
        elif entry.name not in edits:
            (target / entry.name).symlink_to(entry)
    for name in (path for path in edits if "/" not in path):
        text = (source / name).read_text(encoding="utf-8") if (source / name).exists() else ""
        (target / name).write_text(edits[name](text), encoding="utf-8")


def run(folder, program):
    """Run a program that finds the package and the tests' helpers in `folder`. Return its output."""
    paths = [folder, folder / "tests", ROOT / "scripts", ROOT / "tests"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replacing(*pairs):
    """Return an edit that replaces texts. Each text must occur exactly once."""

    def edit(text):
        for old, new in pairs:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    return edit


def section(title):
    """Return the text of one recipe."""
    _, found = CONTRIBUTING.split(f"## {title}\n")
    return found.partition("\n## ")[0]


# A recipe, and the files that a contributor edits by hand; `make docs` writes more.
FILES = {
    "Adding a policy": ["mlx_snapkv/compress/policies/NAME.py", "tests/compress/test_scores.py"],
    "Adding a model type": ["mlx_snapkv/models/table.py", "tests/fixtures/model_configs.yaml"],
    "Adding a store": [
        "mlx_snapkv/sparse/stores/NAME.py",
        "mlx_snapkv/sparse/options.py",
        "tests/cache_kinds.py",
    ],
    "Adding an option": ["mlx_snapkv/sparse/options.py", "mlx_snapkv/planning/request_plan.py"],
}


@pytest.mark.parametrize("title", FILES)
def test_a_recipe_names_the_files_that_its_test_edits(title):
    """Otherwise a recipe could change without its test."""
    text = section(title)
    for name in FILES[title]:
        assert name in text
        assert "NAME" in name or (ROOT / name).exists()


NEW_POLICY = [
    ("RandomEviction", "EveryOther"),
    ('"random"', '"every_other"'),
    ('paper = ""', 'paper = "Doe 2026, arXiv:2600.00000"'),
]
USES_POLICY = """
import sys
import mlx.core as mx
import mlx_snapkv, policies_page
from mlx_snapkv.cli import app
from tiny_models import make_llama

report = mlx_snapkv.prefill(make_llama(), mx.arange(200) % 64, "every_other:budget=40,block=16")[1]
print(mlx_snapkv.__file__, report.compressed, policies_page.page())
sys.argv = ["mlx-snapkv", "policies"]
app.main()
"""


def test_a_new_file_is_a_policy_in_prefill_the_command_and_the_docs(tmp_path):
    random_eviction = ROOT / "mlx_snapkv/compress/policies/random_eviction.py"
    text = replacing(*NEW_POLICY)(random_eviction.read_text(encoding="utf-8"))
    edits = {"compress/policies/every_other.py": lambda _: text}
    make_copy(ROOT / "mlx_snapkv", tmp_path / "mlx_snapkv", edits)
    printed = run(tmp_path, USES_POLICY)
    for said in (
        f"{tmp_path}/mlx_snapkv/__init__.py True",
        "| [`every_other`](#every_other) | random entries, as a control | "
        "[2600.00000](https://arxiv.org/abs/2600.00000) |\n",
        "| `seed` | `0` | seed of the hash. |\n",
        "\nevery_other: random entries, as a control (Doe 2026, arXiv:2600.00000)\n",
    ):
        assert said in printed


# Runs the conformance test for the new type alone. mlx-lm finds the type in the folder `types`.
TRIES_TYPE = """
import sys
import mlx_lm.models
import pytest
import mlx_snapkv, write_docs

mlx_lm.models.__path__.append("types")
print(mlx_snapkv.__file__, write_docs.models_page())
options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", "fable"]
sys.exit(pytest.main([*options, "tests/models/test_conformance.py"]))
"""


def test_a_type_in_the_table_with_a_configuration_passes_the_conformance_test(tmp_path):
    family = 'Family("fable", "FableAttention", note="invented"),'
    table = replacing(("_FAMILIES = (\n", f"_FAMILIES = (\n    {family}\n"))
    configs = replacing(("\nconfigs:\n", "\nconfigs:\n  fable: {head_dim: 32}\n"))
    make_copy(ROOT / "mlx_snapkv", tmp_path / "mlx_snapkv", {"models/table.py": table})
    make_copy(ROOT / "tests", tmp_path / "tests", {"fixtures/model_configs.yaml": configs})
    mlx_lms = Path(mlx_lm.models.__file__).with_name("qwen3.py").read_text(encoding="utf-8")
    (tmp_path / "types").mkdir()
    renamed = mlx_lms.replace("Attention(", "FableAttention(")
    (tmp_path / "types" / "fable.py").write_text(renamed, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    printed = run(tmp_path, TRIES_TYPE)
    assert f"{tmp_path}/mlx_snapkv/__init__.py" in printed
    assert "| fable |  | invented |\n" in printed
    assert re.search(r"^\d+ passed", printed, re.M)


NEW_STORE = '''"""The store that holds entries in memory in few bits."""

from .memory import MemoryStore


class SmallStore(MemoryStore):
    """Entries in 3 bits."""

    name, bits = "small", 3
'''
# Runs a request, a command, the tests of stores, and the tests of every kind of cache.
USES_STORE = """
import contextlib
import io
import sys
import mlx.core as mx
import pytest
import mlx_snapkv
from mlx_snapkv.cli import app
from tiny_models import make_llama

for store in ("small", "tiny"):
    try:
        sparse = f"budget=40,n_sink=4,n_window=16,store={store}"
        report = mlx_snapkv.prefill(make_llama(head_dim=32), mx.arange(200) % 64, sparse=sparse)[1]
        print(mlx_snapkv.__file__, store, report.kv_bytes_before // report.kv_bytes_after)
    except mlx_snapkv.SnapKVError as error:
        print("refused:", error)
words = "generate --model demo --prompt Hello -m 1 --sparse budget=40 --store tiny"
sys.argv = ["mlx-snapkv", *words.split()]
with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.suppress(SystemExit):
    app.main()
print("refused:", err.getvalue())
options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", "SmallStore or small"]
sys.exit(pytest.main([*options, "tests/sparse/test_stores.py", "tests/caches/test_contract.py"]))
"""


def test_a_new_file_and_its_name_are_a_store_in_requests_commands_and_tests(tmp_path):
    imported = "from mlx_snapkv.sparse.stores.memory import"
    case, before = (
        '    "offloaded, small, of 8 bits": lambda: offloaded(SmallStore(HOW)),\n',
        '    "mlx-lm\'s": ',
    )
    kinds = replacing(
        (imported, f"from mlx_snapkv.sparse.stores.small import SmallStore\n{imported}"),
        (before, case + before),
    )
    edits = {
        "sparse/stores/small.py": lambda _: NEW_STORE,
        "sparse/options.py": replacing(
            ('        "file",\n', '        "file",\n        "small",\n')
        ),
    }
    make_copy(ROOT / "mlx_snapkv", tmp_path / "mlx_snapkv", edits)
    make_copy(ROOT / "tests", tmp_path / "tests", {"cache_kinds.py": kinds})
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    printed = run(tmp_path, USES_STORE)
    assert f"{tmp_path}/mlx_snapkv/__init__.py small 6\n" in printed
    refused = "refused: .*memory, 8bit, file or small, got 'tiny'"
    assert len(re.findall(refused, printed, re.S)) == 1 and printed.count("'tiny'") == 2
    assert "\n6 passed" in printed


USES_OPTION = """
import sys
import option_entrances, tables

option_entrances.main("{folder}")
print("documented:", tables.TABLES["sparse-options"]())
"""
EXPLAINED = "        when: when answer tokens choose"
DECLARED = '    when: str = choice("faster", "always")\n'
PLANNED = "    config.require_supported(model)\n"
OPTION_EDITS = {
    "sparse/options.py": replacing(
        (EXPLAINED, f"        tint: how dark it is.\n{EXPLAINED}"),
        (DECLARED, f'{DECLARED}    tint: str = choice("light", "dark", "dim")\n'),
    ),
    "planning/request_plan.py": replacing(
        ("def plan_request(\n", "SEEN = []\n\n\ndef plan_request(\n"),
        (PLANNED, f"{PLANNED}    SEEN.append(config.sparse and config.sparse.tint)\n"),
    ),
}
DARK = (
    "generate_step", "stream_generate", "generate", "prefill", "batch_generate", "Conversation.send", "generate",
    "batch", "chat", "/reset", "/policy", "/system", "/load of a text", "/save", "/load of a chat",
    "cache-prompt", "/load of a tinted text", "--prompt-cache-file", "config.toml", "flag",
)  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return the lines printed by the entry points of a copy that has an extra option."""
    folder = tmp_path_factory.mktemp("copy")
    make_copy(ROOT / "mlx_snapkv", folder / "mlx_snapkv", OPTION_EDITS)
    lines = run(folder, USES_OPTION.format(folder=folder)).splitlines()
    assert lines[0] == f"{folder}/mlx_snapkv/__init__.py"
    return lines


def test_a_declared_option_reaches_every_entrance(printed):
    assert [name for name in DARK if f"{name}: dark" not in printed] == []
    assert "variable: dim" in printed and "compare: None dark" in printed  # the full cache has none


def test_prefixes_of_another_value_are_not_used(printed):
    # The memory of requests for the full cache, which has no tint, is planned, too.
    assert [line for line in printed if line.startswith("serve:")] == [
        "serve: dark None",
        "serve: dim None",
        "serve: dark None",
    ]
    assert "known to servers: [False, False, True]" in printed


def test_a_declared_option_is_checked_and_documented(printed):
    wrong = "sparse option tint must be light, dark or dim, got 'pink'"
    python = [line for line in printed if line.endswith(f" refuses: {wrong}")]
    told = f" ends with 2: mlx-snapkv: --sparse tint=pink: {wrong}"
    commands = [line for line in printed if line.endswith(told)]
    assert (len(python), len(commands)) == (6, 6)
    (documented,) = [line for line in printed if line.startswith("documented:")]
    assert "| `tint` | `light` | how dark it is. |" in documented
