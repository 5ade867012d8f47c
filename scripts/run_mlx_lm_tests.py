"""mlx-lm's own tests of models, generation and caches, without this package and with it imported and patched in.

    python scripts/run_mlx_lm_tests.py

The tests come from the source archive of the installed mlx-lm. Where they load a model from the Hugging Face
hub, they find the embedded LLaMA under that name instead, so some fail for want of that model or of Metal;
what counts is that the package changes no outcome.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from mlx_snapkv.demo import MODELS

FILES = ("test_models.py", "test_generate.py", "test_prompt_cache.py")
PLUGIN = "import mlx_snapkv\n\nmlx_snapkv.patch_for_snapkv()\n"


def fetched(folder: Path) -> Path:
    """The tests of the installed mlx-lm version."""
    name = f"mlx-lm=={version('mlx-lm')}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mlx-lm"]
    subprocess.run([*pip, "--dest", str(folder), name], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/tests"))


def put_in_hub(tests: Path, hub: Path) -> None:
    """The embedded LLaMA in a hub cache, under every name that the tests ask for."""
    text = "".join((tests / name).read_text() for name in FILES)
    for name in set(re.findall(r'"(mlx-community/[^"]+)"', text)):
        folder = hub / ("models--" + name.replace("/", "--"))
        shutil.copytree(MODELS["demo"], folder / "snapshots" / "embedded")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("embedded")


def outcomes(tests: Path, hub: Path, plugins: list[str]) -> dict[str, str]:
    """Test -> "passed", "failed" or "skipped"."""
    report = tests / "report.xml"
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options += [option for plugin in plugins for option in ("-p", plugin)]
    given = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tests)}
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    subprocess.run(command, cwd=tests, env=os.environ | given, stdout=subprocess.DEVNULL)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        tests, hub = fetched(Path(name)), Path(name) / "hub"
        put_in_hub(tests, hub)
        (tests / "patched_in.py").write_text(PLUGIN)
        plain, patched = outcomes(tests, hub, []), outcomes(tests, hub, ["patched_in"])
    print(f"without: {Counter(plain.values())}; patched in: {Counter(patched.values())}")
    changed = [test for test in plain if patched.get(test) != plain[test]]
    for test in changed:
        print(f"changed: {test}: {plain[test]} -> {patched.get(test)}")
    sys.exit(bool(changed) or not plain)


if __name__ == "__main__":
    main()
