"""Progress bars on stderr."""

from collections.abc import Callable
from pathlib import Path

from rich import progress
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from rich.theme import Theme

LINE_INTERVAL = 30.0  # seconds between progress lines if stderr is not a terminal

# Only the terminal palette's green and red are readable on both dark and light backgrounds.
PALETTE = Theme(
    {
        **dict.fromkeys(("bar.complete", "bar.finished", "bar.pulse"), "green"),
        **{f"progress.{part}": "default" for part in ("elapsed", "percentage", "remaining", "download")},
        "bar.back": "dim",
    }
)  # fmt: skip


def stderr_console(quiet: bool = False) -> Console:
    """Return rich's console on stderr in this package's colours. A quiet console prints nothing."""
    return Console(stderr=True, highlight=False, theme=PALETTE, quiet=quiet)


class _TokenSpeed(progress.ProgressColumn):
    def render(self, task) -> Text:
        seconds = task.finished_time or task.elapsed
        return Text(f"{task.completed / seconds:,.0f} tokens/s" if seconds else "")


class CallbackBar:
    """Context manager that shows a progress bar and returns its callback `update(n_done, n_total)`.

    In a terminal the bar disappears at the end. Elsewhere its last state remains.

    Args:
        console: console to print on.
        title: text before the bar.
        *columns: columns between the bar and the remaining time.
        quiet: whether to hide the bar.

    Attributes:
        n_done: last value of `n_done` passed to the callback.
    """

    def __init__(
        self, console: Console, title: str, *columns: progress.ProgressColumn, quiet: bool = False
    ):
        """Create the bar. It does not appear before `update` is called."""
        self.n_done = 0
        self._bar = Progress(
            TextColumn(title),
            BarColumn(),
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=console.is_terminal,
            disable=quiet or console.quiet,
        )
        self._task = self._bar.add_task("", start=False, total=0)

    def __enter__(self) -> Callable[[int, int], None]:
        """Return the callback."""
        return self.update

    def __exit__(self, *_: object) -> None:
        """Stop the bar if it has appeared."""
        self._stop()

    def _stop(self) -> None:
        """Stop the bar if it has appeared."""
        if self._bar.live.is_started:
            self._bar.stop()

    def update(self, n_done: int, n_total: int) -> None:
        """Update the bar. It appears on the first call with `n_done < n_total`, and stops when they are equal."""
        self.n_done = n_done
        has_appeared = self._bar.live.is_started
        if n_done < n_total and not has_appeared:
            self._bar.start()
            self._bar.start_task(self._task)
        self._bar.update(self._task, completed=n_done, total=n_total)
        if n_done == n_total:
            self._stop()


def prefill_bar(console: Console) -> CallbackBar:
    """Return a bar that counts prompt tokens, for mlx-lm's `prompt_progress_callback`."""
    count = TextColumn("{task.completed:,}/{task.total:,}")
    return CallbackBar(console, "reading the prompt", count, _TokenSpeed())


def writing_bar(console: Console) -> CallbackBar:
    """Return a bar that counts written bytes, for `saved.save`'s `progress` argument. It is shown only in terminals."""
    columns = progress.DownloadColumn(), progress.TransferSpeedColumn()
    return CallbackBar(console, "writing the entries", *columns, quiet=not console.is_terminal)


class StepBars:
    """Context manager for progress bars that count steps. If stderr is not a terminal, it prints lines instead.

    Args:
        results_file: file with the results so far. After Ctrl-C, a message says that the same command continues from
            it.
        quiet: whether to hide the bars.
    """

    def __init__(self, results_file: Path | None = None, quiet: bool = False):
        """Create the display. Each bar appears when it is started."""
        self._console = stderr_console(quiet)
        self._results_file = results_file
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[details]}"),
            console=self._console,
            speed_estimate_period=3600,  # one hour in seconds, because a single step may take minutes
            disable=quiet or not self._console.is_terminal,
        )

    def __enter__(self):
        """Show the bars."""
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop the bars. After Ctrl-C, print where to find the results so far."""
        self._progress.stop()
        if kind is KeyboardInterrupt and self._results_file is not None:
            message = f"The answers so far are in {self._results_file}; the same command continues from there."
            self._console.print(message, soft_wrap=True)

    def start(self, title: str, n_steps: int) -> None:
        """Start a bar of `n_steps` steps."""
        self._task = self._progress.add_task(title, total=n_steps, details="")
        self._last_line_time = self._progress.get_time()
        self._has_printed_end = False

    def count_step(self) -> None:
        """Count a finished step."""
        self._progress.advance(self._task)
        self._print_line_if_due()

    def set_count(self, n_done: int, details: str) -> None:
        """Set the number of finished steps, and the text after the bar."""
        self._progress.update(self._task, completed=n_done, details=details)
        self._print_line_if_due()

    def _print_line_if_due(self) -> None:
        """Print a progress line when one is due and at the end, unless stderr is a terminal."""
        task = self._progress.tasks[-1]
        now = self._progress.get_time()
        is_due = now - self._last_line_time >= LINE_INTERVAL
        is_end = task.finished and not self._has_printed_end
        if self._console.is_terminal or not (is_due or is_end):
            return
        self._last_line_time = now
        self._has_printed_end = task.finished
        parts = [
            f"{task.description} {task.completed:.0f}/{task.total:.0f}",
            f"{task.elapsed or 0:.0f} s",
        ]
        if task.time_remaining:
            parts.append(f"about {task.time_remaining:.0f} s left")
        if task.fields["details"]:
            parts.append(task.fields["details"])
        self._console.print(", ".join(parts), soft_wrap=True)
