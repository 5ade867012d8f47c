"""`mlx-snapkv eval suite`: tasks that tell policies apart, the question known or coming later."""

from __future__ import annotations

from typing import Annotated

import typer

from ..demo.tasks import TASKS
from ..engine.report import VERIFY_BELOW
from . import asking, flags
from .loading import load_model
from .options import whole_numbers

LEAST = 512  # tokens of a prompt


def suite(
    model: flags.Model = "demo-tasks",
    policy: asking.Policies = None,
    by_mask: asking.ByMask = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = VERIFY_BELOW,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help=f"Of {', '.join(TASKS)}; repeat it. By default all."),
    ] = None,
    setting: asking.Setting = "both",
    length: asking.Lengths = "2048",
    documents: Annotated[int, typer.Option(min=1, help="Documents per task and length.")] = 4,
    questions: Annotated[int, typer.Option(min=1, help="Questions a document, at most.")] = 5,
    seed: flags.DocumentSeed = 0,
    output: asking.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """Ask harder questions: look-alikes, several facts, values overwritten, chains; the full cache's answers beside.

    mlx-snapkv eval suite --policy keydiff:budget=6% --policy snapkv:budget=6%,lookahead=0
    """
    from ..evals.suite import PAGE, Suite

    tasks = asking.known("--task", task or list(TASKS), list(TASKS))
    settings = asking.settings_of(setting)
    lengths = whole_numbers("--length", length, LEAST)
    methods = asking.methods_of(policy, memory, verify, verify_below, by_mask)
    files = asking.output_files(output)
    loaded, tokenizer = load_model(model)
    asking.require_template(model, tokenizer)
    dataset = Suite(tokenizer, tasks, lengths, documents, questions, seed)
    asking.measure(model, loaded, dataset, PAGE, methods, settings, files, as_json)
