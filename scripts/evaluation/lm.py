"""lm-evaluation-harness' tasks, RULER and LongBench among them, by mlx-lm's own `MLXLM` with compressed prompts.

Prompts, stop strings, metrics and seeds are lm-evaluation-harness' and mlx-lm's. What a policy compresses is the prompt
of `generate_until`, and the context of `loglikelihood` but for its last token, from which the continuation is judged.
"""

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.evaluate as mlx_evaluate
import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from mlx_snapkv.batch.generate import batch_generate
from mlx_snapkv.engine.prefill import prefill
from mlx_snapkv.engine.report import CompressionReport
from mlx_snapkv.errors import SnapKVError, brief
from mlx_snapkv.measure import records as loop
from mlx_snapkv.measure.methods import FULL, KNOWN, Method
from mlx_snapkv.measure.reading import judged, read_sparsely
from mlx_snapkv.measure.records import Record, Results
from mlx_snapkv.models import attention_classes
from mlx_snapkv.models.patch import recording
from mlx_snapkv.policies import Method as AnyMethod
from mlx_snapkv.policies import Stages

from . import scores
from .scores import scores_page


class PolicyLM(mlx_evaluate.MLXLM):
    """`MLXLM` over a model that is loaded already; `reports` are those of the prompts that a policy was to compress.

    Args:
        policy: None is the full cache, and then every figure is `MLXLM`'s own.
        max_tokens: of an answer, before what a task says; of `loglikelihood`, of context and continuation.
        on_answers: called with the number of prompts that have been answered since.
    """

    def __init__(
        self,
        model,
        tokenizer,
        policy: AnyMethod | Stages | None = None,
        *,
        use_chat_template: bool = False,
        batch_size: int = 8,
        max_tokens: int | None = None,
        on_answers: Callable[[int], None] = lambda n: None,
    ):
        LM.__init__(self)  # MLXLM's own would load the model once more for each policy
        self._model, self.tokenizer = model, tokenizer
        self._batch_size, self._max_tokens, self._sampler = batch_size, max_tokens, None
        self.use_chat_template = use_chat_template
        self.reports: list[CompressionReport] = []
        self._policy, self._on_answers = policy, on_answers

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        asked = [SimpleNamespace(args=(r.args[0], self._ended(r.args[1]))) for r in requests]
        theirs = mlx_evaluate.batch_generate
        mlx_evaluate.batch_generate = self._batch_generate  # type: ignore[assignment]
        try:
            return super().generate_until(asked)
        finally:
            mlx_evaluate.batch_generate = theirs

    def _ended(self, options: dict[str, Any]) -> dict[str, Any]:
        """A request's options with a list of stop strings that is not empty, as MLXLM wants it."""
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else until
        return options | {"until": [*stops, self.tokenizer.eos_token]}

    def _batch_generate(
        self, model, tokenizer, prompts: list[list[int]], max_tokens: list[int], **options: Any
    ) -> SimpleNamespace:
        """`texts` of the prompts, so many read and answered together as a batch has."""
        texts: list[str] = []
        on_report = {} if self._policy is None else {"on_report": self.reports.append}
        options |= {"policy": self._policy, "verbose": False, **on_report}
        for i in range(0, len(prompts), self._batch_size):
            some = slice(i, i + self._batch_size)
            made = batch_generate(
                model, tokenizer, prompts[some], max_tokens=max_tokens[some], **options
            )
            for error in filter(None, getattr(made, "errors", [])):
                raise error
            texts += made.texts
            self._on_answers(len(made.texts))
        return SimpleNamespace(texts=texts)

    def _process_prompt(
        self, prompt: Sequence[int], step_size: int = 2048
    ) -> tuple[mx.array, list]:
        """Log-probabilities `(1, vocabulary)` of what follows a context, and the cache that has read it."""
        self._on_answers(1)
        if self._policy is None or len(prompt) < 2:
            return super()._process_prompt(prompt, step_size)
        if self._policy.evicts:
            cache, report = prefill(
                self._model, prompt[:-1], self._policy, prefill_step_size=step_size
            )
            logits = self._model(mx.array([prompt[-1:]]), cache=cache)[:, -1]
        else:
            cache, report = read_sparsely(self._model, self._policy, prompt[:-1])  # type: ignore[arg-type]
            logits = judged(self._model, cache, prompt[-1:])
        self.reports.append(report)
        return nn.log_softmax(logits.astype(mx.float32)), cache

    def _score_fn(self, inputs: mx.array, cache: Any = None, step_size: int = 2048) -> Any:
        if self._policy is None or self._policy.evicts:
            return super()._score_fn(inputs, cache, step_size)
        with recording(attention_classes(self._model)):  # each token chooses by itself
            return super()._score_fn(inputs, cache, step_size=1)


def load_tasks(
    names: Sequence[str],
    include_path: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    seed: int = 123,
) -> dict[str, Any]:
    """Tasks by name, with their data.

    Args:
        names: of tasks, groups or tags, with `*` for any characters, or paths of yaml files.
        include_path: a folder of more tasks' yaml files.
        metadata: for tasks that make their own prompts at random, by `seed`: RULER's `tokenizer` and
            `max_seq_lengths`.

    Raises: SnapKVError: there is no such task, its data can't be had, or it asks for what `PolicyLM` can't do.
    """
    manager = TaskManager(include_path=include_path, metadata=dict(metadata or {}))
    tasks: dict[str, Any] = {}
    for name in names:
        matching = manager.match_tasks([name])
        if not matching and not Path(name).is_file():
            raise SnapKVError(f"--tasks {name}: lm-evaluation-harness has no such task")
        random.seed(seed)
        np.random.seed(seed)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                tasks |= manager.load(matching or [name])["tasks"]
        except Exception as error:  # of the task's own code, or of the download of its data
            raise SnapKVError(f"--tasks {name} can't be loaded: {brief(error)}") from error
    for name, task in tasks.items():
        whole = task.get_config("output_type") == "loglikelihood_rolling"
        if whole or getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise SnapKVError(
                f"--tasks {name} is not supported: it scores whole texts (use eval fidelity), runs code that the model "
                "writes, or needs more than text"
            )
    return tasks


def n_documents(task: Any, limit: int | None) -> int:
    """Documents of a task that will be asked about."""
    n = len(task.eval_docs)
    return n if limit is None else min(n, limit)


def run(
    lm_of: Callable[..., PolicyLM],
    tasks: Mapping[str, Any],
    methods: Sequence[Method],
    results: Results,
    on_documents: Callable[[bool, int], None] = lambda asked, n: None,
    **options: Any,
) -> list[Record]:
    """Every method's record of every task; see `loop.run`.

    Args:
        lm_of: makes the `PolicyLM` of a policy, with its `on_answers`.
        methods: the full cache first.
        on_documents: called after each batch of prompts, with whether they were asked about and how many they are.
        **options: of lm-evaluation-harness' `simple_evaluate`.
    """
    # Tasks are here, so no index of others is needed.
    given = {"task_manager": TaskManager(include_defaults=False), "bootstrap_iters": 0, **options}

    def cells(name: str, task: Any, method: Method):
        place = {"method": method.name, "task": name}

        def measure(missing: list[Record]) -> Iterable[Record]:
            lm = lm_of(method.policy, on_answers=partial(on_documents, True))
            with contextlib.redirect_stdout(sys.stderr):
                found = simple_evaluate(model=lm, tasks=[task], **given)
            yield place | _record(found, name, lm.reports)

        if results.get(place) is not None:
            on_documents(False, n_documents(task, options.get("limit")))
        return [place], measure

    return loop.run(
        (cells(name, task, method) for name, task in tasks.items() for method in methods), results
    )


def _record(found: dict[str, Any], name: str, reports: Sequence[CompressionReport]) -> Record:
    """What is recorded of a task: its metrics, and those of its documents that are numbers."""
    own = found["results"][name]
    documents = [
        {
            "document": sample["doc_id"],
            "filter": sample["filter"],
            "answers": sample["filtered_resps"],
            **_numbers({key: sample[key] for key in sample["metrics"]}),
        }
        for sample in found["samples"][name]
    ]
    reasons = [report.reason for report in reports if not report.compressed]
    return {
        "n": own["sample_len"],
        "metrics": _numbers({k: x for k, x in own.items() if "," in k and "_stderr," not in k}),
        "prompts": len(reports),
        "entries": max((r.entries for r in reports if r.compressed), default=None),
        "uncompressed": len(reasons),
        "reason": reasons[0] if reasons else None,
        "documents": documents,
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, Real)}


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One JSON object a method, over all metrics that are means over documents; the others are in the records."""
    means = {
        (record["task"], metric)
        for record in records
        if record["method"] == FULL
        for metric, value in record["metrics"].items()
        if (found := _by_document(record, metric)) and math.isclose(fmean(found.values()), value)
        # RULER's metrics are named by lengths, and -1 is one that none of its prompts has.
        if not (value == -1 and metric[0].isdigit())
    }
    fixed = {"setting": KNOWN, "length": None, "kv_bytes": None, "file_bytes": 0, "question": None}
    return scores.summarise(
        [
            {
                **fixed,
                "method": record["method"],
                "entries": record["entries"],
                "task": f"{record['task']}, {metric.removesuffix(',none')}",
                "document": document,
                "score": score,
                "reason": record["reason"] if i < record["uncompressed"] else None,
            }
            for record in records
            for metric in record["metrics"]
            if (record["task"], metric) in means
            for i, (document, score) in enumerate(_by_document(record, metric).items())
        ]
    )


def _by_document(record: Record, metric: str) -> dict[int, float]:
    name, _, kind = metric.partition(",")
    own = (d for d in record["documents"] if d["filter"] == kind and name in d)
    return {d["document"]: d[name] for d in own}


PAGE = scores_page(
    "lm-evaluation-harness",
    "Scores are those metrics of lm-evaluation-harness that are means over documents; n counts a document per metric.",
    summarise,
)
