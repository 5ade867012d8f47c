"""`mlx-snapkv generate`: answer one prompt."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..engine.report import ENDED_IN_BLOCKS, NO_POLICY, CompressionReport
from ..errors import SnapKVError, brief
from . import cache_options, options
from .command import OUTPUT
from .loading import require_one_process
from .options import one_of
from .prompt_console import PromptConsole
from .prompts import PromptOptions, read_file

if TYPE_CHECKING:
    from ..planning.auto import Recommendation
    from .saved_prompt import SavedPrompt

# Attributes of mlx-lm's response that --json prints.
FIGURES = "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "finish_reason"

PromptCacheFile = Annotated[
    str | None, Option(help="Prompt saved by cache-prompt, to continue from.")
]
JSONSchema = Annotated[
    str | None,
    Option(
        metavar="FILE_OR_TEXT",
        help="JSON schema that the answer obeys, as text or in a file.",
        rich_help_panel=OUTPUT,
    ),
]
Verbose = Annotated[
    str,
    Option(
        parser=one_of("True", "T", "False", "F"),
        help="mlx-lm's option; False means --quiet.",
        rich_help_panel=OUTPUT,
    ),
]


def _read_schema(file_or_text: str | None) -> dict[str, Any] | bool | None:
    """Read the value of --json-schema. Return None without the option.

    Raises: SnapKVError: the file can't be read, or the value is not a JSON object or boolean.
    """
    if file_or_text is None:
        return None
    text = file_or_text.strip()
    if not _is_json_text(text):
        text = read_file("--json-schema", text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SnapKVError(f"--json-schema is not JSON: {brief(error)}") from error
    if not isinstance(schema, dict | bool):
        raise SnapKVError('--json-schema must be a JSON object, such as \'{"type": "object"}\'')
    return schema


def _is_json_text(value: str) -> bool:
    """Check whether the value of --json-schema is JSON rather than a file name.

    A value that starts with "{" counts as JSON, even if it is invalid. Any other value must be valid JSON, and not the
    name of an existing file.
    """
    if value.startswith("{"):
        return True
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return not os.path.exists(value)


def _constraint_keywords(
    schema: dict[str, Any] | bool,
    tokenizer: Any,
    text: str,
    tokens: list[int],
    prompt: PromptOptions,
    max_tokens: int,
) -> dict[str, Any]:
    """Return the `stream_generate` keywords that make the answer follow a JSON schema.

    Raises: SnapKVError: the schema can't be enforced, or --prefill-response is set.
    """
    from ..completions.constraint import Constraint
    from ..completions.grammar import json_format
    from ..completions.rendering import Rendered, initial_state

    if prompt.prefill_response is not None:
        raise SnapKVError("--json-schema constrains a whole answer: drop --prefill-response")
    start_state = None
    if prompt.uses_chat_template(tokenizer):
        messages = [{"role": "user", "content": text}]
        chat = Rendered(tokens, messages, {"add_generation_prompt": True})
        start_state = initial_state(tokenizer, chat)
    answer_format = json_format(schema, tokenizer, start_state, "--json-schema")
    return {"logits_processors": [Constraint(tokenizer, answer_format, max_tokens)]}


def generate(
    *,
    model_options: options.ShardedModelOptions,
    prompt: PromptOptions,
    prompt_cache_file: PromptCacheFile = None,
    compression: cache_options.CompressionOptions,
    cache: cache_options.MLXCacheOptions,
    sampling: options.SamplingOptions,
    seed: options.Seed = None,
    json_schema: JSONSchema = None,
    draft: options.DraftOptions,
    output: options.OutputOptions,
    verbose: Verbose = "True",
) -> None:
    r"""Print the answer to a prompt to stdout, and progress and statistics to stderr.

    \b
      mlx-snapkv generate --model demo --prompt-file book.txt --prompt "Who did it?" --policy auto
      cat book.txt | mlx-snapkv generate --model demo --prompt - --snapkv top_k=4096 --json
      mlx-snapkv generate --model demo --prompt "Name a town." --json-schema town.json
    """
    from ..models.distributed import from_first_rank
    from .saved_prompt import SavedPrompt

    max_tokens = sampling.max_tokens
    # `compression.setting` rejects --store without --sparse. With a saved prompt, --store alone is allowed, because the
    # prompt may have been saved with sparse attention.
    setting = compression.setting if prompt_cache_file is None else compression.resolve()
    keywords = {"policy": setting, **cache.generate_keywords(setting)}
    text = from_first_rank(prompt.read)
    schema = from_first_rank(partial(_read_schema, json_schema))
    require_one_process(draft_model=draft.draft_model)
    model, tokenizer = model_options.load()
    keywords |= draft.load(tokenizer, model_options.trust_remote_code)
    console = PromptConsole(output.quiet or verbose.startswith("F"))
    saved = None
    recommendation = None
    cache.require_supported(model, draft.draft_model)
    if prompt_cache_file is None:
        tokens = console.wait_for(partial(prompt.encode, tokenizer, text))
        recommendation = compression.recommend(
            model, len(tokens), "question", console.say, keywords, max_tokens
        )
        if recommendation is not None:
            keywords["policy"] = recommendation.config.setting
        auto_keeps_all = compression.is_auto and keywords["policy"] is None
        console.announce(
            model,
            len(tokens),
            shows_kept=not auto_keeps_all,
            max_kv_bytes=model_options.max_kv_bytes,
            max_tokens=max_tokens,
            **keywords,
        )
    else:
        saved = SavedPrompt(
            prompt_cache_file, model_options.model, model, compression, cache.quantization
        )
        saved.require_memory(model_options.max_kv_bytes)
        keywords |= saved.options
        console.say_all(saved.notes(text))
        encode = partial(saved.encode, tokenizer, text, prompt.ignore_chat_template)
        tokens = console.wait_for(encode)
    n_saved = 0 if saved is None else saved.n_tokens
    saved_has_setting = saved is not None and saved.policy != NO_POLICY
    if not saved_has_setting:
        console.say_all(cache.notes(keywords["policy"], n_saved + len(tokens), max_tokens))
    options.seed_sampling(seed)
    keywords |= sampling.generate_keywords(tokenizer)
    if schema is not None:
        keywords |= _constraint_keywords(schema, tokenizer, text, tokens, prompt, max_tokens)
    answer = _Answer(
        model_name=model_options.model,
        keywords=keywords,
        saved=saved,
        as_json=output.as_json,
        recommendation=recommendation,
    )
    answer.print(model, tokenizer, tokens, console)


@dataclass
class _Answer:
    """Prints an answer as it is generated, then its statistics.

    Attributes:
        model_name: model name as typed by the user.
        keywords: keyword arguments for `stream_generate`.
        saved: saved prompt that the answer continues, if any.
        as_json: whether to print a JSON object to stdout instead of the text.
        recommendation: what --policy auto chose, if it was used.
        reports: the request's report, once there is one.
        texts: text of each response.
        n_drafted: number of answer tokens proposed by the draft model.
        last_response: mlx-lm's last response. Earlier ones are dropped, because each contains log-probabilities for the
            whole vocabulary.
    """

    model_name: str
    keywords: dict[str, Any]
    saved: SavedPrompt | None
    as_json: bool
    recommendation: Recommendation | None
    reports: list[CompressionReport] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    n_drafted: int = 0
    last_response: Any = None

    def print(self, model: Any, tokenizer: Any, tokens: list[int], console: PromptConsole) -> None:
        """Generate the answer. Print it to stdout, as text or as a JSON object, and its statistics to stderr."""
        from ..engine.generate import stream_generate
        from ..planning.auto import explaining
        from ..planning.file_cost import file_cost

        predict_cost = partial(file_cost, model, self.keywords["policy"])
        options = {
            "on_report": explaining(self.recommendation, self.reports.append),
            **self.keywords,
        }
        try:
            with console.bar(predict_cost) as update_bar:
                options["prompt_progress_callback"] = update_bar
                for response in stream_generate(model, tokenizer, tokens, **options):
                    self.last_response = response
                    self.texts.append(response.text)
                    self.n_drafted += response.from_draft
                    if not self.as_json:
                        print(response.text, end="", flush=True)
        except KeyboardInterrupt:
            self._print_figures(console, "stopped: ")
            raise
        if self.as_json:
            print(json.dumps(self._to_dict(), ensure_ascii=False))
        self._print_figures(console)

    def _print_figures(self, console: PromptConsole, prefix: str = "") -> None:
        """Print the closing line and the report's warnings, unless no token was generated."""
        response = self.last_response
        if response is None:
            return
        if not self.as_json:
            print(flush=True)
        drafted_share = self._drafted_share
        drafted_text = ""
        if drafted_share is not None:
            drafted_text = f" ({drafted_share:.0%} of the tokens were drafted)"
        # The first token's time counts as prompt time, so a single token has no generation speed.
        is_timed = response.generation_tokens > 1 and response.generation_tps > 0
        speed_text = f"{response.generation_tps:.1f} tokens/s" if is_timed else "too short to time"
        console.say(
            f"{prefix}{response.prompt_tokens} prompt tokens, {self._kept_text} | "
            f"prompt {response.prompt_tps:.1f} tokens/s, generation {speed_text}{drafted_text}, "
            f"peak memory {response.peak_memory:.3g} GB"
        )
        for report in self.reports:
            console.say_warnings(report.warnings)

    @property
    def _continued_prompt(self) -> SavedPrompt | None:
        """Return the saved prompt if its report describes the answer's cache.

        Return None without a saved prompt, or with sparse attention, which makes a report of its own.
        """
        has_setting = self.keywords["policy"] is not None
        return None if has_setting else self.saved

    @property
    def _drafted_share(self) -> float | None:
        """Return the fraction of answer tokens proposed by the draft model, or None without a draft model."""
        has_draft_model = "draft_model" in self.keywords
        if not has_draft_model:
            return None
        return self.n_drafted / self.last_response.generation_tokens

    @property
    def _kept_text(self) -> str:
        """Describe the cache that the answer was decoded from, for the closing line."""
        if self._continued_prompt is not None:
            return self._continued_prompt.kept_text
        if not self.reports:
            return "all entries kept so far"
        report = self.reports[0]
        if report.policy == NO_POLICY:
            advice = ""
            if self.recommendation is None:
                advice = " (no policy; --policy auto chooses one where it helps)"
            max_kv_size = self.keywords["max_kv_size"]
            if max_kv_size is None:
                return f"full cache{advice}"
            return f"mlx-lm's rotating cache of {max_kv_size} entries{advice}"
        if report.reason == ENDED_IN_BLOCKS:
            return report.reason
        if not report.compressed:
            return f"full cache: {report.reason}"
        return f"{report.entries_text}, {report.memory_text}"

    def _to_dict(self) -> dict[str, Any]:
        """Return the object for --json."""
        continued = self._continued_prompt
        report = self.reports[0] if continued is None else continued.report
        fields = {
            "model": self.model_name,
            "text": "".join(self.texts),
            **{name: getattr(self.last_response, name) for name in FIGURES},
            "acceptance_rate": self._drafted_share,
            "peak_memory_gb": self.last_response.peak_memory,
            "compression": report.to_dict(),
            "prompt_cache": None if self.saved is None else self.saved.to_dict(),
        }
        constraints = self.keywords.get("logits_processors", ())
        was_closed_early = any(constraint.closed_early for constraint in constraints)
        if was_closed_early:
            fields["finish_reason"] = "length"
        return {name: value for name, value in fields.items() if value is not None}
