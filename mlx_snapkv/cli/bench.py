"""`mlx-snapkv bench`: compare the prefill and decoding speed of several caches in one process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SnapKVError
from .cache_options import parse_settings
from .loading import load_model
from .options import lengths_parser
from .process import raise_on_interrupt
from .results import ResultFiles, provenance, write_json, write_result
from .terminal_table import print_table

if TYPE_CHECKING:
    from ..planning.settings import Setting

MIN_CONTEXT = 1024  # tokens; `snapkv:budget=6.25%` keeps only 64 entries of a prompt this short
BENCH_POLICIES = ("snapkv:budget=6.25%", "keydiff:budget=2048")
# Chunks choose entries here, because a prompt that is read densely takes as long as with the full cache.
BENCH_SPARSE = ("budget=6.25%,read=sparse",)
BENCH_REMARK = "The figures hold for this machine; only the ratios carry over, and only to machines of its kind."
BENCH_CONTEXTS = "4096,16384,32768,65536,131072"


@dataclass(frozen=True)
class BenchOptions:
    """Options for `bench`: model, caches, lengths and number of trials."""

    model: Annotated[
        str | None,
        Option(
            help="Model folder, repository or built-in model; default: a LLaMA with random weights."
        ),
    ] = None
    policy: Annotated[
        list[str] | None,
        Option(help=f"Policy to measure; repeatable; default: {' and '.join(BENCH_POLICIES)}."),
    ] = None
    sparse: Annotated[
        list[str] | None,
        Option(
            help=f"Sparse attention to measure; repeatable; default, unless a policy is given: {BENCH_SPARSE[0]}."
        ),
    ] = None
    context: Annotated[
        Any,
        Option(
            parser=lengths_parser(MIN_CONTEXT),
            help=f"Context lengths to decode at, at least {MIN_CONTEXT}.",
        ),
    ] = BENCH_CONTEXTS
    prompt_tokens: Annotated[
        Any,
        Option(
            "--prompt-tokens",
            "-p",
            parser=lengths_parser(MIN_CONTEXT),
            help=f"Prompt lengths to read with every cache, at least {MIN_CONTEXT}.",
        ),
    ] = "8192,16384"
    num_trials: Annotated[
        int, Option("--num-trials", "-n", min=1, help="Prompts to read of each length.")
    ] = 3
    steps: Annotated[int, Option(min=1, max=200, help="Tokens to decode per cache.")] = 50
    output: Annotated[str | None, Option(help="Write OUTPUT.json and OUTPUT.md.")] = None

    def settings(self) -> list[Setting]:
        """Return the settings to measure, by default `BENCH_POLICIES` and `BENCH_SPARSE`.

        Raises: SnapKVError: a value is invalid, or a store is not "memory".
        """
        from ..planning.config import CompressionConfig

        if not (self.policy or self.sparse):
            return parse_settings(BENCH_POLICIES, sparse=BENCH_SPARSE)
        settings = parse_settings(self.policy, sparse=self.sparse)
        for setting in settings:
            store = CompressionConfig(setting).store
            if store not in (None, "memory"):
                raise SnapKVError(
                    f"bench decodes from unquantised entries in memory: drop store={store} from {setting}"
                )
        return settings


def bench(*, options: BenchOptions) -> None:
    """Measure prefill and decoding speed by context length.

    Compare the full cache, mlx-lm's options, policies and sparse attention.
    """
    from ..engine.wired_memory import hold_memory
    from ..measure.contenders import RANDOM, decode_quota, make_random_model
    from ..measure.speed import measure_speed, speed_table
    from ..measure.tables import as_page
    from .progress import StepBars

    model_name = options.model
    settings = options.settings()
    for setting, n_tokens in product(settings, [*options.context, *options.prompt_tokens]):
        # Raises SnapKVError if a budget is less than one entry, or leaves no entry for the sliding window.
        decode_quota(setting, n_tokens)
    files = None if options.output is None else ResultFiles(options.output, (".json", ".md"))
    raise_on_interrupt()
    if model_name is None:
        model = make_random_model()
        hold_memory(model)
    else:
        model, _ = load_model(model_name)
    result: dict[str, Any] = {**provenance(), "model": model_name or RANDOM, "speed": []}
    with StepBars() as bars:

        def save_rows(rows: list[dict[str, Any]]) -> None:
            """Advance the bar. With --output, also write the rows, so that Ctrl-C doesn't lose them."""
            result["speed"] = rows
            bars.count_step()
            if files is not None:
                write_json(files.base, result)

        result["speed"] = measure_speed(
            model,
            settings,
            contexts=options.context,
            prompts=options.prompt_tokens,
            trials=options.num_trials,
            steps=options.steps,
            on_start=bars.start,
            on_rows=save_rows,
        )
    table = speed_table(result["speed"])
    print_table(table)
    if files is not None:
        page = as_page("Benchmarks", result, BENCH_REMARK, [table])
        written_files = write_result(files.base, result, page)
        print(files.summary(written_files))
