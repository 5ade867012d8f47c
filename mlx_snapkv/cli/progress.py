"""The progress bars, on stderr: of a prefill, and of work done in steps."""

import time
from typing import Any

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

    def __init__(self, line_every: float = 0.0):
        self.console = stderr_console()
        self._line_every = line_every
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def start(self, what: str, parts: int, done: int = 0) -> None:
        self._task = self._progress.add_task(what, total=parts, completed=done)
        self._printed = time.monotonic()

    def advance(self) -> None:
        self._progress.advance(self._task)
        task = self._progress.tasks[-1]
        late = time.monotonic() - self._printed >= self._line_every
        if not self.console.is_terminal and (late or task.finished):
            self._printed = time.monotonic()
            done = f"{task.completed:.0f}/{task.total:.0f}"
            self.console.print(f"{task.description} {done}, {task.elapsed or 0:.0f} s")


class SavingBars(StepBars):
    """A bar for each kind of measurement; saves what is done."""

    def __init__(self, about: dict[str, Any], files: ResultFiles | None):
        super().__init__()
        self._about = about
        self._files = files

    def save(self, result: dict[str, list[dict[str, Any]]]) -> None:
        if self._files is not None:
            write_json(self._files.base, self._about | result)
