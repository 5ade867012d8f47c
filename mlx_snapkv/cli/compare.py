"""`mlx-snapkv compare`: answer one prompt with the full cache, policies and sparse attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..measure.tables import Table
from ..paths import put_result
from ..planning.units import format_bytes
from . import cache_options, options
from .prompt_console import PromptConsole
from .prompts import PromptOptions
from .results import methods_to_measure, page_to_write
from .terminal_table import print_table

if TYPE_CHECKING:
    from ..measure.compare import Compared
    from ..measure.methods import Method

COMPARE_REMARK = (
    "Entries are per KV head. KL is the divergence from the full cache over the full cache's own answer, in nats per "
    "token. KL and same tokens begin after the compression."
)


@dataclass(frozen=True)
class CompareOptions(options.OutputOptions):
    """Options for the methods to compare and the output page."""

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
    model_options: options.ChatModelOptions,
    prompt: PromptOptions,
    max_tokens: options.MaxTokens = 256,
    prefill_step_size: cache_options.PrefillStepSize = 2048,
    store: cache_options.StoreOptions,
    compare_options: CompareOptions,
) -> None:
    r"""Answer your own prompt with the full cache and with policies, and show what differs.

    Policies that choose after prefill share one pass over the prompt. Each policy that evicts during prefill needs its
    own pass, and so does sparse attention. Decoding is greedy. --output writes a page that shows the answers side by
    side, and which entries are kept.

    \b
      mlx-snapkv compare --model demo --prompt-file contract.txt --prompt "When does it end?"
      mlx-snapkv compare --model demo --prompt-file contract.txt --prompt "When does it end?" \
          --policy snapkv:top_k=1024 --policy keydiff:budget=25% -o compared.html
    """
    from ..measure.compare import compare as compare_methods
    from ..measure.compare_page import page
    from ..planning.long_prompts import LongPrompts

    path = page_to_write(compare_options.output, ".html")
    # Check the methods first, so that mistakes are reported before the model is loaded.
    methods = methods_to_measure(compare_options.policy, compare_options.sparse, store=store)
    console = PromptConsole(compare_options.quiet)
    model, tokenizer, tokens = prompt.load(model_options, console)
    if not (compare_options.policy or compare_options.sparse):
        methods = _default_methods(len(tokens), store)
    # Check only the full cache, which needs the most memory.
    LongPrompts(model, max_tokens=max_tokens).require_memory(
        len(tokens), max_kv_bytes=model_options.max_kv_bytes
    )
    answers: list[Compared] = []
    on_text = _answer_printer(is_silent=compare_options.as_json)
    with console.bar() as update_bar:
        for answer in compare_methods(
            model,
            tokenizer,
            tokens,
            methods,
            max_tokens,
            on_text,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=update_bar,
        ):
            answers.append(answer)
            if not compare_options.as_json:
                print("\n\n", end="", flush=True)
    table = _table(answers, len(tokens))
    if compare_options.as_json:
        about = {"model": model_options.model, "prompt_tokens": len(tokens)}
        result = about | {"methods": [answer.to_dict() for answer in answers]}
        print(json.dumps(result, ensure_ascii=False))
    else:
        print_table(table)
        print("".join(map(_difference_text, answers)), end="")
    if path is not None:
        put_result(path, page(model_options.model, tokenizer, tokens, answers, table))
        console.say(f"wrote {path}")


def _default_methods(n_prompt: int, store: cache_options.StoreOptions) -> list[Method]:
    """Return the full cache, sparse attention and, unless a store is set, two policies.

    The budgets suit a prompt of `n_prompt` tokens.
    """
    from ..planning.auto import worth_comparing
    from ..sparse.options import Sparse

    # Sparse attention's default number of entries would cover much of a short prompt, so use a percentage instead.
    is_short_prompt = 4 * Sparse().entries(n_prompt) > n_prompt
    sparse = "budget=6.25%" if is_short_prompt else ""
    has_store = store.store is not None
    policies = [] if has_store else worth_comparing(n_prompt)  # only sparse attention has a store
    return methods_to_measure(policies, [sparse], store=store)


def _answer_printer(is_silent: bool) -> Callable[[str, str], None]:
    """Return a function that prints each new part of a method's answer, or does nothing if `is_silent`.

    The method's name is printed only with the first part, because the progress bar is visible until then.
    """
    printed_names: set[str] = set()

    def print_part(name: str, text: str) -> None:
        if is_silent:
            return
        heading = "" if name in printed_names else f"── {name}\n"
        printed_names.add(name)
        print(heading, text, sep="", end="", flush=True)

    return print_part


def _table(answers: list[Compared], n_prompt: int) -> Table:
    """Return the comparison table, with one row per method."""
    columns = ["cache", "entries", "KV memory", "first token", "tokens/s", "KL", "same tokens"]
    remarks = [COMPARE_REMARK]
    remarks += [
        f"{answer.name}: {answer.uncompressed}." for answer in answers if answer.uncompressed
    ]
    table = Table(f"{n_prompt:,} prompt tokens", remark=" ".join(remarks), columns=columns)
    for answer in answers:
        speed = answer.tokens_per_second
        table.add(
            answer.name,
            f"{answer.entries:,}",
            format_bytes(answer.kv_bytes),
            f"{answer.first_token_seconds:.2f} s",
            "" if speed is None else f"{speed:.1f}",
            # Rounding errors can make the divergence negative.
            "not compressed yet" if answer.kl is None else f"{max(0.0, answer.kl):.3f}",
            _same_tokens_text(answer),
        )
    return table


def _same_tokens_text(answer: Compared) -> str:
    """Describe how many consecutive tokens, counted from the compression, match the full cache's answer."""
    is_compressed = answer.kl is not None
    if not is_compressed:
        return ""
    if answer.differs is None:
        return "all"
    n_same, *_ = answer.differs
    return f"first {max(0, n_same - answer.n_before)}"


def _difference_text(answer: Compared) -> str:
    """Describe the first difference from the full cache's answer, if any, or why nothing was compressed."""
    if answer.reason is not None:
        return f"{answer.name}: answered by the full cache, since {answer.reason}\n"
    if answer.differs is None:
        return ""
    n_same, text_before, full_token, token = answer.differs
    context = f" (“…{' '.join(text_before.split())}”)" if n_same else ""
    return (
        f"{answer.name}: after {n_same} tokens{context} it says {_token_text(token)}, "
        f"the full cache says {_token_text(full_token)}\n"
    )


def _token_text(token: str) -> str:
    """Return a token in quotes. An empty token means that the answer has ended."""
    return repr(token) if token else "nothing more"
