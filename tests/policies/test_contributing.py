"""CONTRIBUTING's recipe for a policy, followed: one new file in a copy of the package, and every list has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx_snapkv

ROOT = Path(mlx_snapkv.__file__).parents[1]

POLICY = '''"""Every other entry: the example of CONTRIBUTING."""

from dataclasses import dataclass

import mlx.core as mx

from ..entries.entries import Entries
from .base import Policy


@dataclass(frozen=True, kw_only=True)
class EveryOther(Policy):
    """Entries at multiples of `step` before the others.

    Attributes:
        step: how far they are apart.
    """

    name = "every_other"
    summary = "entries at equal distances"
    paper = "Nobody 2026, arXiv:2600.00000"

    step: int = 2

    def score(self, entries: Entries) -> mx.array:
        return (entries.positions % self.step == 0).astype(mx.float32)
'''

PROGRAM = """
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


def test_a_new_file_is_a_policy_everywhere(tmp_path):
    package = tmp_path / "mlx_snapkv"
    package.mkdir()
    for entry in (ROOT / "mlx_snapkv").iterdir():
        if entry.name != "policies":
            (package / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "mlx_snapkv" / "policies", package / "policies")
    (package / "policies" / "every_other.py").write_text(POLICY)
    paths = [tmp_path, ROOT / "scripts", ROOT / "tests"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for wanted in (
        f"{package}/__init__.py True",
        "| [`every_other`](#every_other) | entries at equal distances | "
        "[2600.00000](https://arxiv.org/abs/2600.00000) |\n",
        "| `step` | `2` | how far they are apart. |\n",
        "\nevery_other: entries at equal distances (Nobody 2026, arXiv:2600.00000)\n",
    ):
        assert wanted in done.stdout
