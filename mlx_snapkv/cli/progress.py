"""The progress bars, on stderr: of a prefill, and of work done in steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text
from rich.theme import Theme

from .options import ResultFiles, write_json
from .slow_blas import LONG, tell_slow_blas

if TYPE_CHECKING:
    from ..batch.run import Progress as BatchProgress

# The terminal's own colours, of which only green and red stand out on dark and on light ones alike.
PALETTE = Theme(
    {
        "bar.back": "dim",
        "bar.complete": "green",
        "bar.finished": "green",
        "bar.pulse": "green",
        "progress.elapsed": "default",
        "progress.percentage": "default",
        "progress.remaining": "default",
        "progress.download": "default",
    }
)


def stderr_console(quiet: bool = False) -> Console:
    return Console(stderr=True, highlight=False, theme=PALETTE, quiet=quiet)


class _TokenSpeed(ProgressColumn):
    def render(self, task) -> Text:
        seconds = task.finished_time or task.elapsed
        return Text(f"{task.completed / seconds:,.0f} tokens/s" if seconds else "")


class PrefillBar:
    """A bar with tokens/s and time left: give `update` to mlx-lm as its `prompt_progress_callback`.

    On a terminal it is gone when the prompt is read; elsewhere its last state stays as one line.
    """

    def __init__(self, console: Console):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,}"),
            _TokenSpeed(),
            TimeRemainingColumn(),
            console=console,
            transient=console.is_terminal,
            disable=console.quiet,
        )
        self._task = self._progress.add_task("reading the prompt", start=False, total=0)

    def update(self, done: int, total: int) -> None:
        if done == 0:
            if total >= LONG:
                tell_slow_blas(self._progress.console)
            self._progress.start()
            self._progress.start_task(self._task)
        self._progress.update(self._task, completed=done, total=total)
        if done == total:
            self._progress.stop()

    def close(self) -> None:
        """Stop drawing, whatever happened; calling it again does nothing."""
        if self._progress.live.is_started:
            self._progress.stop()


class WritingBar:
    """A bar with bytes, their speed and the time left: give `update` to `saved.save` as its `progress`.

    On a terminal it is gone when all is written; elsewhere nothing is shown.

    Attributes:
        n_bytes: written so far.
    """

    def __init__(self, console: Console):
        self.n_bytes = 0
        self._progress = Progress(
            TextColumn("writing the entries"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=console.quiet or not console.is_terminal,
        )
        self._task: Any = None

    def update(self, done: int, total: int) -> None:
        self.n_bytes = done
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        self._progress.stop()


class StepBars:
    """Bars of whatever is done in steps, with time left; off a terminal a line now and then, and at the end of each.

    Args:
        line_every: seconds between two lines, at least.
    """

    def __init__(self, line_every: float = 0.0, quiet: bool = False):
        self.console = stderr_console(quiet)
        self._line_every = line_every
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def start(self, what: str, parts: int, done: int = 0, **fields: Any) -> None:
        self._task = self._progress.add_task(what, total=parts, completed=done, **fields)
        self._printed, self._over = time.monotonic(), False

    def advance(self) -> None:
        self._progress.advance(self._task)
        self._print()

    def _print(self, more: str = "") -> None:
        """Off a terminal, a line if it is time for one."""
        task = self._progress.tasks[-1]
        late = time.monotonic() - self._printed >= self._line_every
        over = task.finished and not self._over
        if not self.console.is_terminal and (late or over):
            self._printed, self._over = time.monotonic(), task.finished
            done = f"{task.completed:.0f}/{task.total:.0f}"
            told = f"{task.description} {done}, {task.elapsed or 0:.0f} s"
            self.console.print(f"{told}, {more}" if more else told, soft_wrap=True)


class DocumentBar(StepBars):
    """A bar of an evaluation's documents; after the first one it says how long the others will take."""

    def __init__(self, n_documents: int, line_every: float):
        super().__init__(line_every)
        self._left, self._said = n_documents, False

    def __enter__(self):
        super().__enter__()
        self.start("documents", self._left)
        self._before = time.monotonic()
        return self

    def done(self, asked: bool, n: int = 1) -> None:
        """So many documents are done, together; if nothing was `asked`, their answers were there already."""
        self._left -= n
        took, self._before = time.monotonic() - self._before, time.monotonic()
        self._progress.advance(self._task, n)
        if not asked:
            return
        self._print()
        if not self._said:
            self._said = True
            if (seconds := took / n * self._left) > self._line_every:
                left = f"{seconds / 60:,.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
                first = "The first" if n == 1 else f"The first {n}"
                self.console.print(f"{first} took {took:.0f} s: about {left} for the others.")


class BatchBar(StepBars):
    """A bar of a file's lines, with the tokens read and answered a second: give `update` to a `Run`."""

    def __init__(self, n_lines: int, line_every: float, quiet: bool):
        super().__init__(line_every, quiet)
        self._progress.columns = (*self._progress.columns, TextColumn("{task.fields[speed]}"))
        self._n_lines = n_lines

    def update(self, done: BatchProgress) -> None:
        if not self._progress.tasks:  # what was there before is no work of this run's
            self.start("answering", self._n_lines, done.before, speed="")
        seconds = max(done.seconds, 1e-9)
        read, answered = done.prompt_tokens / seconds, done.answer_tokens / seconds
        speed = f"{read:,.0f} tokens/s read, {answered:,.0f} answered" if read else ""
        self._progress.update(self._task, completed=done.lines, speed=speed)
        self._print(speed)


class SavingBars(StepBars):
    """A bar for each kind of measurement; saves what is done."""

    def __init__(self, files: ResultFiles | None):
        super().__init__()
        self._files = files

    def save(self, result: dict[str, Any]) -> None:
        """One part is done, and this is the result so far."""
        self.advance()
        if self._files is not None:
            write_json(self._files.base, result)
