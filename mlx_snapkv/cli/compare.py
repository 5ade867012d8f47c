"""`mlx-snapkv compare`: one prompt answered by the full cache and from what policies keep of it."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from . import cache_options, options
from .reading import Reading

if TYPE_CHECKING:
    from ..evals.compare import Answer, Way
    from ..reporting.table import Table

REMARK = (
    "Entries are those kept per KV head; KL is to the full cache over its answer, in nats a token."
)


def compare(
    *,
    model: options.ModelOptions,
    prompt: options.PromptOptions,
    tokenizer: options.TokenizerOptions,
    max_tokens: options.MaxTokens = 256,
    prefill_step_size: cache_options.PrefillStepSize = 2048,
    policy: Annotated[
        list[str] | None,
        Option(
            "--policy",
            metavar="POLICY",
            help="Such as keydiff:budget=25%; repeat it for several. By default three that suit the prompt's length.",
        ),
    ] = None,
    retention: cache_options.RetentionOptions,
    output: Annotated[
        str | None, Option("--output", "-o", metavar="FILE", help="A page of it (.html).")
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
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
    from ..evals.compare import Comparison, Way
    from ..policies import resolve_policy
    from .results import print_table, require_page

    path = None if output is None else require_page(output, (".html",))
    named = [resolve_policy(policy=text) for text in policy or []]
    extra = {k: v for k, v in retention.keywords().items() if v not in ("drop", None, "token")}
    text = prompt.read()
    loaded, adapted = model.load()
    tokenizer.adapt(adapted)
    reading = Reading(quiet)
    tokens = reading.wait_for(partial(prompt.encode, adapted, text))
    named = named or [resolve_policy(policy=text) for text in worth_comparing(len(tokens))]
    ways = [Way(), *(Way(each, extra) for each in dict.fromkeys(named))]
    with reading.bar() as update:
        comparison = Comparison(
            loaded, adapted, tokens, ways, max_tokens, update, prefill_step_size
        )
        answers = [_answer(comparison, way, as_json) for way in ways]
    table = _table(answers, len(tokens))
    if as_json:
        told = {"model": model.model, "prompt_tokens": len(tokens)}
        print(json.dumps(told | {"ways": [a.to_dict() for a in answers]}, ensure_ascii=False))
    else:
        print_table(table)
        for answer in answers:
            if said := _difference(answer):
                print(said)
    if path is not None:
        from ..evals.compare_page import page
        from ..paths import put_result

        put_result(path, page(model.model, adapted, tokens, answers, table))
        if not quiet:
            print(f"wrote {path}", file=sys.stderr)


def _answer(comparison: Any, way: Way, silent: bool) -> Answer:
    """A way's answer, printed under its name as it comes."""
    begun: list[bool] = []

    def show(text: str) -> None:
        if not begun:  # not before: the bar of a reading is in between
            begun.append(True)
            print(f"── {way.name}")
        print(text, end="", flush=True)

    found = comparison.answer(way, (lambda text: None) if silent else show)
    if not silent:
        print("\n", flush=True)
    return found


def _table(answers: list[Answer], n_prompt: int) -> Table:
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


def _difference(answer: Answer) -> str:
    """The first token that is not the full cache's, in context, or why there was nothing to compare."""
    if answer.reason is not None:
        return f"{answer.name}: the full cache, since {answer.reason}"
    if answer.differs is None:
        return ""
    n, before, theirs, ours = answer.differs
    where = f" (“…{' '.join(before.split())}”)" if n else ""
    said, instead = (repr(text) if text else "nothing more" for text in (ours, theirs))
    return f"{answer.name}: after {n} tokens{where} it says {said}, the full cache {instead}"
