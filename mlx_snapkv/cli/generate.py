"""`mlx-snapkv generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..engine.report import NO_POLICY, CompressionReport
from ..errors import SnapKVError
from . import cache_options, options
from .reading import Reading

if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse

    from .saved_start import SavedStart


@dataclass(frozen=True)
class OutputOptions:
    """What is printed beside the answer, and how."""

    quiet: options.Quiet = False
    verbose: Annotated[str, Option(help="mlx-lm's name for it: False is --quiet.")] = "True"
    as_json: options.AsJson = False

    def __post_init__(self):
        if self.verbose.lower() not in ("true", "t", "false", "f"):
            raise SnapKVError(f"--verbose must be True or False, got {self.verbose!r}")

    @property
    def silent(self) -> bool:
        return self.quiet or self.verbose.lower().startswith("f")


def generate(
    *,
    model: options.ShardedModelOptions,
    prompt: options.PromptOptions,
    prompt_cache_file: Annotated[
        str | None, Option(help="A prompt saved by cache-prompt, to be continued.")
    ] = None,
    tokenizer: options.TokenizerOptions,
    sampling: options.SamplingOptions,
    seed: options.Seed = None,
    cache: cache_options.MLXCacheOptions,
    draft: options.DraftOptions,
    policy: cache_options.AutoPolicyOptions,
    retention: cache_options.RetentionOptions,
    output: OutputOptions,
) -> None:
    """Answer a prompt, with a compressed KV cache if a policy is given.

    The answer goes to stdout; progress and figures go to stderr.

    \b
      mlx-snapkv generate --model demo \\
          --prompt "The access code of the opal oak is 481516. What is the access code of the opal oak?"
      mlx-snapkv generate --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --snapkv top_k=1024
      mlx-snapkv generate --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --snapkv top_k=1024 --memory recall
      cat book.txt | mlx-snapkv generate --model demo --prompt - --snapkv top_k=4096 --json
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?"
    """
    from .saved_start import SavedStart
    from .sharded import on_first, require_alone

    chosen = policy.resolve()
    keywords = {"policy": chosen, **retention.keywords(), **cache.generation(chosen)}
    text = on_first(prompt.read)
    require_alone(draft_model=draft.draft_model)
    loaded, adapted = model.load()
    tokenizer.adapt(adapted)
    keywords |= draft.load(adapted, model.trust_remote_code)
    reading = Reading(output.silent)
    start, was_chosen = None, False
    if prompt_cache_file is None:
        cache.require(loaded, draft.draft_model)
        tokens = reading.wait_for(partial(prompt.encode, adapted, text))
        keywords |= policy.take(loaded, len(tokens), "question", retention.memory, reading.say)
        was_chosen = policy.is_auto and keywords["policy"] is None
        asked = {"max_tokens": sampling.max_tokens, "was_chosen": was_chosen, **keywords}
        reading.warn(loaded, len(tokens), **asked)
    else:
        start = SavedStart(
            prompt_cache_file, model.model, loaded, chosen, retention.memory, cache.quantization
        )
        keywords |= start.options
        if policy.is_auto:
            reading.say(
                f"note: --policy auto changes nothing of {prompt_cache_file}: it goes on as it was saved"
            )
        if start.has(text):
            reading.say(f"note: {prompt_cache_file} has this text already: give the question alone")
        encode = partial(start.encode, adapted, text, prompt.ignore_chat_template)
        tokens = reading.wait_for(encode)
    options.seed_sampling(seed)
    keywords |= sampling.generation(adapted)
    _Answer(model.model, loaded, adapted, keywords, start, output, was_chosen).print(
        tokens, reading
    )


@dataclass
class _Answer:
    """An answer, printed as it comes, and the figures at its end.

    Attributes:
        name: the model's, as the user gave it.
        keywords: of `stream_generate`.
        start: the saved prompt that the answer continues, if there is one.
        was_chosen: --policy auto has taken the full cache.
        last: the newest response.
        n_drafted: how many tokens the draft model gave.
    """

    name: str
    model: Any
    tokenizer: Any
    keywords: dict[str, Any]
    start: SavedStart | None
    output: OutputOptions
    was_chosen: bool = False
    texts: list[str] = field(default_factory=list)
    reports: list[CompressionReport] = field(default_factory=list)
    last: Any = None
    n_drafted: int = 0

    def print(self, tokens: list[int], reading: Reading) -> None:
        """Answer these tokens: the text or a JSON object to stdout, all else to stderr."""
        from ..engine.footprint import book_cost
        from ..engine.generate import stream_generate

        n_before = 0 if self.start is None else self.start.n_tokens
        ways = self.keywords["policy"], self.keywords["memory"]
        cost = partial(book_cost, self.model, *ways, n_before=n_before)
        try:
            with reading.bar(None if self.output.as_json else cost) as update:
                self._take(
                    stream_generate(
                        self.model,
                        self.tokenizer,
                        tokens,
                        on_report=self.reports.append,
                        prompt_progress_callback=update,
                        **self.keywords,
                    )
                )
        except KeyboardInterrupt:
            self._close("stopped: ")
            raise
        if self.output.as_json:
            print(json.dumps(self._to_dict(), ensure_ascii=False))
        self._close()

    def _take(self, responses: Iterator[GenerationResponse]) -> None:
        """All responses; their text is streamed to stdout unless it is to be part of a JSON object."""
        show = not self.output.as_json
        try:
            for self.last in responses:
                self.texts.append(self.last.text)
                self.n_drafted += self.last.from_draft
                if show:
                    print(self.last.text, end="", flush=True)
        finally:
            if self.texts and show:
                print(flush=True)

    def _close(self, how: str = "") -> None:
        """Print the line of figures."""
        if self.output.silent or self.last is None:
            return
        max_kv_size, memory = self.keywords["max_kv_size"], self.keywords["memory"]
        if self._continued is not None:
            kept = self._continued.kept
        elif self.was_chosen:
            kept = "full cache"
        else:
            kept = kept_text(*self.reports, max_kv_size=max_kv_size, memory=memory)
        print(how + closing_line(self.last, kept, self._accepted), file=sys.stderr)
        for said in (warning for report in self.reports for warning in report.warnings):
            print(f"warning: {said}", file=sys.stderr)

    @property
    def _continued(self) -> SavedStart | None:
        """The saved prompt, if the answer goes on from its entries as they are."""
        return self.start if self.keywords["policy"] is None else None

    @property
    def _accepted(self) -> float | None:
        """Share of the tokens that came from the draft model, if there is one."""
        if "draft_model" not in self.keywords:
            return None
        return self.n_drafted / self.last.generation_tokens

    def _to_dict(self) -> dict[str, Any]:
        report = self.reports[0] if self._continued is None else self._continued.report
        names = ("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps")
        fields = {name: getattr(self.last, name) for name in (*names, "finish_reason")}
        accepted = {} if self._accepted is None else {"acceptance_rate": self._accepted}
        return {
            "model": self.name,
            "text": "".join(self.texts),
            **fields,
            **accepted,
            "peak_memory_gb": self.last.peak_memory,
            "compression": report.to_dict(),
            **({} if self.start is None else {"prompt_cache": self.start.to_dict()}),
        }


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
        return f"{cache} (no policy; --policy auto takes one where it helps)"
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
