"""Long work of others that neither shows itself nor hears Ctrl-C, such as tokenising a large file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Result = TypeVar("Result")

TOKENISING = "tokenising the text"
PATIENCE = 0.5  # seconds in which nothing is shown
LISTEN = 0.1  # seconds until Ctrl-C is heard


def waited_for(console: Console, what: str, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; it runs in a thread, and `what` is shown if it takes long."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # nobody waits for it after Ctrl-C
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        if not console.is_terminal:
            console.print(what)
        with console.status(what):
            while thread.is_alive():
                thread.join(LISTEN)
    if errors:
        raise errors[0]
    return results[0]
