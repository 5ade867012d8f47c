"""`mlx-snapkv eval ruler`, `longbench` and `scbench`: the field's benchmarks, on the user's own copy of their data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SnapKVError
from . import asking, flags
from .loading import load_model

if TYPE_CHECKING:
    from ..evals import longbench as first
    from ..evals import longbench2 as second

Length = Annotated[
    int | None,
    typer.Option(
        min=256,
        help="Tokens of prompt and answer; longer prompts lose their middle. By default what the model was trained to.",
    ),
]


def ruler(
    data: asking.Data,
    model: flags.Model = "demo",
    pipeline: flags.Pipeline = False,
    policy: asking.Policies = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = 0.999,
    task: asking.Tasks = None,
    setting: asking.Setting = "both",
    documents: asking.Documents = None,
    chat_template: Annotated[
        bool,
        typer.Option(
            "--chat-template",
            help="Put prepared prompts in the model's chat template: for those made with the template type base.",
        ),
    ] = False,
    batch_size: asking.BatchSize = asking.BATCH_SIZE,
    output: asking.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """RULER's 13 tasks, on JSONL that its own prepare.py wrote or on the parquet that kvpress uses.

    mlx-snapkv eval ruler --data ruler/4096 --model MODEL --policy keydiff:budget=12.5% --documents 20
    """
    from ..evals.asking import LATER
    from ..evals.prompts import room
    from ..evals.rows import data_folder
    from ..evals.ruler import PAGE, Ruler, find

    sources, copy = find(data_folder(data), task)
    settings = asking.settings_of(setting)
    ways = asking.ways_of(policy, memory, verify, verify_below)
    loaded, tokenizer = load_model(model, pipeline=pipeline)
    if chat_template and not tokenizer.has_chat_template:
        raise SnapKVError(f"--model {model}: it has no chat template, so drop --chat-template")
    files = asking.output_files(output)
    most = room(loaded, None)
    papers = Ruler(tokenizer, sources, copy, documents, chat_template, most)
    papers.require_room()
    if LATER in settings:
        papers.require_documents()
    asking.measure(model, loaded, papers, PAGE, ways, settings, files, as_json, batch_size)


def longbench(
    data: asking.Data,
    model: flags.Model = "demo",
    pipeline: flags.Pipeline = False,
    policy: asking.Policies = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = 0.999,
    task: asking.Tasks = None,
    setting: asking.Setting = "both",
    length: Length = None,
    documents: asking.Documents = None,
    batch_size: asking.BatchSize = asking.BATCH_SIZE,
    output: asking.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """LongBench's 21 tasks, or LongBench v2 if the folder holds that, with the prompts of your copy.

    mlx-snapkv eval longbench --data LongBench --model MODEL --setting known --policy snapkv:budget=2048,min_ctx=0
    """
    from ..evals import longbench as first
    from ..evals import longbench2 as second
    from ..evals.prompts import room
    from ..evals.rows import data_folder

    folder = data_folder(data)
    settings = asking.settings_of(setting)
    ways = asking.ways_of(policy, memory, verify, verify_below)
    make: Callable[..., first.LongBench | second.LongBench2]
    if task or second.data_file(folder) is None:
        found, config, copy = first.find(folder, task)
        page, make = first.PAGE, partial(first.LongBench, files=found, config=config, data=copy)
    else:
        file, prompt = second.find(folder)
        page, make = second.PAGE, partial(second.LongBench2, file=file, prompt=prompt)
    loaded, tokenizer = load_model(model, pipeline=pipeline)
    files = asking.output_files(output)
    papers = make(tokenizer, room=room(loaded, length), n_documents=documents)
    asking.measure(model, loaded, papers, page, ways, settings, files, as_json, batch_size)


def scbench(
    data: asking.Data,
    model: flags.Model = "demo",
    pipeline: flags.Pipeline = False,
    policy: asking.Policies = None,
    memory: flags.Memory = "drop",
    store_dir: flags.StoreDir = None,
    verify: flags.Verify = None,
    verify_below: flags.VerifyBelow = 0.999,
    task: asking.Tasks = None,
    mode: Annotated[
        str,
        typer.Option(
            help="Questions that each come to the context (multi-request), or follow each other (multi-turn)."
        ),
    ] = "multi-request",
    length: Length = None,
    documents: asking.Documents = None,
    batch_size: asking.BatchSize = asking.BATCH_SIZE,
    output: asking.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """SCBench's shared contexts with several questions each, in either of its modes.

    mlx-snapkv eval scbench --data SCBench --model MODEL --task scbench_kv --policy keydiff:budget=25% --documents 10
    """
    from ..evals.asking import LATER
    from ..evals.prompts import room
    from ..evals.rows import data_folder
    from ..evals.scbench import MODES, PAGE, SCBench, find

    found, wording, copy = find(data_folder(data), task)
    asking.known("--mode", [mode], list(MODES))
    ways = asking.ways_of(policy, memory, verify, verify_below)
    loaded, tokenizer = load_model(model, pipeline=pipeline)
    files = asking.output_files(output)
    papers = SCBench(tokenizer, found, wording, copy, mode, room(loaded, length), documents)
    asking.measure(model, loaded, papers, PAGE, ways, [LATER], files, as_json, batch_size)
