"""Make docs/policies.md from the registry and the docstrings of the policies."""

import inspect
import re

from results_page import table

from mlx_snapkv.cli.listings import defaults
from mlx_snapkv.compress.policy import POLICIES, Policy
from mlx_snapkv.hyperparameters import Hyperparameters
from mlx_snapkv.sparse.options import Sparse

PAGE = """# The policies

Look up here how each policy chooses entries, and what its options mean.

`python scripts/write_docs.py` generates this page from the classes in `mlx_snapkv/compress/policies/`.
`mlx-snapkv policies` prints the same names, options and defaults. [choose.md](choose.md) says which policy to use.

Write an option as `name=value`, as in `--policy keydiff:budget=25%,n_window=20%`. In Python the options are the
fields of the class: `KeyDiff(budget="25%", n_window="20%")`. An unknown option is an error that lists the policy's
options.

{summary}

## Options of every policy

The section of each policy has their defaults.

{shared}
"""

POLICY = """
## `{name}`

{about}

{own}Shared options: {others}.
"""
OPTION = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.M)


def page() -> str:
    """Return docs/policies.md."""
    shared = meanings(Policy)
    rows = [(f"`{name}`", shared[name]) for name in Policy.options() if name in shared]
    options = options_table(("option", "meaning"), rows)
    head = PAGE.format(summary="\n".join(_summary_table()), shared="\n".join(options))
    return head + "".join(map(_section, POLICIES.values()))


def _summary_table() -> list[str]:
    """Return a Markdown table of all policies: name, how it chooses, and paper."""
    rows = [
        (f"[`{name}`](#{name})", cls.summary, _paper_link(cls)) for name, cls in POLICIES.items()
    ]
    return table(("policy", "how it chooses", "paper"), rows)


def options_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return a Markdown table of options with the first sentence of each meaning, and a list of the other sentences."""
    short, more = [], []
    for name, *values, meaning in rows:
        first, dot, rest = meaning.partition(". ")
        short.append((name, *values, first + dot.strip()))
        more += [f"- {name}: {rest}"] if rest else []
    lines = table(header, short)
    return [*lines, "", *more] if more else lines


def sparse_options() -> list[str]:
    """Return a Markdown table of the options of sparse attention."""
    found, values = meanings(Sparse), defaults(Sparse)
    rows = [(f"`{name}`", f"`{values[name]}`", found[name]) for name in Sparse.options()]
    return options_table(("option", "default", "meaning"), rows)


def meanings(cls: type[Hyperparameters]) -> dict[str, str]:
    """Return the meaning of each option that a class's docstring explains, as one line."""
    section = _parts(cls)[1]
    return {name: _linked(" ".join(text.split())) for name, text in OPTION.findall(section)}


def _section(cls: type[Policy]) -> str:
    """Return the section of a policy."""
    found, values = meanings(cls), defaults(cls)
    own = [name for name in values if name in found or name not in Policy.options()]
    rows = [(f"`{name}`", f"`{values[name]}`", found.get(name, "")) for name in own]
    others = [f"`{name}={value}`" for name, value in values.items() if name not in own]
    before, _, after = _parts(cls)
    paragraphs = [_linked(part.strip()) for part in [*before.split("\n\n"), *after.split("\n\n")]]
    cited = re.sub(r"arXiv:([\d.]+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", cls.paper)
    summary = f"{cls.summary[:1].upper()}{cls.summary[1:]}" + (f" ({cited})." if cited else ".")
    file = f"`{cls.__name__}` in `{cls.__module__.replace('.', '/')}.py`."
    return POLICY.format(
        name=cls.name,
        about="\n\n".join(filter(None, [summary, *paragraphs, file])),
        own="\n".join(options_table(("option", "default", "meaning"), rows)) + "\n\n"
        if rows
        else "",
        others=", ".join(others) or "none, all of them are in the table",
    )


def _parts(cls: type[Hyperparameters]) -> tuple[str, str, str]:
    """Split a class's docstring into the parts before, in and after `Attributes:`; empty if dataclass generated it."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    text = "" if text.startswith(f"{cls.__name__}(") else text
    before, _, rest = text.partition("\nAttributes:\n")
    options, _, after = rest.partition("\n\n")
    return before, options, after


def _linked(text: str) -> str:
    """Return the text with links to the pages of the docs."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


def _paper_link(cls: type[Policy]) -> str:
    number = re.search(r"arXiv:([\d.]+)", cls.paper)
    return f"[{number[1]}](https://arxiv.org/abs/{number[1]})" if number else cls.paper
