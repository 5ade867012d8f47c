"""Models and prompts from what a user typed."""

from __future__ import annotations

import sys
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..demo import MODELS
from ..errors import SnapKVError


def load_model(name: str, adapter_path: str | None = None, trust_remote_code: bool = False):
    """The model and tokenizer that mlx-lm loads for a folder, a hub repository or an embedded model's name.

    Raises:
        SnapKVError: nothing is there, or mlx-lm can't read it; the message says what was looked for.
    """
    import mlx.core as mx
    from mlx_lm import load

    folder = MODELS.get(name) or Path(name).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise SnapKVError(
                f"--model {name}: no config.json in that folder, so it is not a model folder"
            )
    elif not _may_be_repository(name):
        raise SnapKVError(
            f"--model {name}: no such folder, and not the name of a Hugging Face repository; "
            f"embedded models: {', '.join(MODELS)}"
        )
    if adapter_path is not None and not Path(adapter_path).exists():
        raise SnapKVError(f"--adapter-path {adapter_path}: no such folder")
    try:
        model, tokenizer, *_ = load(
            str(folder if folder.exists() else name),
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code},
            trust_remote_code=trust_remote_code,
        )
        if name in MODELS and mx.default_device() == mx.Device(mx.cpu):
            model.set_dtype(mx.float32)  # CPUs only emulate float16, several times slower
        return model, tokenizer
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ConnectionError) as error:
        if folder.exists():
            raise SnapKVError(f"--model {name}: can't be read: {_first_line(error)}") from error
        raise SnapKVError(
            f"--model {name}: no such folder, and no such repository could be fetched from the Hugging Face hub"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SnapKVError(f"--model {name}: mlx-lm can't load it: {_first_line(error)}") from error


def _may_be_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text to read: a file, then the prompt; `-` is standard input for either.

    Raises:
        SnapKVError: neither is given, the file can't be read or is not text, or the text is empty.
    """
    if prompt is None and prompt_file is None:
        raise SnapKVError(
            "nothing to read: give --prompt TEXT, --prompt-file FILE, or --prompt - for stdin"
        )
    if prompt == "-" and prompt_file == "-":
        raise SnapKVError("--prompt and --prompt-file can't both read standard input")
    parts = []
    if prompt_file is not None:
        parts.append(_read_stdin() if prompt_file == "-" else _read_file(prompt_file))
    if prompt is not None:
        # As mlx-lm does: \n and \t may be typed on the command line.
        typed = prompt.replace("\\n", "\n").replace("\\t", "\t")
        parts.append(_read_stdin() if prompt == "-" else typed)
    text = "\n\n".join(parts)
    if not text.strip():
        raise SnapKVError("the prompt is empty: give some text")
    return text


def _read_stdin() -> str:
    return _decode(sys.stdin.buffer.read(), "standard input")


def _read_file(path: str) -> str:
    try:
        return _decode(Path(path).expanduser().read_bytes(), f"--prompt-file {path}")
    except OSError as error:
        raise SnapKVError(f"--prompt-file {path}: {error.strerror or error}") from error


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise SnapKVError(f"{source} is not UTF-8 text: convert it to a text file first")
    return text
