"""`mlx-snapkv generate`: one prompt, one answer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from ..engine.report import ENDED_IN_BLOCKS, NO_POLICY, CompressionReport
from ..errors import SnapKVError, brief
from ..planning.options import OPTIONS
from . import cache_options, options
from .command import flag_of, without_settings
from .loading import require_alone
from .options import one_of
from .prompts import PromptOptions, read_file
from .reading import Reading

if TYPE_CHECKING:
    from ..planning.auto import Recommendation
    from .saved_start import SavedStart

# What a saved prompt has settled, and what it has its own of, unless the command line says otherwise.
SETTLED = ("system_prompt", "prefill_response", "max_kv_size", "draft_model")
OVERRIDING = ("snapkv", "policy", "sparse", "kv_bits", *OPTIONS)
FIGURES = "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "finish_reason"


@dataclass(frozen=True)
class QuestionOptions(PromptOptions):
    prompt_cache_file: Annotated[
        str | None, Option(help="Prompt saved by cache-prompt, to continue from.")
    ] = None


@dataclass(frozen=True)
class OutputOptions(options.ShownOptions):
    """The same, with mlx-lm's own option."""

    verbose: Annotated[
        str,
        Option(
            parser=one_of("True", "T", "False", "F"), help="mlx-lm's option; False means --quiet."
        ),
    ] = "True"

    @property
    def silent(self) -> bool:
        return self.quiet or self.verbose.startswith("F")


@dataclass(frozen=True)
class ConstraintOptions:
    json_schema: Annotated[
        str | None,
        Option(
            metavar="FILE_OR_TEXT", help="JSON schema that the answer obeys, as text or in a file."
        ),
    ] = None

    def read(self) -> dict[str, Any] | bool | None:
        """The schema; SnapKVError if it can't be read."""
        if self.json_schema is None:
            return None
        text = self.json_schema.strip()
        if not _looks_like_json(text):
            text = read_file("--json-schema", text)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SnapKVError(f"--json-schema is not JSON: {brief(error)}") from error
        if not isinstance(value, dict | bool):
            raise SnapKVError('--json-schema must be a JSON object, such as \'{"type": "object"}\'')
        return value


def _looks_like_json(text: str) -> bool:
    """Whether a text that was typed is no file's name; one that starts as an object does may be cut short."""
    if text.startswith("{"):
        return True
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return not os.path.exists(text)


def _constrained(
    schema: dict[str, Any] | bool,
    tokenizer: Any,
    text: str,
    tokens: list[int],
    prompt: PromptOptions,
    max_tokens: int,
) -> dict[str, Any]:
    """Options of `stream_generate` for an answer that obeys a schema; SnapKVError if it can't be enforced."""
    from ..completions.constraint import Constraint
    from ..completions.grammar import json_format
    from ..completions.rendering import Rendered, initial_state

    if prompt.prefill_response is not None:
        raise SnapKVError("--json-schema constrains a whole answer: drop --prefill-response")
    raw = prompt.ignore_chat_template or not tokenizer.has_chat_template
    chat = Rendered(tokens, [{"role": "user", "content": text}], {"add_generation_prompt": True})
    state = None if raw else initial_state(tokenizer, chat)
    answer_format = json_format(schema, tokenizer, state, "--json-schema")
    return {"logits_processors": [Constraint(tokenizer, answer_format, max_tokens)]}


def _beside_saved(context: Context, *groups: Any) -> list[Any]:
    """Return the same options beside a saved prompt, which settings from elsewhere don't change.

    Raises: SnapKVError: one was typed that the saved prompt has settled.
    """
    found = []
    for group in groups:
        names = vars(group).keys() & {*SETTLED, *OVERRIDING}
        group = without_settings(context, group, *names)
        for name in sorted(names & {*SETTLED}):
            if getattr(group, name) is not None:
                flag = flag_of(name)
                raise SnapKVError(f"{flag} can't be combined with --prompt-cache-file: drop it")
        found.append(group)
    return found


def generate(
    context: Context,
    *,
    model: options.ShardedModelOptions,
    prompt: QuestionOptions,
    sampling: options.SamplingOptions,
    constraint: ConstraintOptions,
    seed: options.Seed = None,
    cache: cache_options.MLXCacheOptions,
    draft: options.DraftOptions,
    compression: cache_options.CompressionOptions,
    output: OutputOptions,
) -> None:
    """Answer a prompt. --snapkv and --policy compress its KV cache; --sparse keeps every entry and reads few.

    The answer goes to stdout; progress and figures go to stderr.

    \b
      mlx-snapkv generate --model demo \\
          --prompt "The access code of the opal oak is 481516. What is the access code of the opal oak?"
      mlx-snapkv generate --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --snapkv top_k=1024
      mlx-snapkv generate --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --sparse budget=6.25%
      cat book.txt | mlx-snapkv generate --model demo --prompt - --snapkv top_k=4096 --json
      mlx-snapkv generate --model demo --prompt "Name a town." \\
          --json-schema '{"type": "object", "properties": {"town": {"type": "string"}}}'
      mlx-snapkv generate --model demo --prompt-cache-file book.safetensors --prompt "Who did it?"
    """
    from ..models.distributed import from_first
    from .saved_start import SavedStart

    file = prompt.prompt_cache_file
    if file is not None:
        prompt, draft, cache, compression = _beside_saved(
            context, prompt, draft, cache, compression
        )
    keywords = compression.served()
    if file is None:
        compression.require_use()
    keywords |= cache.generation(keywords["policy"])
    text, schema = from_first(prompt.read), from_first(constraint.read)
    require_alone(draft_model=draft.draft_model)
    loaded, tokenizer = model.load()
    keywords |= draft.load(tokenizer, model.trust_remote_code)
    reading, start, taken = Reading(output.silent), None, None
    cache.require(loaded, draft.draft_model)
    if file is None:
        tokens = reading.wait_for(partial(prompt.encode, tokenizer, text))
        most = sampling.max_tokens
        taken = compression.recommend(loaded, len(tokens), "question", reading.say, keywords, most)
        keywords |= cache_options.keywords_of(taken)
        full_is_best = compression.is_auto and keywords["policy"] is None
        reading.warn(loaded, len(tokens), was_chosen=full_is_best, max_tokens=most, **keywords)
    else:
        start = SavedStart(file, model.model, loaded, compression, cache.quantization)
        keywords |= start.options
        reading.say_all(start.notes(text))
        raw = prompt.ignore_chat_template
        tokens = reading.wait_for(partial(start.encode, tokenizer, text, raw))
    n_read = len(tokens) + (0 if start is None else start.n_tokens)
    reading.say_all(cache.notes(keywords["policy"], n_read + sampling.max_tokens))
    options.seed_sampling(seed)
    keywords |= sampling.generation(tokenizer)
    if schema is not None:
        keywords |= _constrained(schema, tokenizer, text, tokens, prompt, sampling.max_tokens)
    hint = "" if compression.is_auto else " (no policy; --policy auto chooses one where it helps)"
    answer = _Answer(model.model, keywords, start, output, hint, taken)
    answer.print(loaded, tokenizer, tokens, reading)


@dataclass
class _Answer:
    """An answer, printed as it comes, and the figures at its end."""

    name: str  # the model's, as the user gave it
    keywords: dict[str, Any]  # of `stream_generate`
    start: SavedStart | None  # what the answer continues
    output: OutputOptions
    hint: str  # what would help a full cache
    taken: Recommendation | None  # what auto chose
    reports: list[CompressionReport] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    n_drafted: int = 0
    last: Any = None  # response: earlier ones are not held, with all their log-probabilities

    def print(self, model: Any, tokenizer: Any, tokens: list[int], reading: Reading) -> None:
        """Answer these tokens: the text or a JSON object to stdout, all else to stderr."""
        from ..engine.generate import stream_generate
        from ..planning.auto import explaining
        from ..planning.file_cost import file_cost

        show = not self.output.as_json
        store, folder = (self.keywords[name] for name in ("store", "store_dir"))
        cost = partial(file_cost, model, store, folder=folder) if show else None
        options = {"on_report": explaining(self.taken, self.reports.append), **self.keywords}
        try:
            with reading.bar(cost) as update:
                options["prompt_progress_callback"] = update
                for self.last in stream_generate(model, tokenizer, tokens, **options):
                    self.texts.append(self.last.text)
                    self.n_drafted += self.last.from_draft
                    if show:
                        print(self.last.text, end="", flush=True)
        except KeyboardInterrupt:
            self._close(reading, "stopped: ")
            raise
        if not show:
            print(json.dumps(self._to_dict(), ensure_ascii=False))
        self._close(reading)

    def _close(self, reading: Reading, how: str = "") -> None:
        if (last := self.last) is None:
            return
        if not self.output.as_json:
            print(flush=True)
        share = self._accepted
        drafted = "" if share is None else f" ({share:.0%} of the tokens were drafted)"
        # The first token comes with the prompt.
        timed = last.generation_tokens > 1 and last.generation_tps > 0
        speed = f"{last.generation_tps:.1f} tokens/s" if timed else "too short to time"
        reading.say(
            f"{how}{last.prompt_tokens} prompt tokens, {self._kept} | prompt {last.prompt_tps:.1f} tokens/s, "
            f"generation {speed}{drafted}, peak memory {last.peak_memory:.3g} GB"
        )
        for report in self.reports:
            reading.say_warnings(report)

    @property
    def _continued(self) -> SavedStart | None:
        """The saved prompt, if the answer goes on from its entries as they are."""
        return self.start if self.keywords["policy"] is None else None

    @property
    def _accepted(self) -> float | None:
        """The share of tokens that a draft model proposed, if there is one."""
        has_draft = "draft_model" in self.keywords
        return self.n_drafted / self.last.generation_tokens if has_draft else None

    @property
    def _kept(self) -> str:
        if self._continued is not None:
            return self._continued.kept
        if not self.reports:
            return "all entries kept so far"
        report = self.reports[0]
        most = self.keywords["max_kv_size"]
        if report.policy == NO_POLICY:
            cache = "full cache" if most is None else f"mlx-lm's rotating cache of {most} entries"
            return cache + self.hint
        if not report.compressed:
            return f"{'' if report.reason == ENDED_IN_BLOCKS else 'full cache: '}{report.reason}"
        return f"{report.entries_text}, {report.memory_text}"

    def _to_dict(self) -> dict[str, Any]:
        report = self.reports[0] if self._continued is None else self._continued.report
        answer = {
            "model": self.name,
            "text": "".join(self.texts),
            **{name: getattr(self.last, name) for name in FIGURES},
            "acceptance_rate": self._accepted,
            "peak_memory_gb": self.last.peak_memory,
            "compression": report.to_dict(),
            "prompt_cache": self.start and self.start.to_dict(),
        }
        if any(constraint.is_cut for constraint in self.keywords.get("logits_processors", ())):
            answer["finish_reason"] = "length"
        return {name: value for name, value in answer.items() if value is not None}
