"""The progress bar of a prefill, on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text


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
            self._progress.start()
            self._progress.start_task(self._task)
        self._progress.update(self._task, completed=done, total=total)
        if done == total:
            self._progress.stop()

    def close(self) -> None:
        """Stop drawing, whatever happened; calling it again does nothing."""
        if self._progress.live.is_started:
            self._progress.stop()
