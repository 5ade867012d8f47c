"""What changes with every request at the very start of a system prompt, and would make all that follows unknown."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

BILLING = "x-anthropic-billing-header"  # Claude Code's, with a number drawn for each request


def without_headers(text: str, names: Collection[str]) -> str:
    """A system prompt without the lines `name: …` that it begins with, for those names in any case."""
    known = {name.lower() for name in names}
    while True:
        line, _, rest = text.lstrip().partition("\n")
        name, colon, _ = line.partition(":")
        if not colon or name.strip().lower() not in known:
            return text
        text = rest.lstrip("\n")


def content_without_headers(content: Any, names: Collection[str]) -> Any:
    """A message's content, a text or parts of the type text, without such lines."""
    if isinstance(content, str):
        return without_headers(content, names)
    if not content:
        return content
    first, *rest = content
    return [{**first, "text": without_headers(first["text"], names)}, *rest]
