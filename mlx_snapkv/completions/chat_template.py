"""Applies chat templates; every caller goes through here. This file imports nothing slow."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import SnapKVError, brief


def apply_template(tokenizer, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Return the messages in the chat template: token ids, or text with `tokenize=False`.

    Raises: SnapKVError: the template fails.
    """
    with template_failures():
        return tokenizer.apply_chat_template(messages, **options)


@contextlib.contextmanager
def template_failures() -> Iterator[None]:
    """Raise SnapKVError for any exception in the block: templates and tokenizers are code of the model's authors."""
    try:
        yield
    except SnapKVError:
        raise
    except Exception as error:
        raise SnapKVError(f"the chat template or tokenizer failed: {brief(error)}") from error
