"""Prompt options: read a text from the command line, a file or stdin, and tokenise it."""

import contextlib
import json
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, BinaryIO

from typer import Option

from ..completions.chat_template import apply_template, converting_template_errors
from ..errors import SnapKVError
from ..paths import path_of, refusing
from .command import MODEL, flag_of
from .options import ChatModelOptions, IgnoreChatTemplate, SystemPrompt
from .prompt_console import PromptConsole

# Questions that start differently. If the prompts for all of them begin with the same tokens, those tokens do not
# depend on the question.
SAMPLE_QUESTIONS = ("Why", "1", "(", "\u4e2d", "\nand", " so")

# A chat template's call that formats the current date, e.g. `strftime_now("%d %B %Y")`.
_DATE_CALL = re.compile(
    r"""
    strftime_now \(
        \s* (?P<quote>['"]) (?P<format>.*?) (?P=quote) \s*
    \)
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class TextOptions:
    """Options for text from the command line, a file or stdin."""

    prompt: Annotated[str | None, Option("--prompt", "-p", help="Prompt text, or - for stdin.")] = (
        None
    )
    prompt_file: Annotated[
        str | None, Option(help="Text file to read; --prompt follows its text.")
    ] = None
    system_prompt: SystemPrompt = None

    def read(self) -> str:
        """Return the text of --prompt-file, followed by the text of --prompt.

        Raises: SnapKVError: no text is given, or it can't be read.
        """
        if self.prompt is None and self.prompt_file is None:
            sources = "--prompt TEXT, --prompt - or --prompt-file FILE"
            raise SnapKVError(f"there is no prompt: give {sources}")
        if self.prompt == "-" and self.prompt_file == "-":
            raise SnapKVError("--prompt and --prompt-file can't both read standard input")
        texts = []
        if self.prompt_file == "-":
            texts.append(_read_stdin())
        elif self.prompt_file is not None:
            texts.append(read_file("--prompt-file", self.prompt_file))
        if self.prompt == "-":
            texts.append(_read_stdin())
        elif self.prompt is not None:
            texts.append(require_text(self.prompt, "--prompt"))
        text = "\n\n".join(texts)
        if not text.strip():
            raise SnapKVError("the prompt is empty: give some text")
        return text


@dataclass(frozen=True)
class PromptOptions(TextOptions):
    """Options for a prompt and its chat template."""

    prefill_response: Annotated[
        str | None, Option(help="Text that the answer begins with.", rich_help_panel=MODEL)
    ] = None
    ignore_chat_template: IgnoreChatTemplate = False

    def load(
        self, model_options: ChatModelOptions, console: PromptConsole
    ) -> tuple[Any, Any, list[int]]:
        """Load the model and its tokenizer, and return them with the prompt's token ids."""
        text = self.read()
        model, tokenizer = model_options.load()
        tokens = console.wait_for(partial(self.encode, tokenizer, text))
        return model, tokenizer, tokens

    def uses_chat_template(self, tokenizer: Any) -> bool:
        """Return whether the prompt is a user message in the tokenizer's chat template."""
        return tokenizer.has_chat_template and not self.ignore_chat_template

    def encode(self, tokenizer: Any, text: str, today: datetime | None = None) -> list[int]:
        """Encode text as a prompt.

        The text becomes a user message in the chat template. With --ignore-chat-template, or if the tokenizer has no
        template, it is encoded as is.

        Args:
            tokenizer: the model's tokenizer.
            text: the user's message.
            today: date for templates that contain one. None uses the current date.

        Raises: SnapKVError: an option needs a chat template, or the template fails or makes an empty prompt.
        """
        uses_chat_template = self.uses_chat_template(tokenizer)
        for name in ("system_prompt", "prefill_response"):
            if getattr(self, name) is not None and not uses_chat_template:
                raise SnapKVError(
                    f"{flag_of(name)} needs a chat template: drop it or --ignore-chat-template"
                )
        with converting_template_errors():
            tokens = (
                self._render(tokenizer, text, today)
                if uses_chat_template
                else tokenizer.encode(text)
            )
        if not tokens:
            raise SnapKVError("the chat template made an empty prompt: try --ignore-chat-template")
        return tokens

    def _render(self, tokenizer: Any, text: str, today: datetime | None) -> list[int]:
        """Apply the chat template to `text`, with --system-prompt and --prefill-response if they are set."""
        has_prefill = self.prefill_response is not None
        contents = {
            "system": self.system_prompt,
            "user": text,
            "assistant": self.prefill_response,
        }
        messages = [
            {"role": role, "content": content}
            for role, content in contents.items()
            if content is not None
        ]
        return apply_template(
            tokenizer,
            messages,
            add_generation_prompt=not has_prefill,
            continue_final_message=has_prefill,
            **_chat_template_option(tokenizer, today),
        )


def read_file(option: str, path: str) -> str:
    """Read the text file that an option names.

    Raises: SnapKVError: the file can't be read, is empty or is not UTF-8 text.
    """
    file = path_of(path, option)
    with refusing(f"{option} {path}"), file.open("rb") as stream:
        return _decode_all(stream, f"{option} {path}")


def _read_stdin() -> str:
    """Read text from standard input. Raises: SnapKVError: standard input is closed, has no text, or is not UTF-8."""
    if sys.stdin is None:
        raise SnapKVError("standard input is closed: give --prompt TEXT or --prompt-file FILE")
    return _decode_all(sys.stdin.buffer, "standard input")


def _decode_all(stream: BinaryIO, source: str) -> str:
    """Read all text from a stream. Raises: SnapKVError: the stream is empty or not UTF-8 text.

    Reading stops at a zero byte, which text never contains. Otherwise, reading /dev/zero would never end.
    """
    data = bytearray()
    while chunk := stream.read(1 << 20):
        data += chunk
        if b"\0" in chunk:
            break
    text = data.decode("utf-8-sig", errors="surrogateescape")
    if not text.strip():
        raise SnapKVError(f"{source}: there is no text")
    return require_text(text, source)


def require_text(text: str, source: str) -> str:
    """Return the text unchanged. Raises: SnapKVError: it has a zero byte, or was decoded from invalid UTF-8."""
    with contextlib.suppress(UnicodeEncodeError):  # raised for bytes that were invalid UTF-8
        if b"\0" not in text.encode():
            return text
    raise SnapKVError(f"{source} is not UTF-8 text: convert it to text first")


def _chat_template_option(tokenizer, today: datetime | None) -> dict[str, str]:
    """Return a `chat_template` option whose template contains `today` instead of the current date.

    Return an empty dict if the template does not contain the date, or if `today` is None.
    """
    template = tokenizer.chat_template
    has_date = isinstance(template, str) and "strftime_now" in template
    if today is None or not has_date:
        return {}

    def date_literal(call: re.Match[str]) -> str:
        return json.dumps(today.strftime(call["format"]))

    return {"chat_template": _DATE_CALL.sub(date_literal, template)}


def encode_question(
    tokenizer, text: str, question: str, system_prompt: str | None, today: datetime | None
) -> list[int]:
    """Encode a text and a question as one prompt, as `generate` does."""
    options = PromptOptions(system_prompt=system_prompt)
    return options.encode(tokenizer, f"{text}\n\n{question}", today)


def opening_tokens(
    tokenizer, text: str, system_prompt: str | None, today: datetime | None = None
) -> list[int]:
    """Return the opening token ids shared by all prompts that ask about `text`.

    Raises: SnapKVError: the chat template puts nothing before a question.
    """
    from ..engine.token_ids import common_prefix

    prompts = [
        encode_question(tokenizer, text, question, system_prompt, today)
        for question in SAMPLE_QUESTIONS
    ]
    n_shared = common_prefix(prompts)
    if n_shared == 0:
        raise SnapKVError(
            "this model's chat template puts nothing before a question, so there is nothing to save"
        )
    any_prompt = prompts[0]
    return any_prompt[:n_shared]
