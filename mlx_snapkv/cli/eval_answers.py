"""`mlx-snapkv eval needle`, `lines`, `suite` and `data`: questions whose right answers are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from .._version import __version__
from ..demo import MODELS
from ..demo.tasks import TASKS
from ..errors import SnapKVError
from .cache_options import VerifyOptions
from .loading import load_model
from .options import DocumentSeed, IgnoreChatTemplate, Model, whole_numbers
from .prompts import read_file
from .results import (
    Lengths,
    Policies,
    ResultOptions,
    Setting,
    known,
    methods_of,
    results_in,
    settings_of,
)

if TYPE_CHECKING:
    from ..evals.methods import Dataset, Method
    from ..evals.tables import Page
    from ..evals.tasks import Grid
    from .results import ResultFiles

LEAST = 256  # tokens of a prompt
LEAST_OF_SUITE = 512
POOLED = "snapkv:budget=12.5%,n_window=32,obs_window=32,lookahead=0"
POOLING = [*(f"{POOLED},pool=avg,pool_kernel={width}" for width in (1, 7, 21)), POOLED]


@dataclass(frozen=True)
class GridOptions:
    """Who is asked for facts at which depths of prompts of which lengths."""

    model: Model = "demo"
    policy: Policies = None
    setting: Setting = "known"
    length: Lengths = "2048,4096"
    depths: Annotated[
        int, Option(min=1, max=101, help="Depths to hide at, evenly from start to end.")
    ] = 5
    questions: Annotated[int, Option(min=1, help="Questions per length and depth.")] = 1
    seed: DocumentSeed = 0


def needle(
    *,
    grid: GridOptions,
    needles: Annotated[
        int, Option(min=1, max=1000, help="Facts hidden in a document; one is asked for.")
    ] = 1,
    haystack: Annotated[
        list[str] | None,
        Option(metavar="FILE", help="Text to hide facts in; repeat it for several files."),
    ] = None,
    result: ResultOptions,
) -> None:
    """Hide a fact at every depth of prompts of every length, and ask for it at the end.

    mlx-snapkv eval needle --policy keydiff:budget=12.5% --policy snapkv:budget=12.5%,lookahead=0
    """
    from ..evals import tasks

    text = "\n\n".join(read_file("--haystack", file) for file in haystack or [])
    if haystack and not text.strip():
        raise SnapKVError(f"--haystack {' '.join(haystack)}: there is no text in it")
    make = partial(tasks.needle, needles=needles, text=text or None)
    _evaluate(make, grid, grid.policy or [], result)


def lines(*, grid: GridOptions, result: ResultOptions) -> None:
    """Ask for one of many lines that differ in a name and a number only (LongEval's lines).

    Without --policy, SnapKV with 1/8 of the entries: without pooling, pooled over 7 and 21 as in the paper, and its
    default. These use lookahead=0: with its default the full cache would answer the whole number. The embedded
    models, which don't know LongEval's words, get lines of their own.
    """
    from ..evals import tasks

    wording = tasks.FACTS if grid.model in MODELS else tasks.LONGEVAL
    make = partial(tasks.lines, wording=wording)
    _evaluate(make, grid, grid.policy or POOLING, result)


def _evaluate(
    make: Callable[[Any, Grid], Dataset],
    options: GridOptions,
    policies: Sequence[str],
    result: ResultOptions,
) -> None:
    """Ask, and draw a heat map of every method."""
    from ..evals.tasks import RETRIEVAL, Grid
    from ..reporting import heatmap

    lengths = list(dict.fromkeys(whole_numbers("--length", options.length, LEAST)))
    if not lengths:
        raise SnapKVError("--length is empty: give at least one number of tokens")
    methods, settings = methods_of(policies, lengths), settings_of(options.setting)
    maps = [heatmap.ending(method.name, each) for method in methods for each in settings]
    files = result.files(*maps)
    model, tokenizer = _load(options.model)
    grid = Grid(lengths, options.depths, options.questions, options.seed)
    asked = options.model, model, make(tokenizer, grid), RETRIEVAL
    _measure(*asked, methods, settings, result, files, heatmap.write_heatmaps)


def suite(
    *,
    model: Model = "demo-tasks",
    policy: Policies = None,
    by_mask: Annotated[
        list[str] | None,
        Option(
            "--by-mask",
            metavar="METHOD",
            help='Head-wise budgets, whose right answers are measured by hiding entries: "adakv of POLICY" or '
            "fastgen; repeat it to compare several.",
        ),
    ] = None,
    retention: VerifyOptions,
    task: Annotated[
        list[str] | None,
        Option(metavar="TASK", help=f"Of {', '.join(TASKS)}; repeat it. By default all."),
    ] = None,
    setting: Setting = "both",
    length: Lengths = "2048",
    documents: Annotated[int, Option(min=1, help="Documents per task and length.")] = 4,
    questions: Annotated[int, Option(min=1, help="Questions a document, at most.")] = 5,
    seed: DocumentSeed = 0,
    result: ResultOptions,
) -> None:
    """Ask harder questions: look-alikes, several facts, values overwritten, chains; the full cache's answers beside.

    mlx-snapkv eval suite --policy keydiff:budget=6% --policy snapkv:budget=6%,lookahead=0
    """
    from ..evals.tasks import SUITE
    from ..evals.tasks import suite as make

    tasks = known("--task", task or list(TASKS), list(TASKS))
    settings = settings_of(setting)
    lengths = whole_numbers("--length", length, LEAST_OF_SUITE)
    methods = methods_of(policy, lengths, **retention.keywords(), by_mask=by_mask)
    files = result.files()
    loaded, tokenizer = _load(model)
    dataset = make(tokenizer, tasks, lengths, documents, questions, seed)
    _measure(model, loaded, dataset, SUITE, methods, settings, result, files)


def data(
    *,
    path: Annotated[
        str,
        Option(
            "--data",
            metavar="PATH",
            help="A .parquet or .jsonl file, or a folder of them, with the columns context, question, answer and "
            "max_new_tokens, perhaps answer_prefix, task and length.",
        ),
    ],
    model: Model = "demo",
    policy: Policies = None,
    retention: VerifyOptions,
    task: Annotated[
        list[str] | None,
        Option(metavar="TASK", help="Repeat it for several. By default all there."),
    ] = None,
    setting: Setting = "both",
    documents: Annotated[
        int | None,
        Option(min=1, help="Documents per task, from the first on. By default all."),
    ] = None,
    ignore_chat_template: IgnoreChatTemplate = False,
    result: ResultOptions,
) -> None:
    """Ask what a data set asks: RULER, LongBench, InfiniteBench, LooGLE or your own, in the columns kvpress uses.

    mlx-snapkv eval data --data ruler/4096 --model MODEL --task niah_multivalue --policy keydiff:budget=12.5%
    """
    from ..evals.columns import PAGE, columns, read_columns, require_room

    settings = settings_of(setting)
    methods = methods_of(policy, **retention.keywords())
    found, digest = read_columns(path, task, documents)
    files = result.files()
    loaded, tokenizer = load_model(model)
    dataset = columns(tokenizer, found, digest, not ignore_chat_template)
    require_room(loaded, dataset, found)
    _measure(model, loaded, dataset, PAGE, methods, settings, result, files)


def _load(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer; SnapKVError without a chat template, since it can't be asked anything."""
    model, tokenizer = load_model(name)
    if not tokenizer.has_chat_template:
        raise SnapKVError(f"--model {name}: it has no chat template, so it can't be asked anything")
    return model, tokenizer


def _measure(
    name: str,
    model: Any,
    dataset: Dataset,
    page: Page,
    methods: Sequence[Method],
    settings: Sequence[str],
    options: ResultOptions,
    files: ResultFiles | None,
    plots: Callable[[dict[str, Any], Path], list[Path]] | None = None,
) -> None:
    """Ask everything, print the tables, and write the files."""
    from ..evals.answering import run

    fixed = {**dataset.setting, "model": name, "mlx-snapkv": __version__}
    ask = partial(run, model, dataset, methods, settings)
    results = results_in(files, fixed)
    options.measure(files, fixed, results, len(dataset.places), ask, page, plots)
