"""A prompt cache that several Macs hold, in files: each writes its part, and rank 0 at last the file that names them.

That file has the name that was asked for, and no entries. Parts lie beside it, each on its own Mac's disk; on as many
ranks as wrote them, each reads its own. For one Mac, or other numbers of them, all parts have to be in one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..errors import SnapKVError
from ..paths import reason
from ..several.part import Part
from . import checksum, header
from .shares import joined, share_of

KEY = "parts"  # of the file that names them, and
PART_KEY = "part"  # of one of them
FORMAT = 4

Manifest = dict[str, Any]
Reading = Callable[[Path], tuple[dict[str, str], list]]


def save(
    path: Path, part: Part, metadata: dict[str, str], write: Callable[[Path, dict[str, str]], None]
) -> None:
    """Write this rank's part, and on rank 0, when all have, the file that names the parts; all ranks have to call it.

    Args:
        metadata: of the prompt.
        write: puts this rank's caches into a file, with more metadata.

    Raises:
        SnapKVError: a rank could not write; nothing that was there before has changed then.
    """
    ranks = part.ranks
    target = Path(os.path.realpath(path))
    token = ranks.first(secrets.token_hex(6))
    names = [f"{target.stem}-{token}.{r + 1}of{ranks.size}.safetensors" for r in range(ranks.size)]
    manifest = {"kind": part.kind, "names": names}
    before = ranks.from_first(lambda: read_manifest(target) if target.exists() else None)
    own = target.with_name(names[ranks.rank])
    try:
        ranks.agreed(lambda: write(own, {PART_KEY: json.dumps([part.kind, ranks.rank])}))
        ranks.from_first(lambda: _write_manifest(target, metadata | {KEY: json.dumps(manifest)}))
    except BaseException:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
        raise
    for name in before["names"] if before else ():
        with contextlib.suppress(OSError):
            target.with_name(name).unlink(missing_ok=True)


def read_manifest(path: Path) -> Manifest | None:
    """What a file says about parts; None if it is not one that names any, or can't be read."""
    try:
        found = header.read(path)
    except SnapKVError:
        return None
    if KEY not in found:
        return None
    try:
        manifest = json.loads(found[KEY])
        sound = checksum.is_whole(path) and manifest["kind"] and manifest["names"]
        own = all(Path(name).name == name for name in manifest["names"])
    except (ValueError, TypeError, LookupError):
        sound = own = False
    if not sound or not own:
        raise SnapKVError(f"{path} is damaged: save the prompt again")
    return manifest


def read(
    path: Path, manifest: Manifest | None, part: Part, model: Any, read_file: Reading
) -> tuple[dict[str, str], list]:
    """The metadata of a prompt, and what this rank is to have of its caches, or all if it is alone.

    Args:
        manifest: what the file says of parts; None if it holds the whole.
        read_file: of one file, its metadata and caches.

    Raises:
        SnapKVError: a rank could not read what it needs.
    """
    ranks = part.ranks
    counts = ranks.gather(len(make_prompt_cache(model)))

    def work() -> tuple[dict[str, str], list]:
        if manifest is None:
            found, whole = read_file(path)
        else:
            names, kind = manifest["names"], manifest["kind"]
            files = [Path(os.path.realpath(path)).with_name(name) for name in names]
            if kind == part.kind and len(names) == ranks.size:
                return _read_part(files[ranks.rank], read_file)
            read_all = [_read_part(file, read_file) for file in files]
            found, whole = read_all[0][0], joined([caches for _, caches in read_all], kind)
        if part.kind is not None:
            whole = share_of(whole, part.kind, ranks.rank, counts)
        return found, whole

    return ranks.agreed(work)


def _read_part(file: Path, read_file: Reading) -> tuple[dict[str, str], list]:
    if not file.exists():
        raise SnapKVError(f"{file} is not there: copy all parts of the prompt beside its file")
    return read_file(file)


def _write_manifest(target: Path, metadata: dict[str, str]) -> None:
    described = {f"0.{name}": text for name, text in metadata.items()} | {"1.0": "Parts"}
    try:
        with checksum.sealed(target) as writer:
            mx.save_safetensors(writer, {"nothing": mx.zeros((1,))}, described)
    except OSError as error:
        raise SnapKVError(f"{target} can't be written: {reason(error)}") from error
