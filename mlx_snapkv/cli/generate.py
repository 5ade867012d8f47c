"""`mlx-snapkv generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine.report import NO_POLICY, VERIFY_BELOW, CompressionReport
from ..errors import SnapKVError
from . import flags
from .fitting import tell_if_too_long
from .generation import (
    adapt_tokenizer,
    make_sampler,
    quantized_from,
    require_kv_bits,
    require_rotating,
    seed_sampling,
)
from .loading import load_draft_model, load_model
from .prompt_text import encode, read_prompt
from .spelling import flag_of
from .waiting import TOKENISING, waited_for

if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse

    from .progress import PrefillBar


def generate(
    model: flags.Model,
    prompt: flags.Prompt = None,
    prompt_file: flags.PromptFile = None,
    system_prompt: flags.SystemPrompt = None,
    prefill_response: flags.PrefillResponse = None,
    chat_template_config: flags.ChatTemplateConfig = None,
    extra_eos_token: flags.ExtraEosToken = None,
    max_tokens: flags.MaxTokens = 256,
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    top_k: flags.TopK = 0,
    min_tokens_to_keep: flags.MinTokensToKeep = 1,
    xtc_probability: flags.XtcProbability = 0.0,
    xtc_threshold: flags.XtcThreshold = 0.1,
    seed: flags.Seed = None,
    max_kv_size: flags.MaxKVSize = None,
    kv_group_size: flags.KVGroupSize = 64,
    kv_bits: flags.KVBits = None,
    quantized_kv_start: flags.QuantizedKVStart = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    ignore_chat_template: flags.IgnoreChatTemplate = False,
    draft_model: flags.DraftModel = None,
    num_draft_tokens: flags.NumDraftTokens = 3,
    adapter_path: flags.AdapterPath = None,
    quantize_activations: flags.QuantizeActivations = False,
    trust_remote_code: flags.TrustRemoteCode = False,
    pipeline: flags.Pipeline = False,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = VERIFY_BELOW,
    far: flags.Far = None,
    prompt_cache_file: flags.PromptCacheFile = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = "True",
    json_output: flags.AsJson = False,
) -> None:
    """Answer a prompt, with a compressed KV cache if a policy is given.

    The answer goes to stdout; progress and figures go to stderr.

    \b
      mlx-snapkv generate --model demo \\
          --prompt "The access code of the opal oak is 481516. What is the access code of the opal oak?"
      mlx-snapkv generate --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --snapkv top_k=1024
      mlx-snapkv generate --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --snapkv top_k=1024 --memory recall --verify unsure
      cat book.txt | mlx-snapkv generate --model demo --prompt - --snapkv top_k=4096 --json
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?"
    """
    from ..engine.book_cost import book_cost
    from ..engine.generate import stream_generate
    from ..entries.quantization import Quantization
    from ..policies import resolve_policy
    from .before_book import telling
    from .progress import PrefillBar, stderr_console
    from .saved_start import SavedStart
    from .sharded import on_first, require_alone

    quiet = quiet or verbose.lower().startswith("f")
    chosen = resolve_policy(snapkv, policy)
    start_at: dict[str, Any] = quantized_from(quantized_kv_start, chosen)
    text = on_first(partial(read_prompt, prompt, prompt_file))
    require_alone(draft_model=draft_model)
    loaded, tokenizer = load_model(
        model,
        adapter_path,
        trust_remote_code,
        quantize_activations=quantize_activations,
        pipeline=pipeline,
    )
    adapt_tokenizer(tokenizer, extra_eos_token, chat_template_config)
    draft = None
    if draft_model is not None:
        draft = load_draft_model(draft_model, tokenizer, trust_remote_code)
    start = None
    if prompt_cache_file is None:
        require_kv_bits(loaded, kv_bits, kv_group_size)
        require_rotating(loaded, max_kv_size, kv_bits=kv_bits, draft_model=draft_model)
        encoded = partial(
            encode,
            tokenizer,
            text,
            system_prompt,
            ignore_chat_template,
            prefill_response=prefill_response,
        )
    else:
        _require_unset(
            system_prompt=system_prompt,
            prefill_response=prefill_response,
            max_kv_size=max_kv_size,
            draft_model=draft_model,
        )
        quantization = None if kv_bits is None else Quantization(kv_bits, kv_group_size)
        at_once = chosen if memory == "drop" else None
        start = SavedStart(prompt_cache_file, model, loaded, at_once, quantization)
        chosen, memory = start.ways(chosen, memory)
        encoded = partial(start.encode, tokenizer, text, ignore_chat_template)
    console = stderr_console(quiet)
    tokens = waited_for(console, TOKENISING, encoded)
    if start is None:
        tell_if_too_long(
            console,
            loaded,
            len(tokens),
            policy=chosen,
            memory=memory,
            verify=verify,
            far=far,
            max_tokens=max_tokens,
            max_kv_size=max_kv_size,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            prefill_step_size=prefill_step_size,
        )
    seed_sampling(seed)
    sampler = make_sampler(
        tokenizer,
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        min_tokens_to_keep=min_tokens_to_keep,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
    )
    bar = PrefillBar(console)
    n_before = 0 if start is None else start.n_tokens
    cost = partial(book_cost, loaded, chosen, memory, n_before=n_before)
    telling_console = stderr_console(quiet or json_output)
    reports: list[CompressionReport] = []
    responses = stream_generate(
        loaded,
        tokenizer,
        tokens,
        max_tokens,
        draft,
        num_draft_tokens=num_draft_tokens,
        policy=chosen if start is None or memory != "drop" else None,
        memory=memory,
        verify=verify,
        verify_below=verify_below,
        far=far,
        on_report=reports.append,
        prompt_cache=None if start is None else start.prompt_cache,
        sampler=sampler,
        max_kv_size=max_kv_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=telling(telling_console, cost, bar.update),
        **start_at,
    )
    recalls = chosen is not None and memory != "drop"
    answer = _Answer(drafted=draft is not None)

    def close(how: str = "") -> None:
        if not quiet and answer.last is not None:
            told = kept_text(*reports, max_kv_size=max_kv_size, memory=memory)
            kept = told if start is None or recalls else start.kept
            print(how + closing_line(answer.last, kept, answer.accepted), file=sys.stderr)

    try:
        answer.take(responses, bar, show=not json_output)
    except KeyboardInterrupt:
        close("stopped: ")
        raise
    if json_output:
        result = _as_json(model, answer, reports[0] if start is None or recalls else start.report)
        if start is not None:
            result["prompt_cache"] = start.to_dict()
        print(json.dumps(result, ensure_ascii=False))
    close()


def _require_unset(**options: object) -> None:
    """Raises: SnapKVError: an option is given that a saved prompt has settled."""
    for name, given in options.items():
        if given is not None:
            raise SnapKVError(
                f"{flag_of(name)} can't be combined with --prompt-cache-file: drop it"
            )


@dataclass
class _Answer:
    """What has come of an answer.

    Attributes:
        drafted: whether there is a draft model.
        texts: of the tokens so far.
        last: the newest response.
        n_drafted: how many tokens the draft model gave.
    """

    drafted: bool
    texts: list[str] = field(default_factory=list)
    last: Any = None
    n_drafted: int = 0

    @property
    def accepted(self) -> float | None:
        """Share of the tokens that came from the draft model, if there is one."""
        return self.n_drafted / self.last.generation_tokens if self.drafted else None

    def take(self, responses: Iterator[GenerationResponse], bar: PrefillBar, show: bool) -> None:
        """All responses; their text is streamed to stdout if it is to be shown."""
        try:
            for self.last in responses:
                self.texts.append(self.last.text)
                self.n_drafted += self.last.from_draft
                if show:
                    print(self.last.text, end="", flush=True)
        finally:
            bar.close()
            if self.texts and show:
                print(flush=True)


def kept_text(
    report: CompressionReport | None = None,
    *,
    max_kv_size: int | None = None,
    memory: str = "drop",
) -> str:
    """What became of the prompt's entries, for the closing line; without a report, nothing yet."""
    if report is None:
        return "all entries kept so far"
    if report.policy == NO_POLICY:
        rotating = f"mlx-lm's rotating cache of {max_kv_size} entries"
        cache = "full cache" if max_kv_size is None else rotating
        return f"{cache} (no policy; add --snapkv top_k=N to compress)"
    if not report.compressed:
        return f"full cache: {report.reason}"
    beside = "" if memory == "drop" or report.book is not None else f", {_beside(report, memory)}"
    return f"{report.entries_text}, {report.memory_text}{beside}{report.recall_text}"


def _beside(report: CompressionReport, memory: str) -> str:
    """Where a memory has the entries that the answer is not decoded from, which a book's report tells itself."""
    _, *how = memory.split(":")
    where = "in files" if "file" in how else "in memory"
    bits = "".join(f" in {part.removesuffix('bit')} bits" for part in how if part != "file")
    return f"all {report.prompt_tokens} {where}{bits} as well"


def closing_line(response: GenerationResponse, kept: str, accepted: float | None) -> str:
    """One line of figures: what was read, kept and generated, and how fast.

    Args:
        accepted: share of the answer's tokens that came from the draft model, if there is one.
    """
    drafted = "" if accepted is None else f" ({accepted:.0%} of the tokens drafted)"
    return (
        f"{response.prompt_tokens} prompt tokens, {kept} | prompt {response.prompt_tps:.1f} tokens/s, "
        f"generation {response.generation_tps:.1f} tokens/s{drafted}, peak memory {response.peak_memory:.3g} GB"
    )


def _as_json(model: str, answer: _Answer, report: CompressionReport) -> dict[str, Any]:
    fields = ("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "finish_reason")
    accepted = answer.accepted
    return (
        {"model": model, "text": "".join(answer.texts)}
        | {name: getattr(answer.last, name) for name in fields}
        | ({} if accepted is None else {"acceptance_rate": accepted})
        | {"peak_memory_gb": answer.last.peak_memory, "compression": report.to_dict()}
    )
