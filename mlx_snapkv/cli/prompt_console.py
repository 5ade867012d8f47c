"""Messages and progress bars on stderr, for commands that read a prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..planning.file_cost import FileCost
    from ..planning.prompt_plan import ProgressCallback

Result = TypeVar("Result")

TOKENISING = "tokenising the text"
STATUS_DELAY = 0.5  # seconds before a status is shown
POLL_INTERVAL = 0.1  # seconds; Ctrl-C is noticed within this time


class PromptConsole:
    """Console on stderr for a command that reads prompts. A quiet console prints nothing."""

    def __init__(self, quiet: bool = False):
        """Open the console on stderr."""
        # Imported here, because importing rich would delay the start of every command.
        from .progress import stderr_console

        self.rich_console = stderr_console(quiet)

    def say(self, text: str) -> None:
        """Print a line literally, without rich's markup."""
        self.rich_console.print(text, markup=False, emoji=False, soft_wrap=True)

    def say_all(self, lines: Iterable[str]) -> None:
        """Print several lines."""
        for line in lines:
            self.say(line)

    def say_warnings(self, warnings: Iterable[str]) -> None:
        """Print warnings, one per line."""
        self.say_all(f"warning: {warning}" for warning in warnings)

    def wait_for(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which tokenises text, in a thread. Return its result or raise its exception.

        The main thread stays free to react to Ctrl-C. A status line is shown if tokenising takes a while.
        """
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        # Ctrl-C can't stop the thread. As a daemon, it does not keep the process from exiting.
        threading.Thread(target=run, daemon=True).start()
        wait([future], STATUS_DELAY)
        if not future.done():
            if not self.rich_console.is_terminal:
                self.rich_console.print(TOKENISING)
            with self.rich_console.status(TOKENISING):
                while not future.done():
                    wait([future], POLL_INTERVAL)
        return future.result()

    def announce(
        self,
        model: Any,
        n_prompt: int,
        n_read_before: int = 0,
        shows_kept: bool = True,
        max_kv_bytes: int | None = None,
        **options: Any,
    ) -> None:
        """Print which entries will be kept and warn if the prompt exceeds the model's trained length.

        Args:
            model: model that will read the prompt.
            n_prompt: number of tokens to read.
            n_read_before: number of tokens that earlier turns of the conversation have read.
            shows_kept: whether to print which entries will be kept.
            max_kv_bytes: KV memory limit in bytes; see `LongPrompts.require_memory`.
            **options: options for `LongPrompts`.

        Raises: SnapKVError: the prompt will not fit in memory, or the model does not support the setting.
        """
        from ..planning.long_prompts import LongPrompts

        prompts = LongPrompts(model, **options)
        prompts.require_memory(n_prompt, n_read_before, max_kv_bytes)
        if shows_kept:
            sentence = prompts.kept_text(n_prompt, n_read_before)
            if sentence is not None:
                self.say(sentence)
        warning = prompts.warning(n_prompt, n_read_before)
        if warning is not None:
            self.say(warning)

    @contextmanager
    def bar(
        self,
        predict_cost: Callable[[int], FileCost | None] | None = None,
        require_memory: Callable[[int], None] | None = None,
    ) -> Iterator[ProgressCallback]:
        """Show a progress bar within the `with` block, and yield the `prompt_progress_callback` that updates it.

        Args:
            predict_cost: called with the number of tokens to read. It returns the cost of writing their entries to
                files, or None if nothing is written. The cost is printed before the bar appears.
            require_memory: called with the number of tokens to read. It raises SnapKVError if they don't fit.
        """
        from .progress import prefill_bar

        bar = prefill_bar(self.rich_console)

        def update_bar(n_read: int, n_total: int) -> None:
            is_first_call = n_read == 0
            if is_first_call and require_memory is not None:
                require_memory(n_total)
            if is_first_call and predict_cost is not None:
                file_cost = predict_cost(n_total)
                if file_cost is not None:
                    self.say(str(file_cost))
                    self.say_warnings(file_cost.warnings)
            bar.update(n_read, n_total)

        with bar:
            yield update_bar
