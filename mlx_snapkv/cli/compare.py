"""`mlx-snapkv compare`: one prompt answered by the full cache and from what policies keep of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..measure.tables import Table
from ..paths import put_result
from ..planning.options import RequestOptions
from ..planning.units import format_bytes
from . import cache_options, options
from .prompts import PromptOptions
from .reading import Reading
from .results import methods_of, print_table, require_page

if TYPE_CHECKING:
    from ..measure.compare import Compared
    from ..measure.methods import Method

COMPARE_REMARK = (
    "Entries are per KV head. KL is the divergence from the full cache over the full cache's own answer, in nats per "
    "token. KL and same tokens begin after the compression."
)


@dataclass(frozen=True)
class CompareOptions(options.ShownOptions):
    policy: Annotated[
        list[str] | None,
        Option(
            help="Policy to compare, such as keydiff:budget=25%; repeatable. Default, without --sparse either: "
            "sparse attention and two policies that suit the prompt's length."
        ),
    ] = None
    sparse: Annotated[
        list[str] | None,
        Option(
            help='Sparse attention to compare, such as budget=6.25% ("" for the defaults); repeatable.'
        ),
    ] = None
    output: Annotated[
        str | None, Option("--output", "-o", help="Write the comparison to this page (.html).")
    ] = None


def compare(
    *,
    model: options.TalkingModelOptions,
    prompt: PromptOptions,
    max_tokens: options.MaxTokens = 256,
    prefill_step_size: cache_options.PrefillStepSize = 2048,
    request: RequestOptions,
    shown: CompareOptions,
) -> None:
    """Answer your own prompt with the full cache and with policies, and show what differs.

    Policies that choose after prefill share one reading of the prompt. Policies that evict during prefill, and policies
    with --store, read it again. Answers are greedy. The page shows the answers side by side, and the entries kept.

    \b
      mlx-snapkv compare --model demo --prompt-file contract.txt --prompt "When does it end?"
      mlx-snapkv compare --model demo --prompt-file contract.txt --prompt "When does it end?" \\
          --policy snapkv:top_k=1024 --policy keydiff:budget=25% -o compared.html
    """
    from ..measure.compare import compare as compared
    from ..measure.compare_page import page

    path = require_page(shown.output, ".html")
    # Mistakes are found before the model is loaded.
    methods = methods_of(shown.policy, shown.sparse, request=request)
    reading = Reading(shown.quiet)
    loaded, tokenizer, tokens = prompt.load(model, reading)
    if not (shown.policy or shown.sparse):
        methods = _default_methods(len(tokens), request)
    answers: list[Compared] = []
    with reading.bar() as update:
        for answer in compared(
            loaded,
            tokenizer,
            tokens,
            methods,
            max_tokens,
            (lambda name, text: None) if shown.as_json else _Shown().add,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=update,
        ):
            answers.append(answer)
            print("" if shown.as_json else "\n\n", end="", flush=True)
    table = _table(answers, len(tokens))
    if shown.as_json:
        about = {"model": model.model, "prompt_tokens": len(tokens)}
        print(json.dumps(about | {"methods": [a.to_dict() for a in answers]}, ensure_ascii=False))
    else:
        print_table(table)
        print("".join(map(_difference, answers)), end="")
    if path is not None:
        put_result(path, page(model.model, tokenizer, tokens, answers, table))
        reading.say(f"wrote {path}")


def _default_methods(n_prompt: int, request: RequestOptions) -> list[Method]:
    """The full cache, sparse attention and two policies that suit the prompt's length."""
    from ..planning.auto import worth_comparing
    from ..sparse.options import Sparse

    # Of a short prompt the default reads more than the policies keep, or all.
    is_short = 4 * Sparse().entries(n_prompt) > n_prompt
    policies, sparse = worth_comparing(n_prompt), ["budget=6.25%" if is_short else ""]
    if request.store is not None:
        policies = []  # it is for sparse attention
    return methods_of(policies, sparse, request=request)


class _Shown:
    """Answers on stdout as they come, each below its method's name."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def add(self, name: str, text: str) -> None:
        # Not printed before: the bar of a reading is in between.
        heading = "" if name in self._names else f"── {name}\n"
        self._names.add(name)
        print(heading, text, sep="", end="", flush=True)


def _table(answers: list[Compared], n_prompt: int) -> Table:
    columns = ["cache", "entries", "KV memory", "first token", "tokens/s", "KL", "same tokens"]
    early = (f"{a.name}: {a.uncompressed}." for a in answers if a.uncompressed)
    table = Table(f"{n_prompt:,} prompt tokens", " ".join([COMPARE_REMARK, *early]), columns)
    for answer in answers:
        speed = answer.tokens_per_second
        table.add(
            answer.name,
            f"{answer.entries:,}",
            format_bytes(answer.kv_bytes),
            f"{answer.first_token_seconds:.2f} s",
            "" if speed is None else f"{speed:.1f}",
            # rounding may leave it below zero
            "not compressed yet" if answer.kl is None else f"{max(0.0, answer.kl):.3f}",
            _same(answer),
        )
    return table


def _same(answer: Compared) -> str:
    """How many tokens are the full cache's until one differs, from the first after the compression on."""
    if answer.kl is None:
        return ""
    return f"first {max(0, answer.differs[0] - answer.n_before)}" if answer.differs else "all"


def _difference(answer: Compared) -> str:
    """A line with the first token that is not the full cache's, in context, or why there was nothing to compare."""
    if answer.reason is not None:
        return f"{answer.name}: answered by the full cache, since {answer.reason}\n"
    if answer.differs is None:
        return ""
    n, before, theirs, ours = answer.differs
    where = f" (“…{' '.join(before.split())}”)" if n else ""
    text, full_text = (repr(text) if text else "nothing more" for text in (ours, theirs))
    return (
        f"{answer.name}: after {n} tokens{where} it says {text}, the full cache says {full_text}\n"
    )
