"""Saves and loads prompt caches in mlx-lm's file format, with additional metadata.

Files are compatible both ways. `load` reads files written by mlx-lm's `save_prompt_cache`. Files written by `save`,
except for books, can be read by mlx-lm's `load_prompt_cache` once this package's cache classes are imported.
"""

import base64
import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from .._version import __version__
from ..caches.layers import first_sparse_position, layer_caches
from ..caches.matching import require_match, require_tokens, set_missing_layers
from ..engine.report import NO_POLICY
from ..errors import SnapKVError
from ..models.distributed import require_on_one_mac
from ..paths import path_of, reason, require_place
from ..planning.settings import Setting
from ..sparse.prompt_caches import caches_in_files
from . import book, sealed

FORMAT = 2
SAMPLES = 64  # the fingerprint includes at most this many values of each parameter
_FORMAT_KEY = "mlx_snapkv_format"
_SPARSE_FROM = "sparse_from"  # position of the first entry computed with sparse attention, or None
_NOTES, _TOKENS = "notes", "tokens"  # metadata encoded by `_encode`


@dataclass
class SavedPrompt:
    """A prompt loaded from a file.

    Attributes:
        prompt_cache: caches to continue from, with mlx-lm's `generate_step` or this package's.
        tokens: token ids of the prompt. None for files saved by mlx-lm, which do not contain them.
        policy: the setting that compressed the cache, as written on the command line.
        notes: the notes passed to `save`, or mlx-lm's metadata.
    """

    prompt_cache: list
    tokens: list[int] | None
    policy: str = NO_POLICY
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_from_mlx_lm(self) -> bool:
        """Return whether mlx-lm saved the file. Such a file contains no tokens."""
        return self.tokens is None


def save(
    path: str | Path,
    model,
    prompt_cache: list,
    tokens: mx.array | Sequence[int],
    policy: Setting | str = NO_POLICY,
    notes: dict[str, Any] | None = None,
    progress: book.Progress | None = None,
    *,
    model_fingerprint: str | None = None,
) -> None:
    """Save a prompt cache to a file atomically.

    If the cache's entries are in files, the cache is saved as a book, with the entries in a folder next to the file. To
    move a book, move the file and the folder.

    Args:
        path: a `.safetensors` file. A file that `save` wrote is replaced. Any other existing file is an error.
        model: the mlx-lm model that filled the cache. The file can only be used with this model.
        prompt_cache: one cache per layer, from mlx-lm or from this package.
        tokens: ids of all tokens in the cache.
        policy: the setting that compressed the cache.
        notes: JSON-serialisable data for `load` to return.
        progress: for a book, called with the number of bytes written and the total.
        model_fingerprint: the model's `fingerprint`, if it is already known.

    Raises: SnapKVError: the file can't be written, it exists and `save` did not write it, the cache does not hold
        `len(tokens)` tokens, or several Macs share the model.
    """
    require_on_one_mac(model, "prompt caches can't be saved")
    path = require_writable(path)
    ids = np.asarray(tokens, dtype=np.uint32)
    require_tokens(prompt_cache, ids.size)
    metadata = {
        _NOTES: _encode(json.dumps(notes or {}).encode()),
        _TOKENS: _encode(ids.tobytes()),
        _FORMAT_KEY: str(FORMAT),
        "mlx_snapkv": __version__,
        "mlx_lm": mlx_lm.__version__,
        "fingerprint": model_fingerprint or fingerprint(model),
        "policy": str(policy),
        _SPARSE_FROM: str(first_sparse_position(prompt_cache)),
        sealed.CHECKSUM_KEY: sealed.UNKNOWN,
    }
    target = Path(os.path.realpath(path))
    try:
        with (
            book.write_book(target, prompt_cache, progress) as book_metadata,
            sealed.open_writer(target) as file,
        ):
            save_prompt_cache(file, prompt_cache, metadata | book_metadata)
    except (OSError, RuntimeError) as error:
        raise SnapKVError(f"{path} can't be written: {reason(error)}") from error


def load(
    path: str | Path,
    model,
    *,
    model_fingerprint: str | None = None,
    store_dir: str | None = None,
) -> SavedPrompt:
    """Load a prompt cache that was saved by `save` or by mlx-lm's `save_prompt_cache`.

    If the file is a book, the keys and values in its entry files are not loaded here. They are read and verified when
    they are used.

    Args:
        path: a `.safetensors` file.
        model: the model that filled the cache.
        model_fingerprint: the model's `fingerprint`, if it is already known.
        store_dir: folder for a book's temporary files, TMPDIR by default. A book of more than 65,536 tokens has some.

    Raises: SnapKVError: the file does not exist, is damaged, is not a saved prompt cache, has a different format
        version or is for another model, or several Macs share the model.
    """
    require_on_one_mac(model, "saved prompt caches can't be loaded")
    path = _safetensors_path(path)
    metadata = sealed.read_metadata(path)
    is_ours = not {_FORMAT_KEY, sealed.CHECKSUM_KEY}.isdisjoint(metadata)
    if is_ours:
        _require_readable(path, metadata)
    prompt_cache = _read_caches(path)
    if is_ours and metadata["fingerprint"] != (model_fingerprint or fingerprint(model)):
        why = f"was made with another model or other weights, or in another dtype (mlx-lm {metadata['mlx_lm']})"
        raise SnapKVError(f"{path} {why}: give the model it was made with")
    notes: dict[str, Any] = metadata
    tokens: list[int] | None = None
    if is_ours:
        notes, tokens = notes_and_tokens(metadata)
    try:
        if is_ours and book.BOOK_KEY in metadata:
            folder = None if store_dir is None else os.path.expanduser(store_dir)
            book.open_book(path, metadata[book.BOOK_KEY], prompt_cache, folder)
        elif caches_in_files(prompt_cache):
            raise SnapKVError("it does not say where its entries are")
        require_match(prompt_cache, model)
        require_tokens(prompt_cache, None if tokens is None else len(tokens))
    except SnapKVError as error:
        advice = "" if is_ours else "; save the prompt with mlx-snapkv cache-prompt"
        raise SnapKVError(f"{path} can't be used: {error}{advice}") from error
    set_missing_layers(prompt_cache, model)
    if not is_ours:
        return SavedPrompt(prompt_cache, tokens, notes=notes)
    sparse_from = metadata[_SPARSE_FROM]
    for cache in layer_caches(prompt_cache):
        cache.sparse_from = None if sparse_from == "None" else int(sparse_from)
    return SavedPrompt(prompt_cache, tokens, metadata["policy"], notes)


def _read_caches(path: Path) -> list:
    """Use mlx-lm to load the caches in a file. Raises: SnapKVError: mlx-lm can't read them."""
    try:
        prompt_cache = load_prompt_cache(str(path))
        mx.eval([cache.state for cache in prompt_cache])  # read the arrays now
    except Exception as error:  # foreign or damaged files may contain anything
        problem = "is not a prompt cache that mlx-snapkv or mlx-lm can read"
        raise SnapKVError(f"{path} {problem}") from error
    return prompt_cache


def _require_readable(path: Path, metadata: dict[str, str]) -> None:
    """Check a file that `save` wrote. Raises: SnapKVError: it is damaged, or has a different format version."""
    if not sealed.has_valid_checksum(path):
        raise SnapKVError(f"{path} is damaged: its checksum does not match; save the prompt again")
    if metadata[_FORMAT_KEY] != str(FORMAT):
        problem = f"has format {metadata[_FORMAT_KEY]}, but this version reads format {FORMAT}"
        raise SnapKVError(f"{path} {problem}: save the prompt again with mlx-snapkv cache-prompt")


def notes_and_tokens(metadata: dict[str, str]) -> tuple[dict[str, Any], list[int]]:
    """Parse the notes and tokens in a file's metadata.

    Raises: SnapKVError: the metadata is damaged, or was not written by `save`.
    """
    try:
        notes = json.loads(_decode(metadata[_NOTES]))
        tokens = np.frombuffer(_decode(metadata[_TOKENS]), np.uint32).tolist()
        return notes, tokens
    except Exception as error:  # foreign or damaged headers may contain anything
        raise SnapKVError("the header is damaged, or mlx-lm wrote this prompt cache") from error


def _encode(data: bytes) -> str:
    """Compress bytes with zlib and encode them in base64 for a file's metadata."""
    return base64.b64encode(zlib.compress(data)).decode()


def _decode(text: str) -> bytes:
    """Decode text that `_encode` encoded."""
    return zlib.decompress(base64.b64decode(text))


def require_writable(path: str | Path) -> Path:
    """Check that `save` can write to `path`, and return it as a `Path`.

    Raises: SnapKVError: the file can't be written, or it exists and `save` did not write it.
    """
    path = _safetensors_path(path)
    metadata: dict[str, str] = {}
    file_exists = require_place(path)
    if file_exists:
        with contextlib.suppress(SnapKVError):
            metadata = sealed.read_metadata(path)
        if _FORMAT_KEY not in metadata:
            problem = "exists, and mlx-snapkv did not save it"
            raise SnapKVError(f"{path} {problem}: give another name")
    return path


def _safetensors_path(path: str | Path) -> Path:
    """Convert a file name to a path. Raises: SnapKVError: it does not end in .safetensors."""
    path = path_of(path)
    if path.suffix != ".safetensors" or "\0" in path.name:
        problem = "a saved prompt cache's name must end in .safetensors"
        raise SnapKVError(f"{problem}, got {str(path)!r}")
    return path


def fingerprint(model) -> str:
    """Hash a model's class and configuration, and each parameter's name, shape, dtype and a sample of its values.

    At most `SAMPLES` evenly spaced values per parameter are hashed, so that hashing is fast even for a large model.
    Training is detected, because it changes all values. A change to a few weights can go unnoticed.
    """
    parameters = sorted(dict(tree_flatten(model.parameters())).items())
    samples = []
    for _, values in parameters:
        n_samples = min(SAMPLES, values.size)
        # Evenly spaced indices, from the first value to the last.
        last_index = values.size - 1
        indices = [i * last_index // max(1, n_samples - 1) for i in range(n_samples)]
        sample = values.reshape(-1)[mx.array(indices, mx.int64)]
        samples.append(sample.view(mx.uint8))  # NumPy has no bfloat16
    mx.eval(samples)
    digest = hashlib.sha256(f"{type(model)} {getattr(model, 'args', None)!r}".encode())
    for (name, values), sample in zip(parameters, samples):
        digest.update(f"{name} {values.shape} {values.dtype}".encode())
        digest.update(bytes(np.asarray(sample)))
    return digest.hexdigest()
