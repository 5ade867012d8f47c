"""The progress bar of a prefill, on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text


class _TokenSpeed(ProgressColumn):
    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} tokens/s" if speed else "")


class PrefillBar:
    """What mlx-lm's `prompt_progress_callback` drives."""

    def __init__(self, progress: Progress, total: int):
        self._progress = progress
        self._task = progress.add_task("reading the prompt", total=total)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def finish(self) -> None:
        """Take the bar away before the answer is written; calling it again does nothing."""
        self._progress.stop()


@contextlib.contextmanager
def prefill_progress(console: Console, total: int) -> Iterator[PrefillBar]:
    """A bar with tokens/s and time left, gone when the prompt is read or the block ends."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,}"),
        _TokenSpeed(),
        TimeRemainingColumn(),
    )
    # Only a terminal can take the bar away again.
    shown = console.is_terminal and not console.quiet
    progress = Progress(*columns, console=console, transient=True, disable=not shown)
    with progress:
        yield PrefillBar(progress, total)
