"""`mlx-snapkv eval data`: data sets in kvpress' columns, the question known or coming later."""

from __future__ import annotations

from typing import Annotated

import typer

from ..engine.report import VERIFY_BELOW
from . import asking, flags
from .loading import load_model


def data(
    path: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="PATH",
            help="A .parquet or .jsonl file, or a folder of them, with the columns context, question, answer and "
            "max_new_tokens, perhaps answer_prefix, task and length.",
        ),
    ],
    model: flags.Model = "demo",
    policy: asking.Policies = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = VERIFY_BELOW,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="TASK", help="Repeat it for several. By default all there."),
    ] = None,
    setting: asking.Setting = "both",
    documents: Annotated[
        int | None,
        typer.Option(min=1, help="Documents per task, from the first on. By default all."),
    ] = None,
    ignore_chat_template: flags.IgnoreChatTemplate = False,
    output: asking.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """Ask what a data set asks: RULER, LongBench, InfiniteBench, LooGLE or your own, in the columns kvpress uses.

    mlx-snapkv eval data --data ruler/4096 --model MODEL --task niah_multivalue --policy keydiff:budget=12.5%
    """
    from ..evals.columns import PAGE, Columns, read_columns

    settings = asking.settings_of(setting)
    methods = asking.methods_of(policy, memory, verify, verify_below)
    found, copy = read_columns(path, task, documents)
    files = asking.output_files(output)
    loaded, tokenizer = load_model(model)
    dataset = Columns(tokenizer, found, copy, not ignore_chat_template)
    dataset.require_room(loaded)
    asking.measure(model, loaded, dataset, PAGE, methods, settings, files, as_json)
