"""The progress bars on stderr: of what a callback reports, and of work done in steps."""

from collections.abc import Callable
from pathlib import Path

from rich import progress
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from rich.theme import Theme

LINE_EVERY = 30.0  # seconds between two lines off a terminal

# The terminal's own colours, of which only green and red stand out on dark and on light ones alike.
PALETTE = Theme(
    {
        **dict.fromkeys(("bar.complete", "bar.finished", "bar.pulse"), "green"),
        **{f"progress.{part}": "default" for part in ("elapsed", "percentage", "remaining", "download")},
        "bar.back": "dim",
    }
)  # fmt: skip


def stderr_console(quiet: bool = False) -> Console:
    return Console(stderr=True, highlight=False, theme=PALETTE, quiet=quiet)


class _TokenSpeed(progress.ProgressColumn):
    def render(self, task) -> Text:
        seconds = task.finished_time or task.elapsed
        return Text(f"{task.completed / seconds:,.0f} tokens/s" if seconds else "")


class CallbackBar:
    """A bar that a callback with what is done, of how much, moves. On a terminal it is gone at the end."""

    def __init__(
        self, console: Console, what: str, *columns: progress.ProgressColumn, quiet: bool = False
    ):
        self.done = 0
        columns = TextColumn(what), BarColumn(), *columns, TimeRemainingColumn()
        self._bar = Progress(
            *columns,
            console=console,
            transient=console.is_terminal,
            disable=quiet or console.quiet,
        )
        self._task = self._bar.add_task("", start=False, total=0)

    def __enter__(self) -> Callable[[int, int], None]:
        return self.update

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """The bar is shown from the first call on that leaves something to do, to the one that leaves nothing."""
        self.done = done
        if done < total and not self._bar.live.is_started:
            self._bar.start()
            self._bar.start_task(self._task)
        self._bar.update(self._task, completed=done, total=total)
        if done == total:
            self.__exit__()


def prefill_bar(console: Console) -> CallbackBar:
    """Tokens read: for mlx-lm's `prompt_progress_callback`. Off a terminal its last state stays."""
    count = TextColumn("{task.completed:,}/{task.total:,}")
    return CallbackBar(console, "reading the prompt", count, _TokenSpeed())


def writing_bar(console: Console) -> CallbackBar:
    """Bytes written: for the `progress` of `saved.save`. Nothing is shown off a terminal."""
    columns = progress.DownloadColumn(), progress.TransferSpeedColumn()
    return CallbackBar(console, "writing the entries", *columns, quiet=not console.is_terminal)


class StepBars:
    """Bars of work done in steps; off a terminal, lines. Ctrl-C names the file of `answers` to go on from."""

    def __init__(self, answers: Path | None = None, quiet: bool = False):
        self._console, self._answers = stderr_console(quiet), answers
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}"),
            console=self._console,
            speed_estimate_period=3600,  # seconds: a step may take minutes
            disable=quiet or not self._console.is_terminal,
        )

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        if kind is KeyboardInterrupt and self._answers is not None:
            line = (
                f"The answers so far are in {self._answers}; the same command continues from there."
            )
            self._console.print(line, soft_wrap=True)

    def start(self, what: str, total: int) -> None:
        self._task = self._progress.add_task(what, total=total, more="")
        self._printed, self._over = self._progress.get_time(), False

    def done(self, counts: bool = True) -> None:
        """Count one more step; if `counts` is false, print no line about it."""
        self._progress.advance(self._task)
        if counts:
            self._tell()

    def reach(self, done: int, more: str) -> None:
        self._progress.update(self._task, completed=done, more=more)
        self._tell()

    def _tell(self) -> None:
        task, now = self._progress.tasks[-1], self._progress.get_time()
        is_due = now - self._printed >= LINE_EVERY or (task.finished and not self._over)
        if self._console.is_terminal or not is_due:
            return
        self._printed, self._over = now, task.finished
        done = f"{task.description} {task.completed:.0f}/{task.total:.0f}"
        left = f"about {task.time_remaining:.0f} s left" if task.time_remaining else ""
        words = filter(None, (done, f"{task.elapsed or 0:.0f} s", left, task.fields["more"]))
        self._console.print(", ".join(words), soft_wrap=True)
