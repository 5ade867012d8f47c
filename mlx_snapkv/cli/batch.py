"""`mlx-snapkv batch`: a file of requests, answered together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from ..engine.report import VERIFY_BELOW
from ..errors import SnapKVError
from ..paths import path_of, reason
from . import flags
from .answering import batch_options, load_for_requests, most_kv_bytes

if TYPE_CHECKING:
    from ..batch.answers_file import AnswersFile
    from ..batch.requests_file import RequestsFile
    from ..batch.run import Progress, Run

LINE_EVERY = 30.0  # seconds

Requests = Annotated[
    str, typer.Argument(help="File of requests, one a line, or - for stdin.", metavar="REQUESTS")
]
Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", help="File of answers, one a line; the same command goes on from it."
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Requests at once, at most.")]
MaxKVBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="KV memory, such as 4GB, that requests wait rather than exceed."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**64 - 1,
        help="Seed of the sampling, for requests that bring none of their own.",
    ),
]


def batch(
    requests: Requests,
    output: Output,
    model: flags.Model,
    concurrency: Concurrency = 8,
    max_kv_bytes: MaxKVBytes = None,
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
    seed: Seed = None,
    kv_group_size: flags.KVGroupSize = 64,
    kv_bits: flags.KVBits = None,
    prefill_step_size: flags.PrefillStepSize = 2048,
    adapter_path: flags.AdapterPath = None,
    quantize_activations: flags.QuantizeActivations = False,
    trust_remote_code: flags.TrustRemoteCode = False,
    snapkv: flags.Snapkv = None,
    policy: flags.Policy = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = VERIFY_BELOW,
    far: flags.Far = None,
    quiet: flags.Quiet = False,
) -> None:
    """Answer a file of requests, OpenAI's batch lines, several at once on compressed KV caches.

    Every answer is on the disk when it is whole, so the same command goes on where it stopped. What a request does not
    say of its sampling and length, the options here do. A line that can't be answered becomes one that says why.

    \b
      mlx-snapkv batch requests.jsonl -o answers.jsonl --model demo --policy keydiff:budget=25%,min_ctx=1024
      cat requests.jsonl | mlx-snapkv batch - -o answers.jsonl --model demo \\
          --snapkv top_k=1024 --concurrency 16 --max-kv-bytes 4GB
    """
    from ..batch.answers_file import AnswersFile
    from ..batch.memory import Memory
    from ..batch.openai_request import Defaults
    from ..batch.requests_file import RequestsFile
    from ..batch.run import Run
    from ..engine.recalling import Recall
    from ..entries.quantization import Quantization
    from ..policies import resolve_policy

    chosen = resolve_policy(snapkv, policy)
    if kv_bits is not None and chosen is None:
        raise SnapKVError(
            "--kv-bits in a batch is for compressed entries: add --policy, or drop it"
        )
    limit = most_kv_bytes(max_kv_bytes)
    defaults = Defaults(
        max_tokens,
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        min_tokens_to_keep=min_tokens_to_keep,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
    )
    recall = Recall(memory, verify, verify_below, far)
    about = {"policy": None if chosen is None else str(chosen), "kv_bits": kv_bits}
    about |= {} if memory == "drop" else {"memory": memory, "verify": verify}
    with _opened(requests) as stream:
        file = RequestsFile(stream)
        answers = AnswersFile(path_of(output, "--output"), {"model": model, **about})
        loaded, tokenizer = load_for_requests(
            model,
            adapter_path,
            defaults,
            trust_remote_code=trust_remote_code,
            quantize_activations=quantize_activations,
            extra_eos_token=extra_eos_token,
            chat_template_config=chat_template_config,
        )
        options = batch_options(chosen, prefill_step_size, kv_bits, kv_group_size, recall)
        run = Run(
            loaded, tokenizer, answers, options, model, about, defaults, concurrency, seed=seed
        )
        if limit is not None:
            quantization = None if kv_bits is None else Quantization(kv_bits, kv_group_size)
            run.memory = Memory(loaded, chosen, quantization, prefill_step_size, limit)
        _answer(run, file, quiet)
    if not quiet:
        print(_closing_line(answers, run.progress), file=sys.stderr)


def _answer(run: Run, file: RequestsFile, quiet: bool) -> None:
    """Answer the file, with a bar."""
    from .progress import BatchBar

    with run.answers, BatchBar(file.n_lines, LINE_EVERY, quiet) as bar:
        run.on_progress = bar.update
        try:
            run.answer(file)
        except KeyboardInterrupt:
            bar.console.print(
                f"What was answered is in {run.answers.path}; the same command goes on from there.",
                soft_wrap=True,
            )
            raise


def _closing_line(answers: AnswersFile, progress: Progress) -> str:
    from mlx.core import get_peak_memory

    said = f"{answers.n_answered} answered"
    if answers.n_errors:
        said += f", {answers.n_errors} error{'s' if answers.n_errors > 1 else ''}"
    before = f" ({progress.before} of them before)" if progress.before else ""
    return (
        f"{said} in {answers.path}{before} | {progress.prompt_tokens} prompt tokens, "
        f"{progress.answer_tokens} answer tokens, {progress.seconds:.1f} s, "
        f"peak memory {get_peak_memory() / 1e9:.3g} GB"
    )


def _opened(name: str) -> BinaryIO:
    """The file, or standard input; SnapKVError if it can't be read."""
    if name == "-":
        if sys.stdin is None:
            raise SnapKVError("standard input is closed: give a file of requests")
        return sys.stdin.buffer
    path = path_of(name)
    try:
        is_folder = path.is_dir()
        stream = None if is_folder else path.open("rb")
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{name}: {reason(error)}") from error
    if stream is None:
        raise SnapKVError(f"{name} is a folder: give a file of requests")
    return stream
