"""`mlx-snapkv batch`: answer a file of requests, several at a time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, BinaryIO

from typer import Argument, Exit, Option

from ..errors import SnapKVError
from ..paths import path_of, refusing
from . import cache_options, options
from .prompt_console import PromptConsole

if TYPE_CHECKING:
    from ..batch.files import AnswersFile, RequestsFile
    from ..batch.run import Progress, Run
    from ..planning.settings import Setting


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options for the request and answer files, and for running the batch."""

    concurrency: options.Concurrency = 8
    requests: Annotated[
        str, Argument(help="File with one request per line, or - for stdin.", metavar="REQUESTS")
    ]
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            help="File for the answers, one per line; the same command continues it.",
        ),
    ]
    seed: options.Seed = None
    allow_errors: Annotated[bool, Option(help="Exit with 0 instead of 1 if requests failed.")] = (
        False
    )
    quiet: options.Quiet = False

    def open_requests(self) -> BinaryIO:
        """Open the request file, or stdin. Raises: SnapKVError: it can't be read."""
        if self.requests == "-" and sys.stdin is None:
            raise SnapKVError("standard input is closed: give a file of requests")
        if self.requests == "-":
            return sys.stdin.buffer
        with refusing(self.requests):
            return path_of(self.requests).open("rb")


def batch(
    *,
    files: FileOptions,
    model_options: options.ChatModelOptions,
    sampling: options.SamplingOptions,
    cache: cache_options.CacheOptions,
    compression: cache_options.CompressionOptions,
) -> None:
    r"""Answer requests in OpenAI's batch format, several at a time, optionally with compression or sparse attention.

    Each answer is written to disk as soon as it is complete. If a run is interrupted, the same command continues where
    it stopped. Sampling options and --max-tokens apply to requests that don't set their own. If a request fails, its
    line says why and the exit code is 1.

    \b
      mlx-snapkv batch requests.jsonl -o answers.jsonl --model demo --snapkv top_k=1024
      cat requests.jsonl | mlx-snapkv batch - -o answers.jsonl --model demo \
          --snapkv top_k=1024 --concurrency 16 --max-kv-bytes 4GB
    """
    from ..batch.files import AnswersFile, RequestsFile
    from ..batch.run import Run
    from ..completions.body import Defaults
    from ..models.trained_length import beyond_trained_length

    console = PromptConsole(files.quiet)
    setting = compression.setting_for_task(model_options.model, "batch", console.say, vars(cache))
    _require_policy_for_kv_bits(setting, cache.kv_bits)
    # Every answer records these settings, and a run that resumes the file must use the same ones.
    recorded_settings = {
        "policy": None if setting is None else str(setting),
        "kv_bits": cache.kv_bits,
    }
    with files.open_requests() as stream:
        requests = RequestsFile(stream)
        path = path_of(files.output, "--output")
        answers = AnswersFile(path, model_options.model, recorded_settings)
        model, tokenizer = model_options.load()
        cache.require_supported(model)
        console.say_all(cache.bits_notes())
        sampling.require_within_vocabulary(tokenizer)
        run = Run(
            model,
            tokenizer,
            answers,
            options={"policy": setting, **vars(cache)},
            defaults=Defaults(**vars(sampling)),
            concurrency=files.concurrency,
            max_kv_bytes=model_options.max_kv_bytes,
            seed=files.seed,
        )
        _answer_requests(run, requests, files.quiet)
    if not files.quiet or answers.n_errors:
        print(_closing_line(answers, run.progress), file=sys.stderr)
    length_warning = beyond_trained_length(model, run.progress.longest)
    if length_warning is not None:
        console.say(f"warning: {length_warning}")
    for warning, n_warned in run.progress.warnings.items():
        console.say(f"warning: {warning} ({n_warned} of {answers.n_answered} answers)")
    if answers.n_errors and not files.allow_errors:
        raise Exit(1)


def _require_policy_for_kv_bits(setting: Setting | None, kv_bits: int | None) -> None:
    """Require a policy if --kv-bits is set. Raises: SnapKVError."""
    if setting is None and kv_bits is not None:
        raise SnapKVError("in a batch --kv-bits needs a policy: add --policy, or drop --kv-bits")


def _answer_requests(run: Run, requests: RequestsFile, quiet: bool) -> None:
    """Answer the requests in a file and show a progress bar."""
    from .progress import StepBars

    with run.answers, StepBars(run.answers.path, quiet) as bar:
        bar.start("answering", requests.n_lines)

        def show_progress(progress: Progress) -> None:
            # `progress.seconds` is 0 if earlier runs answered every request.
            seconds = max(progress.seconds, 1e-9)
            prompt_speed = progress.prompt_tokens / seconds
            answer_speed = progress.answer_tokens / seconds
            speeds = f"prompts {prompt_speed:,.0f} tokens/s, answers {answer_speed:,.0f}"
            bar.set_count(progress.lines, speeds)

        run.answer(requests, show_progress)


def _closing_line(answers: AnswersFile, progress: Progress) -> str:
    """Summarise the run in one line: answers, errors, tokens, time and peak memory."""
    from mlx.core import get_peak_memory

    errors_text = ""
    if answers.n_errors:
        plural = "s" if answers.n_errors > 1 else ""
        errors_text = f", {answers.n_errors} error{plural}"
    n_earlier = progress.before
    earlier_text = f" ({n_earlier} of them from earlier runs)" if n_earlier else ""
    answers_text = f"{answers.n_answered} answered{errors_text} in {answers.path}{earlier_text}"
    tokens_text = f"{progress.prompt_tokens} prompt tokens, {progress.answer_tokens} answer tokens"
    peak_gb = get_peak_memory() / 1e9
    figures_text = f"{tokens_text}, {progress.seconds:.1f} s, peak memory {peak_gb:.3g} GB"
    return f"{answers_text} | {figures_text}"
