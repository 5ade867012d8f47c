"""The progress bars, on stderr: of a prefill, and of work done in steps."""

from __future__ import annotations

import time
from pathlib import Path
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

from .result_files import ResultFiles, write_json
from .slow_blas import LONG, tell_slow_blas

if TYPE_CHECKING:
    from ..batch.run import Progress as BatchProgress

LINE_EVERY = 30.0  # seconds between two lines off a terminal

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


class CallbackBar:
    """A bar that a callback with what is done, of how much, moves: `update`. On a terminal it is gone at the end.

    Attributes:
        done: so far.
    """

    def __init__(self, console: Console, what: str, *columns: ProgressColumn, quiet: bool = False):
        self.done = 0
        self._progress = Progress(
            TextColumn(what),
            BarColumn(),
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=console.is_terminal,
            disable=quiet or console.quiet,
        )
        self._task = self._progress.add_task("", start=False, total=0)

    def update(self, done: int, total: int) -> None:
        self.done = done
        if done < total and not self._progress.live.is_started:
            self._progress.start()
            self._progress.start_task(self._task)
        self._progress.update(self._task, completed=done, total=total)
        if done == total:
            self.close()

    def close(self) -> None:
        """Stop drawing, whatever happened; calling it again does nothing."""
        if self._progress.live.is_started:
            self._progress.stop()


class PrefillBar(CallbackBar):
    """Tokens read: give `update` to mlx-lm as its `prompt_progress_callback`. Off a terminal its last state stays."""

    def __init__(self, console: Console):
        count = TextColumn("{task.completed:,}/{task.total:,}")
        super().__init__(console, "reading the prompt", count, _TokenSpeed())

    def update(self, done: int, total: int) -> None:
        if done == 0 and total >= LONG:
            tell_slow_blas(self._progress.console)
        super().update(done, total)


class WritingBar(CallbackBar):
    """Bytes written: give `update` to `saved.save` as its `progress`. Off a terminal nothing is shown."""

    def __init__(self, console: Console):
        columns = DownloadColumn(), TransferSpeedColumn()
        super().__init__(console, "writing the entries", *columns, quiet=not console.is_terminal)


class StepBars:
    """Bars of whatever is done in steps, with time left; off a terminal a line now and then, and at the end of each.

    Args:
        answers: a file that the same command goes on from, which Ctrl-C says.
        line_every: seconds between two lines, at least.
    """

    def __init__(self, answers: Path | None = None, line_every: float = 0.0, quiet: bool = False):
        self.console = stderr_console(quiet)
        self._answers, self._line_every = answers, line_every
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        if kind is KeyboardInterrupt and self._answers is not None:
            self.console.print(
                f"What was answered is in {self._answers}; the same command goes on from there.",
                soft_wrap=True,
            )

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

    def __init__(self, n_documents: int, answers: Path | None = None):
        super().__init__(answers, LINE_EVERY)
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

    def __init__(self, n_lines: int, answers: Path | None, quiet: bool):
        super().__init__(answers, LINE_EVERY, quiet)
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
