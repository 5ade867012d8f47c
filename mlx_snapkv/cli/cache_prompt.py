"""`mlx-snapkv cache-prompt`: a long text, read once and saved."""

import sys
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import typer

from ..engine.report import NO_POLICY, CompressionReport, format_bytes
from . import flags
from .generation import require_kv_bits
from .loading import load_model, read_prompt
from .opening import opening_tokens
from .waiting import TOKENISING, waited_for


def cache_prompt(
    model: flags.Model,
    output: Annotated[str, typer.Option("--output", "-o", help="The .safetensors file to write.")],
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    system_prompt: flags.SystemPrompt = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    adapter_path: flags.AdapterPath = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    kv_bits: flags.KVBits = None,
    kv_group_size: flags.KVGroupSize = 64,
    quiet: flags.Quiet = False,
) -> None:
    """Read a long text once and save its KV cache, compressed if a policy is given.

    Each answer of generate --prompt-cache-file then starts from there.

    \b
      mlx-snapkv cache-prompt --model demo --prompt-file book.txt --policy keydiff:budget=25% -o book.safetensors
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?"
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from .. import saved
    from ..caches.layers import kv_bytes
    from ..engine.prefill import prefill, read
    from ..policies import resolve_policy
    from .progress import PrefillBar, stderr_console

    chosen = resolve_policy(snapkv, policy)
    path = saved.require_writable(output)
    replaced = path.exists()
    text = read_prompt(prompt, prompt_file)
    loaded, tokenizer = load_model(model, adapter_path, trust_remote_code)
    require_kv_bits(loaded, kv_bits, kv_group_size)
    now = datetime.now()
    console = stderr_console(quiet)
    opening = partial(opening_tokens, tokenizer, text, system_prompt, now)
    tokens = waited_for(console, TOKENISING, opening)
    bar = PrefillBar(console)
    options: dict[str, Any] = {
        "prefill_step_size": prefill_step_size,
        "prompt_progress_callback": bar.update,
        "kv_bits": kv_bits,
        "kv_group_size": kv_group_size,
    }
    try:
        if chosen is not None:
            cache, report = prefill(loaded, tokens, chosen, **options)
        else:
            cache = make_prompt_cache(loaded)
            read(loaded, mx.array(tokens), cache, options)
            report = CompressionReport(NO_POLICY, len(tokens), "no policy was given")
    finally:
        bar.close()
    notes = {"text": text, "system_prompt": system_prompt, "time": now.isoformat()}
    used = report.policy if report.compressed else NO_POLICY
    saved.save(path, loaded, cache, tokens, used, notes)
    if not quiet:
        kept = report.entries_text if report.compressed else f"full cache: {report.reason}"
        print(
            f"{report.prompt_tokens} prompt tokens, {kept}, KV memory {format_bytes(kv_bytes(cache))} "
            f"| saved in {path}{', in place of the one that was there' if replaced else ''}",
            file=sys.stderr,
        )
