"""Run mlx-lm's own tests for models, generation and caches, with and without this package's patches.

    python scripts/run_mlx_lm_tests.py

The tests come from the source archive of the installed mlx-lm. Tests that load a model from the Hugging Face hub get
the built-in LLaMA instead. Some tests fail because they need the real model or Metal. The package must not change any
outcome.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from mlx_snapkv.demo import MODELS

FILES = ("test_models.py", "test_generate.py", "test_prompt_cache.py")
PLUGIN = "import mlx_snapkv\n\nmlx_snapkv.patch_for_snapkv()\n"


def outcomes(tests: Path, hub: Path, *options: str) -> set[str]:
    """Run the tests. Return a line with the outcome of each."""
    variables = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tests)}
    command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*command, *options, *FILES],
        cwd=tests,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    # A line such as "test_models.py::TestModels::test_llama PASSED".
    test_and_outcome = re.compile(r"^\S+::\S+ [A-Z]+", re.M)
    return set(test_and_outcome.findall(process.stdout))


def main() -> None:
    """Run the tests twice, print the outcomes that differ, and exit with 1 if any differs or none was run."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mlx-lm"]
    with tempfile.TemporaryDirectory() as name:
        folder, hub = Path(name), Path(name) / "hub"
        subprocess.run([*pip, "--dest", name, f"mlx-lm=={version('mlx-lm')}"], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        tests = next(folder.glob("*/tests"))
        text = "".join((tests / file).read_text() for file in FILES)
        for model in set(re.findall(r'"(mlx-community/[^"]+)"', text)):
            cached = hub / ("models--" + model.replace("/", "--"))
            shutil.copytree(MODELS["demo"], cached / "snapshots" / "embedded")
            (cached / "refs").mkdir()
            (cached / "refs" / "main").write_text("embedded")
        (tests / "patched_in.py").write_text(PLUGIN)
        plain, patched = outcomes(tests, hub), outcomes(tests, hub, "-p", "patched_in")
    print(f"{len(plain)} tests, of which {sum(line.endswith('PASSED') for line in plain)} pass")
    print("\n".join(f"changed: {line}" for line in sorted(plain ^ patched)))
    sys.exit(not plain or plain != patched)


if __name__ == "__main__":
    main()
