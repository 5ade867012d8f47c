"""`mlx-snapkv eval lm`: lm-evaluation-harness' tasks, with the full cache and with policies."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from ..demo import MODELS
from ..errors import SnapKVError
from ..evals.results import Results
from . import asking, flags
from .generation import adapt_tokenizer
from .loading import load_model
from .options import ResultFiles, with_suffix, write_result

if TYPE_CHECKING:
    from ..evals.answering import Method

LEAST = 256  # tokens of a prompt


def lm(
    tasks: Annotated[
        list[str],
        typer.Option(
            metavar="TASKS",
            help="Tasks, groups or tags of lm-evaluation-harness, with commas or repeated; * is any characters.",
        ),
    ],
    model: flags.Model = "demo",
    policy: asking.Policies = None,
    include_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with yaml files of more tasks."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=LEAST, help="Tokens of prompts that tasks make for the model, such as RULER's."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Documents per task, from the first on.")
    ] = None,
    num_shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples in front of each question.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Prompts read and answered together.")
    ] = 8,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-m",
            min=1,
            help="Tokens of an answer, whatever its task says; where choices are compared, of a prompt and a choice "
            "(8192).",
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool | None,
        typer.Option(
            "--apply-chat-template/--no-apply-chat-template",
            help="Put prompts in the chat template; by default if the model has one.",
        ),
    ] = None,
    fewshot_as_multiturn: Annotated[
        bool,
        typer.Option("--fewshot-as-multiturn", help="Give solved examples as turns of their own."),
    ] = False,
    chat_template_config: flags.ChatTemplateConfig = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts made at random.")] = 123,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Write NAME.jsonl as tasks are done, and go on from it if it is there; at the end NAME.json and "
            "NAME.md.",
        ),
    ] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Run tasks of lm-evaluation-harness (RULER, LongBench, ...) with the full cache and with each policy.

    mlx-snapkv eval lm --model MODEL --tasks niah_single_1,ruler_vt --length 4096 --policy snapkv:budget=12.5%
    """
    harness = _harness()
    methods = asking.methods_of(policy)
    if include_path is not None and not include_path.is_dir():
        raise SnapKVError(f"--include-path {include_path} is no folder")
    files = asking.output_files(output, (".jsonl", ".json", ".md"))
    names = [name.strip() for given in tasks for name in given.split(",") if name.strip()]
    if not names:
        raise SnapKVError("--tasks is empty: give the name of a task of lm-evaluation-harness")
    fixed: dict[str, Any] = {
        "task": "lm",
        "tasks": names,
        "include_path": None if include_path is None else str(include_path),
        "length": length,
        "limit": limit,
        "num_shots": num_shots,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "apply_chat_template": apply_chat_template,
        "fewshot_as_multiturn": fewshot_as_multiturn,
        "chat_template_config": chat_template_config,
        "seed": seed,
        "model": model,
        "mlx-snapkv": __version__,
        "lm_eval": version("lm_eval"),
    }
    results = Results(
        fixed, None if files is None else with_suffix(files.base, ".jsonl"), harness.KEYS
    )
    metadata: dict[str, Any] = {"tokenizer": str(MODELS.get(model, model))}
    if length is not None:
        metadata["max_seq_lengths"] = [length]
    found = harness.load_tasks(names, fixed["include_path"], metadata, seed)
    loaded, tokenizer = load_model(model)
    adapt_tokenizer(tokenizer, None, chat_template_config)
    if apply_chat_template is None:
        apply_chat_template = tokenizer.has_chat_template
    elif apply_chat_template and not tokenizer.has_chat_template:
        raise SnapKVError(f"--model {model} has no chat template: drop --apply-chat-template")
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    options = {
        "limit": limit,
        "num_fewshot": num_shots,
        "apply_chat_template": apply_chat_template,
        "fewshot_as_multiturn": fewshot_as_multiturn,
        **dict.fromkeys(seeds, seed),
    }
    lm_of = partial(
        harness.PolicyLM,
        loaded,
        tokenizer,
        use_chat_template=apply_chat_template,
        batch_size=batch_size,
        max_tokens=max_tokens,
    )
    records = _asked(lm_of, found, methods, results, options, files)
    _tell(fixed, records, files, as_json)


def _harness() -> Any:
    """The evaluation's module; SnapKVError without lm-evaluation-harness."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of forks
    try:
        from ..evals import lm as harness
    except ImportError as error:
        raise SnapKVError(
            f"eval lm needs lm-evaluation-harness: pip install 'mlx-snapkv[lm]' ({error})"
        ) from error
    return harness


def _asked(
    lm_of: Callable[..., Any],
    tasks: dict[str, Any],
    methods: list[Method],
    results: Results,
    options: dict[str, Any],
    files: ResultFiles | None,
) -> list[dict[str, Any]]:
    """All records; those that are missing are asked for, while a bar tells how far it is."""
    from ..evals.lm import n_documents, run
    from .progress import DocumentBar

    n = sum(n_documents(task, options["limit"]) for task in tasks.values()) * len(methods)
    try:
        with DocumentBar(n, asking.LINE_EVERY) as bar:
            return run(lm_of, tasks, methods, results, bar.done, **options)
    except KeyboardInterrupt:
        if files is not None:
            asking.tell_how_to_go_on(with_suffix(files.base, ".jsonl"), bar.console)
        raise


def _tell(
    fixed: dict[str, Any],
    records: list[dict[str, Any]],
    files: ResultFiles | None,
    as_json: bool,
) -> None:
    """Print the table, and write the files."""
    from ..evals import lm_table
    from ..reporting.setting import setting
    from .print_table import print_table

    summary = lm_table.summarise(records)
    command = shlex.join(["mlx-snapkv", *sys.argv[1:]])
    result = {"command": command, **fixed, **setting(), "summary": summary, "records": records}
    if as_json:
        print(json.dumps(result))
    else:
        print_table(lm_table.table(summary))
    if files is not None:
        written = write_result(files.base, result, lm_table.markdown(result))
        print(files.told(written), file=sys.stderr if as_json else sys.stdout)
