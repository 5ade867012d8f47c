"""Models and prompts from what a user typed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..demo import MODELS
from ..errors import SnapKVError, brief
from .interrupts import listen
from .streams import be_silent

if TYPE_CHECKING:
    from ..several.ranks import Ranks


def load_model(
    name: str,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    option: str = "--model",
    quantize_activations: bool = False,
    pipeline: bool | None = None,
):
    """The model and tokenizer that mlx-lm loads for a folder, a hub repository or an embedded model's name.

    Of several processes that `mlx.launch` has started, each loads its part; those but rank 0 print no more.

    Args:
        pipeline: they are to have some of the layers each, not a slice of all; None is a command that one process has
            to run by itself.

    Raises:
        SnapKVError: nothing is there, or mlx-lm can't read it; the message says what was looked for.
    """
    from ..several.ranks import here
    from .sharded import require_shared

    ranks = here()
    if ranks.rank:
        be_silent()
    with ranks.together():
        require_shared(
            ranks, pipeline, adapter_path=adapter_path, quantize_activations=quantize_activations
        )
        wanted = name, adapter_path, trust_remote_code, option, quantize_activations
        return _loaded(ranks, bool(pipeline), *wanted)


def _loaded(
    ranks: Ranks,
    pipeline: bool,
    name: str,
    adapter_path: str | None,
    trust_remote_code: bool,
    option: str,
    quantize_activations: bool,
):
    folder = _place(name, option)
    exists = os.path.exists(folder)  # which is False for a name that no file can have
    adapter = None if adapter_path is None else _path("--adapter-path", adapter_path)
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise SnapKVError(f"--adapter-path {adapter_path}: no adapter_config.json there")
    from mlx_lm import load

    from .sharded import load_shared

    # Of prompts beyond the model's length it says that they fail, which those of our policies don't.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    listen()
    where = str(folder if exists else name)
    try:
        if ranks.size > 1:
            model, tokenizer = load_shared(where, ranks, pipeline, trust_remote_code)
        else:
            model, tokenizer, *_ = load(
                where,
                adapter_path=None if adapter is None else str(adapter),
                model_config={"quantize_activations": quantize_activations},
                tokenizer_config={"trust_remote_code": trust_remote_code},
                trust_remote_code=trust_remote_code,
            )
    except SnapKVError as error:
        raise SnapKVError(f"{option} {name}: {error}") from error
    except Exception as error:  # whatever is wrong with the files, it is theirs to mend
        raise SnapKVError(f"{option} {name}: {_why(name, folder, error)}") from error
    _make_fast(name, model)
    return model, tokenizer


def load_without_weights(name: str, option: str = "--model"):
    """The same model, built from its configuration and the headers of its weights' files; of the hub, only these.

    Raises:
        SnapKVError: nothing is there, or mlx-lm can't read it; the message says what was looked for.
    """
    folder = _place(name, option)
    from mlx_lm.utils import hf_repo_to_path

    from ..planning.weightless import repository_without_weights, without_weights

    if not os.path.exists(folder):
        with contextlib.suppress(Exception):  # it is asked for below, if it is not here
            folder = hf_repo_to_path(name)
    there = os.path.exists(folder)
    try:
        model = without_weights(folder) if there else repository_without_weights(name)
    except Exception as error:  # as above
        raise SnapKVError(f"{option} {name}: {_why_not_planned(name, folder, error)}") from error
    _make_fast(name, model)
    return model


def _place(name: str, option: str) -> Path:
    """The folder that a name stands for; if it is not there, the name may be that of a repository.

    Raises:
        SnapKVError: it is neither.
    """
    folder = MODELS.get(name) or _path(option, name)
    exists = os.path.exists(folder)
    if exists and not (folder / "config.json").is_file():
        raise SnapKVError(f"{option} {name}: no config.json there, so it is not a model folder")
    if not exists and not _may_be_repository(name):
        raise SnapKVError(
            f"{option} {name}: no such folder, and not the name of a Hugging Face repository; "
            f"embedded models: {', '.join(MODELS)}"
        )
    return folder


def _make_fast(name: str, model) -> None:
    import mlx.core as mx

    if name in MODELS and mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)  # CPUs only emulate float16, several times slower


def load_draft_model(name: str, tokenizer, trust_remote_code: bool = False):
    """The draft model, which must have the vocabulary of the main model's tokenizer.

    Raises:
        SnapKVError: it can't be loaded, or the vocabularies differ in size.
    """
    model, its_own = load_model(name, None, trust_remote_code, option="--draft-model")
    if its_own.vocab_size != tokenizer.vocab_size:
        raise SnapKVError(
            f"--draft-model {name}: its tokenizer has {its_own.vocab_size} tokens and the model's "
            f"{tokenizer.vocab_size}; a draft model needs the model's own tokenizer"
        )
    return model


def _path(option: str, name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise SnapKVError(f"{option} {name}: no such home folder") from error


def _may_be_repository(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _why_not_planned(name: str, folder: Path, error: Exception) -> str:
    """Why a model can't be built without its weights."""
    from . import load_errors

    if folder.exists():
        return f"can't be planned: {load_errors.of_files(folder, error)}"
    return load_errors.of_repository(name, error) or f"can't be planned: {brief(error)}"


def _why(name: str, folder: Path, error: Exception) -> str:
    from mlx_lm.utils import hf_repo_to_path

    from . import load_errors

    if not folder.exists():
        problem = load_errors.of_repository(name, error)
        if problem is not None:
            return problem
        folder = hf_repo_to_path(name)
    return f"can't be loaded: {load_errors.of_files(folder, error)}"


def encode(
    tokenizer,
    text: str,
    system_prompt: str | None,
    ignore_chat_template: bool,
    today: datetime | None = None,
    prefill_response: str | None = None,
) -> list[int]:
    """Token ids of the prompt, through the chat template unless there is none or it is to be ignored.

    Args:
        today: the date for templates that tell it to the model; by default that of the call.
        prefill_response: what the answer is to begin with.

    Raises:
        SnapKVError: the template refuses, or nothing is left to read.
    """
    raw = ignore_chat_template or not tokenizer.has_chat_template
    for option, given in (
        ("--system-prompt", system_prompt),
        ("--prefill-response", prefill_response),
    ):
        if raw and given is not None:
            raise SnapKVError(f"{option} needs a chat template: drop it or --ignore-chat-template")
    messages = [{"role": "user", "content": text}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    ending = {"add_generation_prompt": True}
    if prefill_response is not None:
        messages.append({"role": "assistant", "content": prefill_response})
        ending = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        if raw:
            tokens = tokenizer.encode(text)
        else:
            tokens = tokenizer.apply_chat_template(messages, **ending, **_dated(tokenizer, today))
    except Exception as error:  # templates are code of the model's authors
        raise SnapKVError(f"the chat template or tokenizer failed: {brief(error)}") from error
    if not tokens:
        raise SnapKVError("the chat template made an empty prompt: try --ignore-chat-template")
    return tokens


def _dated(tokenizer, today: datetime | None) -> dict[str, str]:
    """The template as an option, its calls for today's date replaced by `today`'s."""
    template = tokenizer.chat_template
    if today is None or not isinstance(template, str) or "strftime_now" not in template:
        return {}
    call = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
    return {"chat_template": call.sub(lambda found: json.dumps(today.strftime(found[2])), template)}


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
        parts.append(
            _read_stdin() if prompt_file == "-" else read_file("--prompt-file", prompt_file)
        )
    if prompt is not None:
        # As mlx-lm does: \n and \t may be typed on the command line.
        typed = prompt.replace("\\n", "\n").replace("\\t", "\t")
        parts.append(_read_stdin() if prompt == "-" else typed)
    text = "\n\n".join(parts)
    require_text(text, "--prompt")
    if not text.strip():
        raise SnapKVError("the prompt is empty: give some text")
    return text


def _read_stdin() -> str:
    if sys.stdin is None:
        raise SnapKVError("standard input is closed: give --prompt TEXT or --prompt-file FILE")
    return _decode(_read(sys.stdin.buffer), "standard input")


def read_file(option: str, path: str) -> str:
    """The text of the file that an option names; SnapKVError if it can't be read or is not text."""
    file = _path(option, path)
    try:
        with file.open("rb") as stream:
            data = _read(stream)
    except OSError as error:
        raise SnapKVError(f"{option} {path}: {error.strerror or error}") from error
    except ValueError as error:  # a name no file can have
        raise SnapKVError(f"{option} {path!r}: {error}") from error
    return _decode(data, f"{option} {path}")


def _read(stream: BinaryIO) -> bytes:
    """All bytes; no more after a zero byte, which no text has, and of which /dev/zero has no end."""
    pieces: list[bytes] = []
    while (not pieces or b"\0" not in pieces[-1]) and (piece := stream.read(1 << 20)):
        pieces.append(piece)
    return b"".join(pieces)


def _decode(data: bytes, source: str) -> str:
    text = data.decode("utf-8-sig", errors="surrogateescape")
    require_text(text, source)
    return text


def require_text(text: str, source: str) -> None:
    """Raises: SnapKVError: it is no text, but bytes that were read as such."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = "\0"
    if "\0" in text:
        raise SnapKVError(f"{source} is not UTF-8 text: convert it to text first")
