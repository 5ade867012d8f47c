"""Folders of models that are nearly the embedded one."""

import json
import shutil

from mlx_snapkv.demo import MODELS


def demo_with(folder, **changes):
    """The embedded LLaMA in a new folder, with changes to its configuration; the folder."""
    shutil.copytree(MODELS["demo"], folder)
    change(folder / "config.json", **changes)
    return folder


def change(file, **changes):
    """Change fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
