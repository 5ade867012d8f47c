"""Prompts from what a user typed: their text, and its tokens."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import BinaryIO

from ..chat.prompts import common_prefix
from ..errors import SnapKVError, brief
from ..paths import path_of, refusing

# Beginnings of questions: what their prompts share can be read before the question is known.
PROBES = ("Why", "1", "(", "\u4e2d", "\nand", " so")
# Of the template's own parameters, those that may be given beside its free ones.
TEMPLATE_OPTIONS = {"tools", "documents", "chat_template"}


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text to read, a file's and then the prompt's; `-` is standard input. SnapKVError if there is none."""
    if prompt is None and prompt_file is None:
        raise SnapKVError("nothing to read: give --prompt TEXT, --prompt - or --prompt-file FILE")
    if prompt == "-" and prompt_file == "-":
        raise SnapKVError("--prompt and --prompt-file can't both read standard input")
    parts = []
    if prompt_file is not None:
        file = _read_stdin() if prompt_file == "-" else read_file("--prompt-file", prompt_file)
        parts.append(file)
    if prompt is not None:
        # As mlx-lm does: \n and \t may be typed on the command line.
        typed = prompt.replace("\\n", "\n").replace("\\t", "\t")
        parts.append(_read_stdin() if prompt == "-" else require_text(typed, "--prompt"))
    text = "\n\n".join(parts)
    if not text.strip():
        raise SnapKVError("the prompt is empty: give some text")
    return text


def read_file(option: str, path: str) -> str:
    """The text of the file that an option names; SnapKVError if it can't be read or is not text."""
    file = path_of(path, option)
    with refusing(f"{option} {path}"), file.open("rb") as stream:
        return _decoded(stream, f"{option} {path}")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise SnapKVError("standard input is closed: give --prompt TEXT or --prompt-file FILE")
    return _decoded(sys.stdin.buffer, "standard input")


def _decoded(stream: BinaryIO, source: str) -> str:
    """All the text; no more is read after a zero byte, which no text has, and of which /dev/zero has no end."""
    pieces: list[bytes] = []
    while (not pieces or b"\0" not in pieces[-1]) and (piece := stream.read(1 << 20)):
        pieces.append(piece)
    text = b"".join(pieces).decode("utf-8-sig", errors="surrogateescape")
    return require_text(text, source)


def require_text(text: str, source: str) -> str:
    """The text; SnapKVError if it is none, but bytes that were read as such."""
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in text.encode():
            return text
    raise SnapKVError(f"{source} is not UTF-8 text: convert it to text first")


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
    """
    raw = ignore_chat_template or not tokenizer.has_chat_template
    templated = {"--system-prompt": system_prompt, "--prefill-response": prefill_response}
    for option, given in templated.items():
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


def encode_question(
    tokenizer, text: str, question: str, system_prompt: str | None, today: datetime | None
) -> list[int]:
    """Token ids of a whole prompt: a text and a question about it, as `generate` puts them together."""
    return encode(tokenizer, f"{text}\n\n{question}", system_prompt, False, today)


def opening_tokens(
    tokenizer, text: str, system_prompt: str | None, today: datetime | None = None
) -> list[int]:
    """Token ids that start the prompt of every question about `text`; SnapKVError if the template has none."""
    prompts = [encode_question(tokenizer, text, q, system_prompt, today) for q in PROBES]
    shared = prompts[0][: common_prefix(prompts)]
    if not shared:
        raise SnapKVError("this model's chat template puts nothing before a question to be saved")
    return shared


def adapt_tokenizer(
    tokenizer, extra_eos_token: Sequence[str] | None, chat_template_config: str | None
) -> None:
    """Add tokens that end an answer, and options for the chat template, a JSON object."""
    for token in extra_eos_token or []:
        known = range(len(tokenizer)) if token.isdecimal() else tokenizer.get_vocab()
        if (int(token) if token.isdecimal() else token) not in known:
            raise SnapKVError(f"--extra-eos-token {token!r}: this tokenizer has no such token")
        tokenizer.add_eos_token(token)
    if chat_template_config is None:
        return
    options = None
    with contextlib.suppress(ValueError):
        options = json.loads(chat_template_config)
    if not isinstance(options, dict):
        raise SnapKVError(
            "--chat-template-config must be a JSON object, "
            f"such as '{{\"enable_thinking\": false}}', got {chat_template_config!r}"
        )
    own = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
    for name in options.keys() & own.keys() - TEMPLATE_OPTIONS:
        raise SnapKVError(f"--chat-template-config can't set {name!r}: the command does")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
