"""What every command that reads a prompt shows on stderr: what takes long, what it will cost, and what would help."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..engine.report import CompressionReport
    from ..planning.file_cost import FileCost
    from ..planning.prompt_plan import ProgressCallback

Result = TypeVar("Result")

TOKENISING = "tokenising the text"
PATIENCE = 0.5  # seconds in which nothing is shown
LISTEN = 0.1  # seconds until Ctrl-C is noticed


class Reading:
    """A prompt on its way to the model: tokenised, weighed against this machine, and read."""

    def __init__(self, quiet: bool = False):
        from .progress import stderr_console  # and rich, which starting a command does without

        self.console = stderr_console(quiet)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def say_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.say(line)

    def say_warnings(self, report: CompressionReport) -> None:
        self.say_all(f"warning: {warning}" for warning in report.warnings)

    def wait_for(self, work: Callable[[], Result]) -> Result:
        """What `work`, which tokenises, returns or raises. It runs in a thread, so that Ctrl-C is noticed."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # after Ctrl-C nothing waits for it
        wait([future], PATIENCE)
        if not future.done():
            if not self.console.is_terminal:
                self.console.print(TOKENISING)
            with self.console.status(TOKENISING):
                while not future.done():
                    wait([future], LISTEN)
        return future.result()

    def warn(
        self, model: Any, n_prompt: int, n_before: int = 0, was_chosen: bool = False, **options: Any
    ) -> None:
        """Say what will be kept of a prompt, and if it exceeds this machine's memory or the model's length.

        Args:
            n_before: tokens read before; `options` are those of `LongPrompts`.
            was_chosen: the full cache is taken on purpose, and needs no advice.
        """
        from ..planning.long_prompts import LongPrompts

        prompts = LongPrompts(model, **options)
        foretold = None if was_chosen else prompts.foretold(n_prompt, n_before)
        self.say_all(filter(None, (foretold, *prompts.warnings(n_prompt, n_before))))

    @contextmanager
    def bar(
        self, cost: Callable[[int], FileCost | None] | None = None
    ) -> Iterator[ProgressCallback]:
        """A bar for mlx-lm's `prompt_progress_callback`; it says first what reading will `cost` if that is a book."""
        from .progress import prefill_bar

        bar = prefill_bar(self.console)

        def update(done: int, total: int) -> None:
            if done == 0:
                file_cost = cost(total) if cost else None
                if file_cost is not None:
                    self.say(
                        "\n".join([str(file_cost), *(f"warning: {x}" for x in file_cost.warnings)])
                    )
            bar.update(done, total)

        with bar:
            yield update
