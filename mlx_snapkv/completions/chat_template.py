"""Apply chat templates, and convert their errors to SnapKVError. This module imports nothing slow."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import SnapKVError, brief


def apply_template(tokenizer, messages: list[dict[str, Any]], /, **options: Any) -> Any:
    """Render messages with the chat template. Return token ids, or text if `tokenize=False`.

    Options come from clients and can have any name, even `messages`, so the other parameters are positional-only.

    Raises: SnapKVError: the template or the tokenizer fails.
    """
    with converting_template_errors():
        return tokenizer.apply_chat_template(messages, **options)


@contextlib.contextmanager
def converting_template_errors() -> Iterator[None]:
    """Convert any exception in the `with` block to SnapKVError.

    Templates and tokenizers are third-party code, which may raise anything.
    """
    try:
        yield
    except SnapKVError:
        raise
    except Exception as error:
        raise SnapKVError(f"the chat template or tokenizer failed: {brief(error)}") from error
