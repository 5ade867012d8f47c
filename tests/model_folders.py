"""Folders with variants of the built-in model."""

import json
import shutil

import mlx.core as mx

from mlx_snapkv.demo import MODELS


def demo_with(folder, **changes):
    """Copy the built-in LLaMA to a new folder with a changed configuration, and return the folder."""
    shutil.copytree(MODELS["demo"], folder)
    change(folder / "config.json", **changes)
    return folder


def wide_demo(folder):
    """Copy the built-in LLaMA to a new folder in float32, and return the folder."""
    weights = mx.load(str(demo_with(folder) / "model.safetensors"))
    wide = {name: x.astype(mx.float32) for name, x in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "pt"})
    return folder


def change(file, **changes):
    """Change fields in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
