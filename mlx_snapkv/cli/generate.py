"""`mlx-snapkv generate`: one prompt, one answer."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.sample_utils import make_sampler
from rich.console import Console

from ..engine.generate import stream_generate
from ..engine.report import NO_POLICY, CompressionReport, format_bytes
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..policies import resolve_policy
from . import flags
from .loading import encode, load_draft_model, load_model, read_prompt
from .progress import PrefillBar
from .saved_start import SavedStart


def generate(
    model: flags.Model,
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    system_prompt: flags.SystemPrompt = None,
    max_tokens: flags.MaxTokens = 256,
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    top_k: flags.TopK = 0,
    seed: flags.Seed = None,
    max_kv_size: flags.MaxKVSize = None,
    kv_group_size: flags.KVGroupSize = 64,
    kv_bits: flags.KVBits = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    ignore_chat_template: flags.IgnoreChatTemplate = False,
    draft_model: flags.DraftModel = None,
    num_draft_tokens: flags.NumDraftTokens = 3,
    adapter_path: flags.AdapterPath = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    prompt_cache_file: flags.PromptCacheFile = None,
    quiet: flags.Quiet = False,
    json_output: flags.AsJson = False,
) -> None:
    """Answer a prompt, with a compressed KV cache if a policy is given.

    The answer goes to stdout; progress and figures go to stderr.

    \b
      mlx-snapkv generate --model demo --prompt "What is the access code of the amber falcon?"
      mlx-snapkv generate --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --snapkv top_k=1024,min_ctx=0
      cat book.txt | mlx-snapkv generate --model demo --prompt - --snapkv top_k=4096 --json
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?"
    """
    chosen = resolve_policy(snapkv, policy)
    text = read_prompt(prompt, prompt_file)
    loaded, tokenizer = load_model(model, adapter_path, trust_remote_code)
    draft = None
    if draft_model is not None:
        draft = load_draft_model(draft_model, tokenizer, trust_remote_code)
    start = None
    if prompt_cache_file is None:
        tokens = encode(tokenizer, text, system_prompt, ignore_chat_template)
    else:
        _require_unset(
            system_prompt=system_prompt, max_kv_size=max_kv_size, draft_model=draft_model
        )
        quantization = None if kv_bits is None else Quantization(kv_bits, kv_group_size)
        start = SavedStart(prompt_cache_file, model, loaded, chosen, quantization)
        tokens = start.encode(tokenizer, text, ignore_chat_template)
    if top_k >= len(tokenizer):
        raise SnapKVError(f"--top-k must be below the vocabulary's {len(tokenizer)}, got {top_k}")
    if seed is not None:
        mx.random.seed(seed)
    bar = PrefillBar(Console(stderr=True, quiet=quiet))
    reports: list[CompressionReport] = []
    responses = stream_generate(
        loaded,
        tokenizer,
        tokens,
        max_tokens,
        draft,
        num_draft_tokens=num_draft_tokens,
        policy=chosen if start is None else None,
        on_report=reports.append,
        prompt_cache=None if start is None else start.prompt_cache,
        sampler=make_sampler(temp, top_p, min_p, top_k=top_k),
        max_kv_size=max_kv_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=bar.update,
    )
    answer, last, n_drafted = _print_answer(responses, bar, show=not json_output)
    accepted = None if draft is None else n_drafted / last.generation_tokens
    report = reports[0] if start is None else start.report
    if json_output:
        result = _as_json(answer, last, report, accepted)
        if start is not None:
            result["prompt_cache"] = start.to_dict()
        print(json.dumps(result, ensure_ascii=False))
    if not quiet:
        kept = kept_text(report) if start is None else start.kept
        print(closing_line(last, kept, accepted), file=sys.stderr)


def _require_unset(**options: object) -> None:
    """Raises: SnapKVError: an option is given that a saved prompt has settled."""
    for name, given in options.items():
        if given is not None:
            option = f"--{name.replace('_', '-')}"
            raise SnapKVError(f"{option} can't be combined with --prompt-cache-file: drop it")


def _print_answer(responses: Iterator[GenerationResponse], bar: PrefillBar, show: bool):
    """Stream the answer to stdout; the whole text, the last response, and how many tokens the draft model gave."""
    answer = []
    n_drafted = 0
    try:
        for response in responses:
            answer.append(response.text)
            n_drafted += response.from_draft
            if show:
                print(response.text, end="", flush=True)
    finally:
        bar.close()
        if answer and show:
            print(flush=True)
    return "".join(answer), response, n_drafted


def kept_text(report: CompressionReport) -> str:
    """What became of the prompt's entries, for the closing line."""
    if report.policy == NO_POLICY:
        return "full cache (no policy; add --snapkv top_k=N to compress)"
    if not report.compressed:
        return f"full cache: {report.reason}"
    return (
        f"{report.entries_text}, KV memory {format_bytes(report.kv_bytes_before)}"
        f" → {format_bytes(report.kv_bytes_after)}"
    )


def closing_line(response: GenerationResponse, kept: str, accepted: float | None = None) -> str:
    """One line of figures: what was read, kept and generated, and how fast.

    Args:
        accepted: share of the answer's tokens that came from the draft model, if there is one.
    """
    drafted = "" if accepted is None else f" ({accepted:.0%} of the tokens drafted)"
    return (
        f"{response.prompt_tokens} prompt tokens, {kept} | prompt {response.prompt_tps:.1f} tokens/s, "
        f"generation {response.generation_tps:.1f} tokens/s{drafted}, peak memory {response.peak_memory:.3g} GB"
    )


def _as_json(
    text: str, response: GenerationResponse, report: CompressionReport, accepted: float | None
) -> dict[str, Any]:
    fields = ("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "finish_reason")
    return (
        {"text": text}
        | {name: getattr(response, name) for name in fields}
        | ({} if accepted is None else {"acceptance_rate": accepted})
        | {"peak_memory_gb": response.peak_memory, "compression": report.to_dict()}
    )
