"""CONTRIBUTING's recipe for a policy, followed: one new file in a copy of the package, and every list has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx_snapkv

ROOT = Path(mlx_snapkv.__file__).parents[1]

CHANGES = {
    "RandomRows": "EveryOther",
    '"random"': '"every_other"',
    'paper = ""': 'paper = "Nobody 2026, arXiv:2600.00000"',
}

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
    text = (package / "policies" / "random_rows.py").read_text()
    for old, new in CHANGES.items():
        text = text.replace(old, new)
    (package / "policies" / "every_other.py").write_text(text)
    paths = [tmp_path, ROOT / "scripts", ROOT / "tests"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for wanted in (
        f"{package}/__init__.py True",
        "| [`every_other`](#every_other) | random entries, as a control | "
        "[2600.00000](https://arxiv.org/abs/2600.00000) |\n",
        "| `seed` | `0` | seed of the hash. |\n",
        "\nevery_other: random entries, as a control (Nobody 2026, arXiv:2600.00000)\n",
    ):
        assert wanted in done.stdout
