"""`mlx-snapkv chat`: a conversation in the terminal, its cache kept small."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..engine.report import VERIFY_BELOW
from ..errors import SnapKVError
from . import flags
from .generation import (
    adapt_tokenizer,
    quantized_from,
    require_kv_bits,
    require_rotating,
    seed_sampling,
)
from .loading import load_model

if TYPE_CHECKING:
    from .chat_session import Session


def chat(
    model: flags.Model,
    adapter_path: flags.AdapterPath = None,
    quantize_activations: flags.QuantizeActivations = False,
    trust_remote_code: flags.TrustRemoteCode = False,
    pipeline: flags.Pipeline = False,
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    top_k: flags.TopK = 0,
    min_tokens_to_keep: flags.MinTokensToKeep = 1,
    xtc_probability: flags.XtcProbability = 0.0,
    xtc_threshold: flags.XtcThreshold = 0.1,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = 256,
    system_prompt: flags.SystemPrompt = None,
    chat_template_config: flags.ChatTemplateConfig = None,
    extra_eos_token: flags.ExtraEosToken = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    max_kv_size: flags.MaxKVSize = None,
    kv_group_size: flags.KVGroupSize = 64,
    kv_bits: flags.KVBits = None,
    quantized_kv_start: flags.QuantizedKVStart = None,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = VERIFY_BELOW,
    far: flags.Far = None,
) -> None:
    """Chat with a model; commands start with a slash, /help lists them.

    \b
      mlx-snapkv chat --model demo
      mlx-snapkv chat --model MODEL --snapkv top_k=4096 --memory recall
      mlx-snapkv chat --model MODEL --policy keydiff:budget=8192 < questions.txt
    """
    from ..chat.conversation import Conversation
    from ..policies import resolve_policy
    from .chat_commands import CommandCompleter
    from .chat_session import Session
    from .lines import Lines
    from .sampling import Sampling
    from .sharded import shared_lines

    chosen = resolve_policy(snapkv, policy)
    start_at: dict[str, Any] = quantized_from(quantized_kv_start, chosen)
    lines: Any = Lines(sys.stdin, CommandCompleter())
    loaded, tokenizer = load_model(
        model,
        adapter_path,
        trust_remote_code,
        quantize_activations=quantize_activations,
        pipeline=pipeline,
    )
    lines = shared_lines(lines)
    adapt_tokenizer(tokenizer, extra_eos_token, chat_template_config)
    require_kv_bits(loaded, kv_bits, kv_group_size)
    require_rotating(loaded, max_kv_size, kv_bits=kv_bits)
    seed_sampling(seed)
    sampling = Sampling(
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        min_tokens_to_keep=min_tokens_to_keep,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        max_tokens=max_tokens,
    )
    conversation = Conversation(
        loaded,
        tokenizer,
        policy=chosen,
        memory=memory,
        verify=verify,
        verify_below=verify_below,
        far=far,
        system=system_prompt,
        **sampling.options(tokenizer),
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        max_kv_size=max_kv_size,
        **start_at,
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
            if not interactive or session.lines.shared:
                raise
            session.say(f"stopped; the conversation goes on{session.waiting}")
        except StopIteration:
            return


def _take(session: Session, line: str) -> None:
    from .chat_commands import run_command

    if line.startswith("/"):
        run_command(session, line)
    elif line:
        session.answer(line)
