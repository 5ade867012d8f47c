"""`mlx-snapkv models` and `mlx-snapkv policies`: list the supported model types and the eviction policies."""

import json
from typing import Annotated, Any, NamedTuple

from typer import Option

from .options import AsJson

ASK = "mlx-snapkv generate --model MODEL --prompt-file TEXT --prompt QUESTION"


class Choice(NamedTuple):
    """A recommended setting for a use case.

    Attributes:
        when: the use case.
        why: what the setting does.
        command: a command with the placeholders MODEL, TEXT and QUESTION.
        pages: pages in docs/ with measurements, separated by spaces.
    """

    when: str
    why: str
    command: str
    pages: str


_CHOICES_TEXT = f"""
no setting in mind
auto chooses one of the settings below for the prompt, the task and this machine, and says which and why.
{ASK} --policy auto
choose.md#commands

a text whose entries fit in memory
The full cache: every token reads all entries, and no option is needed.
{ASK}
benchmarks.md#planning-memory

a long answer about a text that fits in memory
SnapKV reads the text with the full cache. Then the question's tokens vote, and entries with few votes leave memory.
{ASK} --snapkv top_k=4096
quality.md

a chat, several questions about one text, and little memory
All entries stay, in 8 bits. Each token of the answer reads only the few that it chooses.
mlx-snapkv chat --model MODEL --sparse budget=6.25% --store 8bit
sparse.md#facts-found-in-conversations

an agent, or several clients at once
Only what is new in a prompt is read, and answers to several clients are decoded together.
mlx-snapkv serve --model MODEL
server.md#comparison-with-mlx-lms-server

many documents overnight
Each prompt is read and compressed on its own, and the small caches are decoded together.
mlx-snapkv batch requests.jsonl -o answers.jsonl --model MODEL --snapkv top_k=4096
batches.md#speed-and-memory-of-a-batch

a text too long for memory, such as a book
Every entry goes to a file, from which chunks of the prompt and tokens of the answer read few.
mlx-snapkv chat --model MODEL --sparse top_k=1024 --store file
sparse.md#books benchmarks.md#books

a document to save now and ask about later
All entries are saved, since the questions are not known yet; generate --prompt-cache-file asks.
mlx-snapkv cache-prompt --model MODEL --prompt-file TEXT -o TEXT.safetensors --sparse budget=6.25%
sparse.md#follow-ups-and-saved-prompts

one question about a long text, and the least memory
KeyDiff evicts before it sees the question (at 1/4 it lost half of the needles). SnapKV chooses among what is left.
{ASK} --policy "keydiff:budget=8192 then snapkv:top_k=2048"
quality.md benchmarks.md#decoding-and-reading
"""
CHOICES = [Choice(*lines.split("\n")) for lines in _CHOICES_TEXT.strip().split("\n\n")]


def models(as_json: AsJson = False) -> None:
    """List which model types can be compressed, and which are refused and why."""
    from ..measure.tables import Table
    from ..models.table import refused_types, supported_types
    from .terminal_table import print_table

    records_by_title = {}
    # Title, name of the last column, and rows of each table.
    sections = (("Supported", "note", supported_types()), ("Refused", "why", refused_types()))
    for title, last_column, rows in sections:
        keys = ("model_type", "also_loads", last_column)
        records_by_title[title.lower()] = [dict(zip(keys, row)) for row in rows]
        if not as_json:
            heading = f"{title}: {len(rows)} model types of mlx-lm"
            columns = [key.replace("_", " ") for key in keys]
            cells = [list(row) for row in rows]
            print_table(Table(heading, remark="", columns=columns, rows=cells))
    if as_json:
        print(json.dumps(records_by_title))


def policies(
    choose: Annotated[
        bool, Option("--choose", help="Recommend a policy for each use, with commands to paste.")
    ] = False,
) -> None:
    r"""List the eviction policies with their papers, options and defaults.

    Pass one of them to generate, or two in sequence:

    \b
      --policy keydiff:budget=8192
      --policy "keydiff:budget=25%,n_window=20%"
      --policy "keydiff:budget=8192 then snapkv:top_k=1024"
    """
    from ..compress.policy import POLICIES

    if choose:
        _print_choices()
        return
    for policy_class in POLICIES.values():
        paper = f" ({policy_class.paper})" if policy_class.paper else ""
        options = [f"{name}={value}" for name, value in default_options(policy_class).items()]
        print(f"{policy_class.name}: {policy_class.summary}{paper}")
        print(f"    {', '.join(options)}")


def _print_choices() -> None:
    """Print the recommended setting for each use case, its command, and the pages with measurements."""
    for choice in CHOICES:
        files = [page.partition("#")[0] for page in choice.pages.split()]
        pages = ", ".join(f"docs/{file}" for file in files)
        print(f"{choice.when}: {choice.why}\n    {choice.command}\n    measured: {pages}\n")
    print("Replace MODEL, TEXT and QUESTION with your own. docs/choose.md has the figures.")


def default_options(policy_class: Any) -> dict[str, str]:
    """Return a policy's default options as the user would type them, starting with the policy's own options."""
    policy = policy_class()
    return {name: str(getattr(policy, name)).lower() for name in policy_class.options()}
