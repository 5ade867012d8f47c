"""`mlx-snapkv chat`: have a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from ..errors import SnapKVError
from . import cache_options, options
from .command import is_typed, message_with_flags

if TYPE_CHECKING:
    from .chat_session import Session


def chat(
    context: typer.Context,
    *,
    model_options: options.ShardedModelOptions,
    system_prompt: options.SystemPrompt = None,
    compression: cache_options.CompressionOptions,
    cache: cache_options.MLXCacheOptions,
    sampling: options.SamplingOptions,
    seed: options.Seed = None,
    quiet: options.Quiet = False,
) -> None:
    r"""Chat with a model. Commands start with a slash; /help lists them.

    \b
      mlx-snapkv chat --model MODEL --sparse budget=6.25%
      mlx-snapkv chat --model MODEL --policy auto < questions.txt
    """
    from ..chat.conversation import Conversation
    from .chat_commands import CommandCompleter
    from .chat_session import MessageReader, Session
    from .prompt_console import PromptConsole

    first_compression = compression
    may_be_sparse = compression.sparse is not None or compression.is_auto
    if not may_be_sparse and not is_typed(context, "store"):
        # Ignore a configured store for now. It applies once /policy selects sparse attention.
        first_compression = replace(compression, store=None)
    generation = cache.generate_keywords(first_compression.setting)
    reader = MessageReader(sys.stdin, CommandCompleter())
    model, tokenizer = model_options.load()
    cache.require_supported(model)
    options.seed_sampling(seed)
    console = PromptConsole(quiet)
    setting = first_compression.setting_for_task(
        model, "conversation", console.say, vars(cache), sampling.max_tokens
    )
    console.say_all(cache.bits_notes())
    if setting is None and cache.quantized_kv_start is None:
        console.say_all(cache.notes(setting, n_prompt=0, max_tokens=0))
    generation |= sampling.generate_keywords(tokenizer)
    conversation = Conversation(
        model, tokenizer, policy=setting, system=system_prompt, **generation
    )
    session = Session(
        model_name=model_options.model,
        conversation=conversation,
        sampling=sampling,
        reader=reader,
        console=console,
        context=context,
        policy=setting,
        compression=compression,
        max_kv_bytes=model_options.max_kv_bytes,
    )
    if reader.is_terminal:
        hint = "You can paste several lines, or end a line with a backslash. /help lists commands."
        console.say(f"{session.model_name}, {session.setting_text}\n{hint}")
    for message in reader:
        try:
            _handle_message(session, message.strip())
        except StopIteration:
            return


def _handle_message(session: Session, message: str) -> None:
    """Answer a message, or run it if it is a command.

    In a terminal, the chat continues after user errors and Ctrl-C.

    Raises:
        StopIteration: the command ends the chat.
        SnapKVError: the message or command fails, and the input is not a terminal.
        KeyboardInterrupt: Ctrl-C was pressed, and the input is not a terminal.
    """
    from .chat_commands import run_command

    is_command = message.startswith("/")
    is_script = not session.reader.is_terminal
    try:
        if is_command:
            run_command(session, message)
        elif message:
            session.answer(message)
    except SnapKVError as error:
        if is_script:
            raise
        session.say(message_with_flags(error))
    except KeyboardInterrupt:
        if is_script:
            raise
        session.say(f"stopped; the conversation continues{session.unread_files_clause}")
