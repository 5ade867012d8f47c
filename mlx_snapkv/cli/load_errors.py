"""Why a model can't be loaded: which file is at fault, or what the Hugging Face hub said."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from ..errors import brief

JSON_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
# A tokenizer has one of these.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tekken.json",
)
SHOWN = 5  # cached repositories

# The step of mlx-lm's loader that failed, and what it was about.
STEPS = {
    "load_tokenizer": "its tokenizer can't be read",
    "load_adapters": "the adapters don't fit",
    "load_weights": "its weights don't fit its config.json",
    "load_model": "its config.json does not describe such a model",
}


def of_repository(name: str, error: Exception) -> str | None:
    """Why a repository can't be had; None if the error is about something else."""
    if isinstance(error, LocalEntryNotFoundError):
        why = "the Hugging Face hub can't be reached"
        if constants.HF_HUB_OFFLINE:
            why = "the Hugging Face hub is not asked since HF_HUB_OFFLINE is set"
        cached = _cached_models()
        part = "only a part of it" if name in cached else f"no such repository ({_listed(cached)})"
        return f"no such folder, {why}, and the local cache holds {part}"
    if isinstance(error, GatedRepoError):
        return (
            f"access has to be granted: ask at https://huggingface.co/{name}, then `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "no such folder, and the Hugging Face hub has no such repository; "
            "for a private one, `hf auth login`"
        )
    if isinstance(error, HfHubHTTPError):
        return f"no such folder, and the Hugging Face hub failed: {brief(error)}"
    return None


def of_files(folder: Path, error: Exception) -> str:
    """What is wrong with a model folder that mlx-lm could not load, and in which file."""
    for name in JSON_FILES:
        problem = _json_problem(folder / name)
        if problem is not None:
            return f"{name} {problem}"
    if "model_type" not in json.loads((folder / "config.json").read_bytes()):
        return "config.json names no model_type"
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        return "no weights there: model.safetensors, or several model-*.safetensors"
    for file in weights:
        if not _is_whole(file):
            return f"{file.name} is damaged or cut short"
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    has_tokenizer = any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)
    if "load_tokenizer" in frames and not has_tokenizer:
        return "no tokenizer there: tokenizer.json, for one"
    step = next((about for name, about in STEPS.items() if name in frames), "mlx-lm can't load it")
    return f"{step}: {brief(error)}"


def _cached_models() -> list[str]:
    try:
        return sorted(r.repo_id for r in scan_cache_dir().repos if r.repo_type == "model")
    except CacheNotFound:
        return []


def _listed(cached: list[str]) -> str:
    if not cached:
        return f"{constants.HF_HUB_CACHE} is empty"
    more = f" and {len(cached) - SHOWN} more" if len(cached) > SHOWN else ""
    return f"it has {', '.join(cached[:SHOWN])}{more}"


def _json_problem(file: Path) -> str | None:
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        return f"can't be read: {error.strerror}"
    except ValueError as error:
        return f"is no JSON: {error}"
    return None if isinstance(found, dict) else "is no JSON object"


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its head says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            head = json.loads(data.read(length) if length < size else b"")
        ends = [e["data_offsets"][1] for name, e in head.items() if name != "__metadata__"]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return False
    return size == 8 + length + max(ends, default=0)
