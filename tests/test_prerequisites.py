"""A machine that can't run MLX gets a one-sentence error, before anything is installed or imported."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_snapkv.cli import app
from mlx_snapkv.prerequisites import complaint

ROOT = Path(__file__).parent.parent
MAC = ("Darwin", "arm64", (3, 12, 1))


@pytest.mark.parametrize(
    "machine, more, words",
    [
        (("Darwin", "arm64", (3, 9, 6), "15.1"), {}, "Python 3.10 or later is needed, and this is 3.9.6: install"),
        (("Linux", "x86_64", (3, 8, 18)), {}, "this is 3.8.18"),
        (("Darwin", "x86_64", (3, 12, 1), "12.7.6"), {}, "Apple silicon only"),
        ((*MAC, "13.6.1"), {}, "macOS 14 or later, and this is 13.6.1"),
        ((*MAC, "15.1"), {"mlx_error": "ImportError: no"}, "can't be imported (ImportError: no): install it again"),
        (("Linux", "x86_64", (3, 12)), {"mlx_error": "ImportError: no"}, "--force-reinstall mlx[cpu]"),
        ((*MAC, "15.1"), {"has_metal": False}, "finds no GPU with Metal"),
    ],
)  # fmt: skip
def test_one_sentence_says_what_is_missing_and_what_to_do(machine, more, words):
    said = complaint(*machine, **more)
    assert words in said and "\n" not in said


@pytest.mark.parametrize("machine", [(*MAC, "14.0"), (*MAC, "26.1"), ("Linux", "x86_64", (3, 10))])
def test_a_machine_that_runs_mlx_gets_no_complaint(machine):
    assert complaint(*machine, has_metal=machine[0] == "Darwin") is None


@pytest.mark.parametrize("name", ["__init__", "__main__", "_version", "prerequisites"])
def test_python_3_9_can_parse_the_files_that_run_before_the_check(name):
    source = (ROOT / "mlx_snapkv" / f"{name}.py").read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    # Annotations such as `int | None` are not evaluated.
    unions = [x for x in ast.walk(tree) if isinstance(x, ast.BinOp) and isinstance(x.op, ast.BitOr)]
    assert not unions or "from __future__ import annotations" in source


FAKE_PYTHON = """#!{python}
import runpy, sys
sys.version_info = (3, 9, 6, "final", 0)
option, what, *_ = [*sys.argv[1:], ""]
if option == "-m" and what == "venv":
    sys.exit("made a virtual environment")
sys.argv = sys.argv[2:] if option == "-m" else sys.argv[1:]
sys.path[:0] = [{root!r}]
(runpy.run_module(what, run_name="__main__") if option == "-m" else runpy.run_path(option, run_name="__main__"))
"""


@pytest.fixture
def old_pythons(tmp_path):
    """Return interpreters that are too old: a fake that reports 3.9, and a real Python 3.9 if installed."""
    made = tmp_path / "python3"
    made.write_text(FAKE_PYTHON.format(python=sys.executable, root=str(ROOT)))
    made.chmod(0o755)
    real = shutil.which("python3.9")
    works = real and not subprocess.run([real, "-c", ""], capture_output=True).returncode
    return [str(made), *([real] if works else [])]


def test_make_stops_before_it_creates_an_environment(old_pythons, tmp_path):
    for python in old_pythons:
        environment = tmp_path / "environment"
        command = ["make", "demo", f"PYTHON={python}", f"VENV={environment}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        first, *_ = done.stderr.splitlines()
        assert done.returncode and first.startswith("mlx-snapkv: Python 3.10 or later is needed")
        assert not environment.exists() and "Traceback" not in done.stderr


def test_python_m_mlx_snapkv_refuses_an_old_python(old_pythons):
    for python in old_pythons:
        command = [python, "-m", "mlx_snapkv", "--help"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
        )
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and "is needed, and this is 3.9" in done.stderr


def test_an_mlx_that_can_not_be_imported_is_one_line(monkeypatch, capsys):
    missing = ImportError("Library not loaded: libmlx.dylib", name="mlx.core", path="/mlx/core.so")
    for error, code in ((missing, 1), (ImportError("no", name="rich"), None)):

        def broken(error=error, **_):
            raise error

        with pytest.raises(ImportError if code is None else SystemExit):
            app.main(broken)
        said = capsys.readouterr().err
        if code is not None:
            assert said.startswith("mlx-snapkv: MLX can't be imported (ImportError: Library not")
            assert said.count("\n") == 1
