"""Prompts from what a user typed: their text, and its tokens."""

import contextlib
import json
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, BinaryIO

from typer import Option

from ..chat.prompts import common_prefix
from ..completions.chat_template import apply_template, template_failures
from ..errors import SnapKVError
from ..paths import path_of, refusing
from .command import flag_of
from .options import IgnoreChatTemplate, SystemPrompt, TalkingModelOptions
from .reading import Reading

# Beginnings of questions: what their prompts share can be read before the question is known.
PROBES = ("Why", "1", "(", "\u4e2d", "\nand", " so")


@dataclass(frozen=True)
class TextOptions:
    prompt: Annotated[str | None, Option("--prompt", "-p", help="Prompt text, or - for stdin.")] = (
        None
    )
    prompt_file: Annotated[
        str | None, Option(help="Text file to read; --prompt follows its text.")
    ] = None
    system_prompt: SystemPrompt = None

    def read(self) -> str:
        """The file's text, then the prompt's; SnapKVError if there is none, or it can't be read."""
        if self.prompt is None and self.prompt_file is None:
            sources = "--prompt TEXT, --prompt - or --prompt-file FILE"
            raise SnapKVError(f"there is no prompt: give {sources}")
        if self.prompt == "-" and self.prompt_file == "-":
            raise SnapKVError("--prompt and --prompt-file can't both read standard input")
        parts = []
        if self.prompt_file is not None:
            is_stdin = self.prompt_file == "-"
            parts.append(_stdin() if is_stdin else read_file("--prompt-file", self.prompt_file))
        if self.prompt == "-":
            parts.append(_stdin())
        elif self.prompt is not None:
            # As mlx-lm does: \n and \t may be typed on the command line.
            typed = self.prompt.replace("\\n", "\n").replace("\\t", "\t")
            parts.append(require_text(typed, "--prompt"))
        text = "\n\n".join(parts)
        if not text.strip():
            raise SnapKVError("the prompt is empty: give some text")
        return text


@dataclass(frozen=True)
class PromptOptions(TextOptions):
    prefill_response: Annotated[str | None, Option(help="Text that the answer begins with.")] = None
    ignore_chat_template: IgnoreChatTemplate = False

    def load(self, model: TalkingModelOptions, reading: Reading) -> tuple[Any, Any, list[int]]:
        text = self.read()
        loaded, tokenizer = model.load()
        return loaded, tokenizer, reading.wait_for(partial(self.encode, tokenizer, text))

    def encode(self, tokenizer: Any, text: str, today: datetime | None = None) -> list[int]:
        """Token ids of a text, through the chat template unless there is none or it is to be ignored.

        Args:
            today: the date for templates that tell it to the model; by default that of the call.
        """
        raw = self.ignore_chat_template or not tokenizer.has_chat_template
        for name in ("system_prompt", "prefill_response"):
            if raw and getattr(self, name) is not None:
                needs = f"{flag_of(name)} needs a chat template"
                raise SnapKVError(f"{needs}: drop it or --ignore-chat-template")
        begun = self.prefill_response
        texts = {"system": self.system_prompt, "user": text, "assistant": begun}
        messages = [
            {"role": r, "content": words} for r, words in texts.items() if words is not None
        ]
        ending = {
            "add_generation_prompt": begun is None,
            "continue_final_message": begun is not None,
        }
        with template_failures():
            if raw:
                tokens = tokenizer.encode(text)
            else:
                dated = _dated(tokenizer, today)
                tokens = apply_template(tokenizer, messages, **ending, **dated)
        if not tokens:
            raise SnapKVError("the chat template made an empty prompt: try --ignore-chat-template")
        return tokens


def read_file(option: str, path: str) -> str:
    """The text of the file that an option names; SnapKVError if it can't be read, is not text or has none."""
    file = path_of(path, option)
    with refusing(f"{option} {path}"), file.open("rb") as stream:
        return _decoded(stream, f"{option} {path}")


def _stdin() -> str:
    if sys.stdin is None:
        raise SnapKVError("standard input is closed: give --prompt TEXT or --prompt-file FILE")
    return _decoded(sys.stdin.buffer, "standard input")


def _decoded(stream: BinaryIO, source: str) -> str:
    """All the text, some at least; no more is read after a zero byte, which no text has: /dev/zero has no end."""
    pieces: list[bytes] = []
    while (not pieces or b"\0" not in pieces[-1]) and (piece := stream.read(1 << 20)):
        pieces.append(piece)
    text = b"".join(pieces).decode("utf-8-sig", errors="surrogateescape")
    if not text.strip():
        raise SnapKVError(f"{source}: there is no text")
    return require_text(text, source)


def require_text(text: str, source: str) -> str:
    """The text; SnapKVError if it is none, but bytes that were read as such."""
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in text.encode():
            return text
    raise SnapKVError(f"{source} is not UTF-8 text: convert it to text first")


def _dated(tokenizer, today: datetime | None) -> dict[str, str]:
    """The template as an option, its calls for today's date replaced by `today`'s."""
    template = tokenizer.chat_template
    if today is None or not isinstance(template, str) or "strftime_now" not in template:
        return {}
    call = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
    return {"chat_template": call.sub(lambda match: json.dumps(today.strftime(match[2])), template)}


def encode_question(
    tokenizer, text: str, question: str, system_prompt: str | None, today: datetime | None
) -> list[int]:
    """Token ids of a whole prompt: a text and a question about it, as `generate` puts them together."""
    options = PromptOptions(system_prompt=system_prompt)
    return options.encode(tokenizer, f"{text}\n\n{question}", today)


def opening_tokens(
    tokenizer, text: str, system_prompt: str | None, today: datetime | None = None
) -> list[int]:
    """Token ids that start the prompt of every question about `text`; SnapKVError if the template has none."""
    prompts = [encode_question(tokenizer, text, q, system_prompt, today) for q in PROBES]
    shared = prompts[0][: common_prefix(prompts)]
    if not shared:
        raise SnapKVError(
            "this model's chat template puts nothing before a question, so there is nothing to save"
        )
    return shared
