"""Built-in demo models, and synthetic documents to ask them about."""

from pathlib import Path

_MODELS_FOLDER = Path(__file__).parent / "models"

# The built-in models' folders, by the names that --model accepts.
MODELS: dict[str, Path] = {
    "demo": _MODELS_FOLDER / "llama",
    "demo-qwen3-next": _MODELS_FOLDER / "qwen3-next",
    "demo-tasks": _MODELS_FOLDER / "tasks",
}
