"""`mlx-snapkv compare`: one prompt answered by the full cache and from what policies keep of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import cache_options, options
from .command import option
from .prompts import PromptOptions
from .reading import Reading

if TYPE_CHECKING:
    from ..evals.compare import Compared
    from ..evals.methods import Method
    from ..reporting.table import Table

REMARK = "Entries are per KV head; KL is to the full cache over its answer, in nats a token."


@dataclass(frozen=True)
class CompareOptions(options.ShownOptions):
    """What is compared, and how it is shown."""

    policy: list[str] | None = option(
        None,
        "Such as keydiff:budget=25%; repeat it for several. By default three that suit the prompt's length.",
        metavar="POLICY",
    )
    output: str | None = option(None, "A page of it (.html).", "-o", metavar="FILE")


def compare(
    *,
    model: options.TalkingModelOptions,
    prompt: PromptOptions,
    max_tokens: options.MaxTokens = 256,
    prefill_step_size: cache_options.PrefillStepSize = 2048,
    retention: cache_options.RetentionOptions,
    shown: CompareOptions,
) -> None:
    """Answer your own prompt with the full cache and with policies, and show what differs.

    The prompt is read once for all policies that choose when it has been read; those that evict while it is read, and
    --memory, read it themselves. Answers are greedy. The page has the answers side by side, and what was kept.

    \b
      mlx-snapkv compare --model demo --prompt-file contract.txt --prompt "When does it end?"
      mlx-snapkv compare --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --policy snapkv:top_k=1024 --policy keydiff:budget=25% -o compared.html
    """
    from ..engine.auto import worth_comparing
    from ..evals.compare import Comparison
    from ..evals.compare_page import page
    from ..evals.methods import Method
    from ..paths import put_result
    from ..policies import resolve_policy
    from .results import print_table, require_page

    path = require_page(shown.output, ".html")
    named = [resolve_policy(policy=text) for text in shown.policy or []]
    extra = {k: v for k, v in retention.keywords().items() if v not in ("drop", None, "token")}
    reading = Reading(shown.quiet)
    loaded, tokenizer, tokens = prompt.load(model, reading)
    named = named or [resolve_policy(policy=text) for text in worth_comparing(len(tokens))]
    methods = [Method(), *(Method(each, extra) for each in dict.fromkeys(named))]
    with reading.bar() as update:
        how = max_tokens, update, prefill_step_size
        comparison = Comparison(loaded, tokenizer, tokens, methods, *how)
        answers = [_answer(comparison, method, shown.as_json) for method in methods]
    table = _table(answers, len(tokens))
    if shown.as_json:
        told = {"model": model.model, "prompt_tokens": len(tokens)}
        print(json.dumps(told | {"ways": [a.to_dict() for a in answers]}, ensure_ascii=False))
    else:
        print_table(table)
        for said in filter(None, map(_difference, answers)):
            print(said)
    if path is not None:
        put_result(path, page(model.model, tokenizer, tokens, answers, table))
        reading.say(f"wrote {path}")


def _answer(comparison: Any, method: Method, silent: bool) -> Compared:
    begun: list[bool] = []

    def show(text: str) -> None:
        if not begun:  # not before: the bar of a reading is in between
            begun.append(True)
            print(f"── {method.name}")
        print(text, end="", flush=True)

    found = comparison.answer(method, (lambda text: None) if silent else show)
    if not silent:
        print("\n", flush=True)
    return found


def _table(answers: list[Compared], n_prompt: int) -> Table:
    from ..engine.report import format_bytes
    from ..reporting.table import Table

    columns = ["cache", "entries", "KV memory", "first token", "tokens/s", "KL", "same tokens"]
    table = Table(f"{n_prompt:,} prompt tokens", REMARK, columns)
    for answer in answers:
        first, speed = f"{answer.first_token_seconds:.2f} s", answer.tokens_per_second
        same = len(answer.tokens) if answer.differs is None else answer.differs[0]
        table.add(
            answer.name,
            f"{answer.entries:,}",
            format_bytes(answer.kv_bytes),
            first,
            "" if speed is None else f"{speed:.1f}",
            f"{max(0.0, answer.kl):.3f}",  # rounding may leave it below zero
            "all" if answer.differs is None else f"first {same}",
        )
    return table


def _difference(answer: Compared) -> str:
    """The first token that is not the full cache's, in context, or why there was nothing to compare."""
    if answer.reason is not None:
        return f"{answer.name}: the full cache, since {answer.reason}"
    if answer.differs is None:
        return ""
    n, before, theirs, ours = answer.differs
    where = f" (“…{' '.join(before.split())}”)" if n else ""
    said, instead = (repr(text) if text else "nothing more" for text in (ours, theirs))
    return f"{answer.name}: after {n} tokens{where} it says {said}, the full cache {instead}"
