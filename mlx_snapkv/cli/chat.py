"""`mlx-snapkv chat`: a conversation in the terminal, its cache kept small."""

import sys
from typing import Annotated

import mlx.core as mx
import typer

from ..caches.memories import MEMORIES
from ..chat.conversation import Conversation
from ..errors import SnapKVError
from ..policies import resolve_policy
from . import flags
from .chat_commands import CommandCompleter, run_command
from .chat_session import Session
from .lines import Lines
from .loading import load_model
from .sampling import Sampling


def chat(
    model: flags.Model,
    adapter_path: flags.AdapterPath = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    xtc_probability: flags.XtcProbability = 0.0,
    xtc_threshold: flags.XtcThreshold = 0.1,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = 256,
    system_prompt: flags.SystemPrompt = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    kv_group_size: flags.KVGroupSize = 64,
    kv_bits: flags.KVBits = None,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    memory: Annotated[
        str,
        typer.Option(
            help="What later turns vote over: what is left (drop) or all entries (the others). "
            f"One of: {', '.join(MEMORIES)}."
        ),
    ] = "drop",
) -> None:
    """Chat with a model; commands start with a slash, /help lists them.

    \b
      mlx-snapkv chat --model demo
      mlx-snapkv chat --model MODEL --snapkv top_k=4096 --memory recall
      mlx-snapkv chat --model MODEL --policy keydiff:budget=8192 < questions.txt
    """
    chosen = resolve_policy(snapkv, policy)
    lines = Lines(sys.stdin, CommandCompleter())
    loaded, tokenizer = load_model(model, adapter_path, trust_remote_code)
    if seed is not None:
        mx.random.seed(seed)
    sampling = Sampling(temp, top_p, xtc_probability, xtc_threshold, max_tokens)
    conversation = Conversation(
        loaded,
        tokenizer,
        policy=chosen,
        memory=memory,
        system=system_prompt,
        **sampling.options(tokenizer),
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )
    run(Session(model, conversation, sampling, lines))


def run(session: Session) -> None:
    """Take lines until there are no more.

    A mistake is one sentence and the chat goes on, unless the lines come from a file: then it ends with that mistake.
    """
    interactive = session.lines.interactive
    if interactive:
        session.say(f"{session.model}, {session.ways}")
        session.say(
            "Several lines: paste them, or end each with a backslash. /help lists commands."
        )
    for line in session.lines:
        try:
            _take(session, line.strip())
        except SnapKVError as error:
            if not interactive:
                raise
            session.say(str(error))
        except KeyboardInterrupt:
            if not interactive:
                raise
            session.say(f"stopped; the conversation goes on{session.waiting}")
        except StopIteration:
            return


def _take(session: Session, line: str) -> None:
    if line.startswith("/"):
        run_command(session, line)
    elif line:
        session.answer(line)
