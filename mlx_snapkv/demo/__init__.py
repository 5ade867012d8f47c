"""Embedded demo models, and synthetic documents to ask them about."""

from pathlib import Path

_MODELS_FOLDER = Path(__file__).parent / "models"

# Maps names that --model accepts to the folders of the embedded models.
MODELS: dict[str, Path] = {
    "demo": _MODELS_FOLDER / "llama",
    "demo-qwen3-next": _MODELS_FOLDER / "qwen3-next",
    "demo-tasks": _MODELS_FOLDER / "tasks",
}
