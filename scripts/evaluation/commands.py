"""`needle`, `suite` and `data`: questions about documents, with known answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from typer import Option

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.cli.options import DocumentSeed, IgnoreChatTemplate, Model, lengths_parser, one_of
from mlx_snapkv.cli.prompts import read_file
from mlx_snapkv.cli.results import (
    Policies,
    ResultFiles,
    ResultOptions,
    Sparses,
    methods_to_measure,
)
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.methods import ANSWER_SETTINGS, Method
from mlx_snapkv.measure.tables import Page

from . import tasks
from .answering import run
from .columns import PAGE, columns, read_columns, require_room
from .datasets import Dataset
from .suite_tasks import TASKS

WHETHER = "When the policy sees the question: in the prompt (known), after the compression (later), or both."


@dataclass(frozen=True)
class ScoreOptions(ResultOptions):
    """The package's result options, with the script's command line in the result."""

    program: ClassVar[str] = "python scripts/evaluate.py"


@dataclass(frozen=True)
class AskedOptions:
    """Options shared by all evaluations."""

    model: Model = "demo"
    policy: Policies = None
    sparse: Sparses = None
    setting: Annotated[str, Option(parser=one_of(*ANSWER_SETTINGS, "both"), help=WHETHER)] = "both"

    @property
    def settings(self) -> list[str]:
        """Return the settings to measure."""
        return [*ANSWER_SETTINGS] if self.setting == "both" else [self.setting]

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer. Raises: SnapKVError: the model has no chat template."""
        model, tokenizer = load_model(self.model)
        if not tokenizer.has_chat_template:
            raise SnapKVError(
                f"--model {self.model}: needs a chat template, and this model has none"
            )
        return model, tokenizer

    def measure(
        self,
        model: Any,
        dataset: Dataset,
        methods: Sequence[Method],
        result: ScoreOptions,
        files: ResultFiles | None,
        page: Page,
    ) -> None:
        """Ask about the documents, then print and write the result. See `ResultOptions.measure`."""
        shared_fields = {**dataset.setting, "model": self.model}
        ask = partial(run, model, dataset, methods, self.settings)
        result.measure(files, shared_fields, len(dataset.places), ask, page)


@dataclass(frozen=True)
class NeedleOptions(AskedOptions):
    """Options for `needle`: documents and settings."""

    setting: Annotated[str, Option(parser=one_of(*ANSWER_SETTINGS, "both"), help=WHETHER)] = "known"
    length: Annotated[
        Any,
        Option(parser=lengths_parser(256), help="Prompt lengths in tokens, separated by commas."),
    ] = "2048,4096"
    depths: Annotated[
        int, Option(min=1, max=101, help="Number of depths, evenly spaced from start to end.")
    ] = 5
    questions: Annotated[int, Option(min=1, help="Questions per length and depth.")] = 1
    needles: Annotated[
        int, Option(min=1, max=1000, help="Facts to hide in a document, of which one is asked for.")
    ] = 1
    haystack: Annotated[
        list[str] | None, Option(help="Text file to hide the facts in; repeatable.")
    ] = None
    seed: DocumentSeed = 0


def needle(*, options: NeedleOptions, result: ScoreOptions) -> None:
    """Hide a fact at each depth of prompts of each length, and ask for it at the end.

    python scripts/evaluate.py needle --policy keydiff:budget=12.5% --policy snapkv:budget=12.5%,lookahead=0
    """
    if not options.length:
        raise SnapKVError("--length is empty: give at least one number of tokens")
    haystack_files = options.haystack or []
    text = "\n\n".join(read_file("--haystack", file) for file in haystack_files)
    methods = methods_to_measure(options.policy, options.sparse, lengths=options.length)
    files = result.files()
    model, tokenizer = options.load()
    dataset = tasks.needle(
        tokenizer,
        options.length,
        options.depths,
        options.questions,
        options.needles,
        text or None,
        options.seed,
    )
    options.measure(model, dataset, methods, result, files, tasks.RETRIEVAL)


@dataclass(frozen=True)
class SuiteOptions(AskedOptions):
    """Options for `suite`: tasks and documents."""

    model: Model = "demo-tasks"
    task: Annotated[
        list[str] | None,
        Option(parser=one_of(*TASKS), help=f"One of {', '.join(TASKS)}; repeatable. Default: all."),
    ] = None
    length: Annotated[
        Any,
        Option(parser=lengths_parser(512), help="Prompt lengths in tokens, separated by commas."),
    ] = "2048"
    documents: Annotated[int, Option(min=1, help="Documents per task and length.")] = 4
    questions: Annotated[int, Option(min=1, help="Maximum number of questions per document.")] = 5
    seed: DocumentSeed = 0


def suite(*, options: SuiteOptions, result: ScoreOptions) -> None:
    """Ask harder questions: look-alikes, several facts, overwritten values and chains.

    python scripts/evaluate.py suite --policy keydiff:budget=6% --policy snapkv:budget=6%,lookahead=0
    """
    methods = methods_to_measure(options.policy, options.sparse, lengths=options.length)
    files = result.files()
    model, tokenizer = options.load()
    task_names = list(dict.fromkeys(options.task or TASKS))
    dataset = tasks.suite(
        tokenizer, task_names, options.length, options.documents, options.questions, options.seed
    )
    options.measure(model, dataset, methods, result, files, tasks.SUITE)


@dataclass(frozen=True, kw_only=True)
class DataOptions(AskedOptions):
    """Options for `data`: the data set, its tasks and its documents."""

    data: Annotated[
        str,
        Option(
            help="A .parquet or .jsonl file, or a folder of them, with the columns context, question, answer and "
            "max_new_tokens, and optionally answer_prefix, task and length."
        ),
    ]
    task: Annotated[
        list[str] | None, Option(help="Task of the data set; repeatable. Default: all.")
    ] = None
    documents: Annotated[
        int | None, Option(min=1, help="Use the first documents of each task. Default: all.")
    ] = None
    ignore_chat_template: IgnoreChatTemplate = False


def data(*, options: DataOptions, result: ScoreOptions) -> None:
    """Ask the questions of a data set in kvpress' columns: RULER, or your own.

    python scripts/evaluate.py data --data ruler/4096 --model MODEL --task niah_multivalue --policy keydiff:budget=12.5%
    """
    methods = methods_to_measure(options.policy, options.sparse)
    documents, digest = read_columns(options.data, options.task, options.documents)
    files = result.files()
    model, tokenizer = load_model(options.model)
    dataset = columns(tokenizer, documents, digest, not options.ignore_chat_template)
    require_room(model, dataset, documents)
    options.measure(model, dataset, methods, result, files, PAGE)
