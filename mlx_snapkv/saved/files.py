"""Prompt caches in files: what a long text cost to read is paid once.

The format is mlx-lm's own, which its `load_prompt_cache` reads too, with more metadata. Files that mlx-lm's
`save_prompt_cache` made load as well.
"""

import base64
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
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from .._version import __version__
from ..caches.matching import adopt, require_match, require_tokens
from ..engine.report import NO_POLICY
from ..errors import SnapKVError
from ..paths import path_of, reason, require_place
from ..policies import Policy, Stages
from ..several.shard import require_whole
from . import book
from . import checksum as saved_checksum
from . import header as saved_header
from .fingerprint import fingerprint

FORMAT = 3
_MARK = "mlx_snapkv_format"


@dataclass
class SavedPrompt:
    """A prompt read from a file.

    Attributes:
        prompt_cache: to be continued by mlx-lm's or our own `generate_step`.
        tokens: the prompt's token ids; None if mlx-lm saved the file, which does not keep them.
        policy: what compressed it, as its command-line string, or NO_POLICY.
        notes: what its maker wanted to be kept; mlx-lm's metadata if mlx-lm saved the file.
    """

    prompt_cache: list
    tokens: list[int] | None
    policy: str = NO_POLICY
    notes: dict[str, Any] = field(default_factory=dict)


def save(
    path: str | Path,
    model,
    prompt_cache: list,
    tokens: mx.array | Sequence[int],
    policy: Policy | Stages | str = NO_POLICY,
    notes: dict[str, Any] | None = None,
    progress: book.Progress | None = None,
) -> None:
    """Write a prompt cache to a file, which is there as a whole or not at all.

    The entries of a book, which its caches keep in a store, are written to a folder beside the file, which goes when
    the file is replaced. Both may be moved to another place together.

    Args:
        path: of a `.safetensors` file; one that an earlier `save` wrote is replaced, any other file is an error.
        model: the mlx-lm model that filled the cache; the file will be good for no other.
        tokens: the ids of all tokens that were fed.
        policy: what compressed the cache.
        notes: anything JSON can hold, to be given back by `load`.
        progress: called with the bytes of a book's entries that are written, and all there are.

    Raises:
        SnapKVError: the file can't be written, or the cache does not hold these tokens.
    """
    require_whole(model, "prompt caches can't be saved")
    path = require_writable(path)
    ids = np.asarray(tokens, dtype=np.uint32)
    require_tokens(prompt_cache, ids.size)
    metadata = {
        _MARK: str(FORMAT),
        "mlx_snapkv": __version__,
        "mlx_lm": mlx_lm.__version__,
        "fingerprint": fingerprint(model),
        "policy": str(policy),
        "tokens": _pack(ids.tobytes()),
        "notes": _pack(json.dumps(notes or {}).encode()),
        saved_checksum.KEY: saved_checksum.UNKNOWN,
    }
    _write(path, prompt_cache, metadata, progress)


def load(path: str | Path, model) -> SavedPrompt:
    """Read a prompt cache that `save` or mlx-lm's `save_prompt_cache` wrote, for the model that filled it.

    Of a book only what is resident is read. All other entries stay in their files, and are read and checked as they are
    asked for; several processes may ask the same ones at once.

    Raises:
        SnapKVError: there is no such file, it is damaged or of a newer format, or it is another model's.
    """
    require_whole(model, "saved prompt caches can't be loaded")
    path = _safetensors(path)
    found, prompt_cache = _read(path)
    ours = _is_marked(found)
    if ours and found["fingerprint"] != fingerprint(model):
        raise SnapKVError(
            f"{path} was made with another model or other weights (mlx-lm {found['mlx_lm']}): "
            "give the model it was made with"
        )
    notes, tokens = tokens_in(found) if ours else (found, None)
    try:
        require_match(prompt_cache, model)
        require_tokens(prompt_cache, None if tokens is None else len(tokens))
        _open_book(path, prompt_cache, found.get(book.KEY) if ours else None)
    except SnapKVError as error:
        again = "" if ours else "; save the prompt by mlx-snapkv cache-prompt"
        raise SnapKVError(f"{path} can't be used: {error}{again}") from error
    adopt(prompt_cache, model)
    policy = found["policy"] if ours else NO_POLICY
    return SavedPrompt(prompt_cache, tokens, policy, notes)


def _is_marked(found: dict[str, str]) -> bool:
    return not {_MARK, saved_checksum.KEY}.isdisjoint(found)


def _read(path: Path) -> tuple[dict[str, str], list]:
    """A file's metadata and caches; SnapKVError if it is damaged or of another format."""
    found = saved_header.read(path)
    ours = _is_marked(found)
    if ours:
        _require_format(path, found)
    try:
        prompt_cache, _ = load_prompt_cache(str(path), return_metadata=True)
        mx.eval([cache.state for cache in prompt_cache])
    except Exception as error:  # whatever is in the file
        raise SnapKVError(
            f"{path} is not a prompt cache that mlx-snapkv or mlx-lm can read"
        ) from error
    return found, prompt_cache


def _open_book(path: Path, prompt_cache: list, text: str | None) -> None:
    if text is not None:
        book.open_book(path, text, prompt_cache)
    elif book.archives(prompt_cache):
        raise SnapKVError("it holds what was resident of a book, and not its other entries")


def tokens_in(found: dict[str, str]) -> tuple[dict[str, Any], list[int]]:
    """The notes and tokens that a file's header tells; SnapKVError if it is not one that `save` wrote."""
    try:
        tokens = np.frombuffer(_unpack(found["tokens"]), np.uint32).tolist()
        return json.loads(_unpack(found["notes"])), tokens
    except Exception as error:  # whatever stands there
        raise SnapKVError("a saved prompt cache's header is damaged, or mlx-lm's") from error


def require_writable(path: str | Path) -> Path:
    """The path, if `save` can write there.

    Raises:
        SnapKVError: it can't, or the name does not end in `.safetensors`, or another kind of file is there.
    """
    path = _safetensors(path)
    if require_place(path) and not _is_ours(path):
        raise SnapKVError(
            f"{path} is there already, and mlx-snapkv did not save it: give another name"
        )
    return path


def _is_ours(path: Path) -> bool:
    try:
        return _MARK in saved_header.read(path)
    except SnapKVError:
        return False


def _write(
    path: Path, prompt_cache: list, metadata: dict[str, str], progress: book.Progress | None
) -> None:
    """Write beside the file, and put the whole in its place; SnapKVError if the file can't be written."""
    target = Path(os.path.realpath(path))
    try:
        with (
            book.written(target, prompt_cache, progress) as more,
            saved_checksum.sealed(target) as writer,
        ):
            save_prompt_cache(writer, prompt_cache, metadata | more)
    except (OSError, RuntimeError) as error:
        raise SnapKVError(f"{path} can't be written: {reason(error)}") from error


def _safetensors(path: str | Path) -> Path:
    path = path_of(path)
    if path.suffix != ".safetensors" or "\0" in path.name:
        raise SnapKVError(
            f"a saved prompt cache's name must end in .safetensors, got {str(path)!r}"
        )
    return path


def _require_format(path: Path, found: dict[str, str]) -> None:
    """Raises: SnapKVError: the file is not as this version wrote it."""
    number = found.get(_MARK, "")
    if number.isdecimal() and int(number) > FORMAT:
        raise SnapKVError(
            f"{path} has format {number}, this version reads up to {FORMAT}: upgrade mlx-snapkv"
        )
    if not saved_checksum.is_whole(path):
        raise SnapKVError(f"{path} is damaged: its checksum does not fit; save the prompt again")


def _pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
