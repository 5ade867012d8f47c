"""The embedded models, and documents to ask them about."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "models"

# What `--model NAME` means besides folders and repositories.
MODELS: dict[str, Path] = {
    "demo": _FOLDER / "llama",
    "demo-qwen3-next": _FOLDER / "qwen3-next",
    "demo-tasks": _FOLDER / "tasks",
}
