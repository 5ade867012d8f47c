"""CONTRIBUTING's recipe for a policy, followed: one new file in a copy of the package, and every list has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_snapkv

ROOT = Path(mlx_snapkv.__file__).parents[1]

POLICY = '''"""Every other entry: the example of CONTRIBUTING."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..entries.entries import Entries
from .base import Policy


@dataclass(frozen=True, kw_only=True)
class EveryOther(Policy):
    """Entries at multiples of `step` before the others.

    Attributes:
        step: how far they are apart.
    """

    name: ClassVar[str] = "every_other"
    summary: ClassVar[str] = "entries at equal distances"
    paper: ClassVar[str] = "Nobody 2026, arXiv:2600.00000"

    step: int = 2

    def score(self, entries: Entries) -> mx.array:
        return (entries.positions % self.step == 0).astype(mx.float32)
'''

TELL = """
import sys
import mlx.core as mx
import mlx_snapkv, policies_page
from mlx_snapkv import prefill
from mlx_snapkv.bench.contenders import compressed
from mlx_snapkv.cli import app
from mlx_snapkv.cli.asking import methods_of
from mlx_snapkv.policies import POLICIES, resolve_policy
from tiny_models import make_llama

policy = resolve_policy(policy="every_other:budget=40,block=16")
print("package", mlx_snapkv.__file__)
print("registry", *POLICIES)
print("eval", *(method.name for method in methods_of([str(policy)])), sep="|")
print("bench", *(c.name for c in compressed(4096, [policy])), sep="|")
print("report", prefill(make_llama(), mx.arange(200) % 64, policy)[1].compressed)
print(policies_page.page())
sys.argv = ["mlx-snapkv", "policies"]
app.main()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the package says of itself with one more file in its policies' folder."""
    package = tmp_path_factory.mktemp("recipe") / "mlx_snapkv"
    package.mkdir()
    for entry in (ROOT / "mlx_snapkv").iterdir():
        if entry.name != "policies":
            (package / entry.name).symlink_to(entry)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mlx_snapkv" / "policies", package / "policies", ignore=ignored)
    (package / "policies" / "every_other.py").write_text(POLICY)
    paths = [package.parent, ROOT / "scripts", ROOT / "tests"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    env |= {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TELL]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=package.parent)
    assert done.returncode == 0, done.stderr
    assert f"package {package}" in done.stdout
    return done.stdout


def line(told: str, name: str) -> str:
    return next(line for line in told.splitlines() if line.startswith(name))


def test_the_registry_has_it_after_those_that_were_there(told):
    names = line(told, "registry").split()
    assert names[1] == "snapkv" and names[-1] == "every_other"


def test_the_command_line_lists_it_with_its_options(told):
    assert "\nevery_other: entries at equal distances (Nobody 2026, arXiv:2600.00000)\n" in told
    assert "\n    step=2, budget=8192" in told


def test_the_docs_have_it_with_its_options(told):
    link = "[2600.00000](https://arxiv.org/abs/2600.00000)"
    assert f"| [`every_other`](#every_other) | entries at equal distances | {link} |" in told
    assert "\n## `every_other`\n" in told
    assert "| `step` | `2` | how far they are apart. |" in told


def test_evaluations_and_benchmarks_take_it(told):
    assert line(told, "eval").split("|")[1:] == ["full cache", "every_other:budget=40,block=16"]
    assert line(told, "bench").split("|")[1:] == ["every_other:budget=40,block=16"]


def test_it_compresses(told):
    assert line(told, "report") == "report True"
