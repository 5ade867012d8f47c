"""A model as it will be, of which no weight is loaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import load_model


def without_weights(folder: str | Path) -> nn.Module:
    """The model of a folder, built by mlx-lm's loader from its configuration and the headers of its weights' files.

    The weights are blank: a model that is called answers nothing, but its layers and caches have their shapes.

    Raises:
        Exception: whatever mlx-lm raises for a folder that it can't load.
    """
    model, _ = load_model(Path(folder), lazy=True)
    model.update(tree_map(_blank, model.parameters()))
    return model


def repository_without_weights(name: str) -> nn.Module:
    """The same for a repository of the Hugging Face hub: its configuration and the headers are all that is downloaded.

    Raises:
        huggingface_hub.errors.HfHubHTTPError, LocalEntryNotFoundError: it can't be had.
        Exception: as of `without_weights`.
    """
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    config = Path(hf_hub_download(name, "config.json"))
    headers = get_safetensors_metadata(name).files_metadata
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config.read_bytes())
        for file, header in headers.items():
            names = "dtype", "shape", "data_offsets"
            tensors = {
                k: {name: getattr(x, name) for name in names} for k, x in header.tensors.items()
            }
            _write_empty(Path(folder) / Path(file).name, tensors)
        return without_weights(folder)


def _write_empty(path: Path, tensors: dict[str, dict[str, Any]]) -> None:
    """A safetensors file of its header and, as a hole that takes no room on the disk, its data."""
    header = json.dumps(tensors).encode()
    end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _blank(x: mx.array) -> mx.array:
    """An array of the same shape that holds a single number, whoever computes it."""
    return mx.broadcast_to(mx.zeros((), x.dtype), x.shape)
