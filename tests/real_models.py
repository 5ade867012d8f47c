"""Real language models for tests, which are skipped unless scripts/make_real_models.py has written the models."""

import functools
import os
from pathlib import Path

import pytest
from mlx_lm import load

FOLDER = Path(os.environ.get("MLX_SNAPKV_REAL_MODELS") or Path(__file__).parents[1] / "real-models")
MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
LARGER = "qwen2.5-coder-1.5b-instruct"  # 7 GB: tests load its tokenizer only


def real_folder(name: str) -> Path:
    """Return the folder of a model, or of "essays". Skip the test if it is missing."""
    if not (FOLDER / name).is_dir():
        pytest.skip(f"{FOLDER / name} is not there: scripts/make_real_models.py writes it")
    return FOLDER / name


def real_model(name: str):
    """Return a model and its tokenizer. Skip the test if the model's folder is missing."""
    return _load(real_folder(name))


def essay(name: str) -> str:
    """Return the text of an essay. Skip the test if the essays are missing."""
    return (real_folder("essays") / f"{name}.txt").read_text(encoding="utf-8")


@functools.cache
def _load(folder: Path):
    return load(str(folder))
