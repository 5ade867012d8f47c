"""`lm`: lm-evaluation-harness' tasks, with the full cache and with policies."""

import os
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.cli.options import ChatTemplateConfig, Model, adapt_tokenizer
from mlx_snapkv.cli.results import Policies, Sparses, methods_of, results_in
from mlx_snapkv.demo import MODELS
from mlx_snapkv.errors import SnapKVError

from .results import ScoreOptions


@dataclass(frozen=True)
class HarnessOptions:
    tasks: Annotated[
        list[str],
        Option(
            help="Tasks, groups or tags of lm-evaluation-harness, separated by commas; repeatable; * matches "
            "any characters."
        ),
    ]
    include_path: Annotated[Path | None, Option(help="Folder with yaml files of more tasks.")] = (
        None
    )
    length: Annotated[
        int | None,
        Option(
            min=256,
            help="Prompt length in tokens for tasks that make their prompts, such as RULER.",
        ),
    ] = None
    limit: Annotated[int | None, Option(min=1, help="Use the first documents of each task.")] = None
    num_shots: Annotated[
        int | None, Option(min=0, help="Solved examples before each question.")
    ] = None
    batch_size: Annotated[int, Option(min=1, help="Prompts to read and answer together.")] = 8
    max_tokens: Annotated[
        int | None,
        Option(
            "--max-tokens",
            "-m",
            min=1,
            help="Maximum number of answer tokens, in place of the task's; for multiple choice, of prompt and "
            "choice (8192).",
        ),
    ] = None
    apply_chat_template: Annotated[
        bool | None,
        Option(
            "--apply-chat-template/--no-apply-chat-template",
            help="Use the chat template; default: if there is one.",
        ),
    ] = None
    fewshot_as_multiturn: Annotated[bool, Option(help="Give each solved example as a turn.")] = (
        False
    )
    chat_template_config: ChatTemplateConfig = None
    seed: Annotated[int, Option(min=0, help="Seed of random prompts.")] = 123


def lm(
    *,
    options: HarnessOptions,
    model: Model = "demo",
    policy: Policies = None,
    sparse: Sparses = None,
    result: ScoreOptions,
) -> None:
    """Run tasks of lm-evaluation-harness (RULER, LongBench, ...) with the full cache and with each policy.

    python scripts/evaluate.py lm --model MODEL --tasks ruler_vt --length 4096 --policy snapkv:budget=12.5%
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of forks
    try:
        from . import lm as harness
    except ImportError as error:
        raise SnapKVError(
            f"lm needs lm-evaluation-harness: run pip install -e '.[dev]' ({error})"
        ) from error
    methods = methods_of(policy, sparse)
    folder = None if options.include_path is None else str(options.include_path)
    if folder is not None and not os.path.isdir(folder):
        raise SnapKVError(f"--include-path {folder} is not a folder")
    files = result.files()
    names = [name.strip() for given in options.tasks for name in given.split(",") if name.strip()]
    if not names:
        raise SnapKVError("--tasks is empty: give the name of a task of lm-evaluation-harness")
    fixed = {"task": "lm", **vars(options), "tasks": names, "include_path": folder}
    fixed |= {"model": model, "lm_eval": version("lm_eval")}
    results_in(files, fixed)  # which finds mistakes
    metadata: dict[str, Any] = {"tokenizer": str(MODELS.get(model, model))}
    if options.length is not None:
        metadata["max_seq_lengths"] = [options.length]
    tasks = harness.load_tasks(names, folder, metadata, options.seed)
    loaded, tokenizer = load_model(model)
    adapt_tokenizer(tokenizer, None, options.chat_template_config)
    has_template, templated = tokenizer.has_chat_template, options.apply_chat_template
    if templated and not has_template:
        raise SnapKVError(f"--model {model} has no chat template: drop --apply-chat-template")
    templated = has_template if templated is None else templated
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    asked: Any = {
        "limit": options.limit,
        "num_fewshot": options.num_shots,
        "apply_chat_template": templated,
        "fewshot_as_multiturn": options.fewshot_as_multiturn,
        **dict.fromkeys(seeds, options.seed),
    }
    how: Any = {"batch_size": options.batch_size, "max_tokens": options.max_tokens}
    lm_of = partial(harness.PolicyLM, loaded, tokenizer, use_chat_template=templated, **how)
    n = sum(harness.n_documents(task, options.limit) for task in tasks.values()) * len(methods)
    run = partial(harness.run, lm_of, tasks, methods, **asked)
    result.measure(files, fixed, n, run, harness.PAGE)
