"""`mlx-snapkv chat`: have a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from ..errors import SnapKVError
from . import cache_options, options
from .command import message_with_flags

if TYPE_CHECKING:
    from .chat_session import Session


def chat(
    context: typer.Context,
    *,
    model: options.ShardedModelOptions,
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
    from .chat_session import Lines, Session
    from .prompt_console import PromptConsole

    setting = compression.setting
    generation = cache.generate_keywords(setting)
    lines = Lines(sys.stdin, CommandCompleter())
    loaded, tokenizer = model.load()
    cache.require_supported(loaded)
    options.seed_sampling(seed)
    console = PromptConsole(quiet)
    recommendation = compression.recommend(
        loaded, None, "conversation", console.say, vars(cache), sampling.max_tokens
    )
    if recommendation is not None:
        setting = recommendation.config.setting
    generation |= sampling.generate_keywords(tokenizer)
    conversation = Conversation(
        loaded, tokenizer, policy=setting, system=system_prompt, **generation
    )
    session = Session(
        model=model.model,
        conversation=conversation,
        sampling=sampling,
        lines=lines,
        console=console,
        context=context,
        policy=setting,
        compression=compression,
        max_kv_bytes=model.max_kv_bytes,
    )
    if lines.is_terminal:
        hint = "You can paste several lines, or end a line with a backslash. /help lists commands."
        console.say(f"{session.model}, {session.setting_text}\n{hint}")
    for line in map(str.strip, lines):
        try:
            _handle_line(session, line)
        except StopIteration:
            return


def _handle_line(session: Session, line: str) -> None:
    """Answer a message or run a command. In a terminal, the chat continues after errors and Ctrl-C.

    Raises:
        StopIteration: the command ends the chat.
        SnapKVError: a line of a script is invalid.
    """
    from .chat_commands import run_command

    is_command = line.startswith("/")
    is_script = not session.lines.is_terminal
    try:
        if is_command:
            run_command(session, line)
        elif line:
            session.answer(line)
    except SnapKVError as error:
        if is_script:
            raise
        session.say(message_with_flags(error))
    except KeyboardInterrupt:
        if is_script:
            raise
        session.say(f"stopped; the conversation continues{session.unread_files_clause}")
