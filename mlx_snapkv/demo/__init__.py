"""The embedded models, and documents to ask them about."""

from pathlib import Path

_MODELS_FOLDER = Path(__file__).parent / "models"

# The folder of each embedded model, by the name that --model takes.
MODELS: dict[str, Path] = {
    "demo": _MODELS_FOLDER / "llama",
    "demo-qwen3-next": _MODELS_FOLDER / "qwen3-next",
    "demo-tasks": _MODELS_FOLDER / "tasks",
}
