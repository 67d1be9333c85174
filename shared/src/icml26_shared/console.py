"""What a command says: text, tables and progress bars for people, one JSON document for programs.

:class:`Context` is what :class:`icml26_shared.cli.App` hands to every command. Rich is loaded when something is shown.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from icml26_shared.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["Bar", "Context", "format_number", "progress"]

_Item = TypeVar("_Item")
_WIDTH_IN_A_FILE = 120


class Context:
    """Settings shared by all commands, and the ways to show things.

    Attributes:
        name: name of the program.
        distribution: distribution it comes from.
        json: whether stdout is for one JSON document (then text and tables go to stderr).
        quiet: whether progress bars and notes are left out.
        seed: seed for all that is random in this run.
        out: folder for files this run writes; made by :meth:`out_file`.
        fresh: whether to measure again what an earlier run left in ``out`` (commands with ``--fresh`` set it).
    """

    def __init__(
        self,
        name: str = "icml26",
        *,
        distribution: str | None = None,
        json: bool = False,
        quiet: bool = False,
        seed: int = 0,
        out: str | Path | None = None,
    ) -> None:
        self.name = name
        self.distribution = distribution or name
        self.json = json
        self.quiet = quiet
        self.seed = seed
        self.out = Path(out) if out is not None else Path(f"{name}-out")
        self.fresh = False
        self.result: Mapping[str, Any] | Sequence[Any] | None = None
        self._progress: Progress | None = None
        self._bars = 0

    @cached_property
    def console(self) -> Console:
        """Rich console for text and tables: stdout, or stderr with ``--json``."""
        return self.console_errors if self.json else _console(stderr=False)

    @cached_property
    def console_errors(self) -> Console:
        """Rich console on stderr."""
        return _console(stderr=True)

    def say(self, text: str, *, style: str | None = None) -> None:
        """Print a result or a conclusion, literally (no markup)."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a remark about the run on stderr; left out with ``--quiet``."""
        if not self.quiet:
            self._print_aside(text, style="dim")

    def warn(self, text: str) -> None:
        """Print a warning on stderr, also with ``--quiet``."""
        self._print_aside(f"warning: {text}")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Print a table. Numbers are shown with four significant digits and set right; None is shown as a dash.

        Raises:
            ValueError: a row has another number of cells than there are columns.
        """
        from rich.table import Table
        from rich.text import Text

        cells = [list(row) for row in rows]
        for row in cells:
            if len(row) != len(columns):
                raise ValueError(f"table {title!r}: a row has {len(row)} cells for {len(columns)} columns: {row}")
        table = Table(title=Text(title), title_justify="left", header_style="bold")
        for index, column in enumerate(columns):
            values = [row[index] for row in cells if row[index] is not None]
            numeric = bool(values) and all(_is_number(value) for value in values)
            table.add_column(Text(str(column)), justify="right" if numeric else "left")
        for row in cells:
            table.add_row(*(Text("–" if value is None else format_number(value)) for value in row))
        self.console.print(table)

    def progress(self, description: str, total: float | None = None) -> Bar:
        """A progress bar, as a context manager with ``advance(n=1)`` and ``update(description)``.

        Bars may be nested. ``total=None`` shows that something moves, without a share. Nothing is shown with
        ``--quiet``; bars never go to a stdout that is a pipe or a file.
        """
        return Bar(self, description, total)

    def track(self, items: Iterable[_Item], description: str, total: float | None = None) -> Iterator[_Item]:
        """Iterate with a progress bar. ``total`` defaults to ``len(items)`` where it has one."""
        if total is None and isinstance(items, Sized):
            total = len(items)
        with self.progress(description, total) as bar:
            for item in items:
                yield item
                bar.advance()

    def out_file(self, name: str | Path) -> Path:
        """Path of a file in the output folder; its folders are made now.

        Raises:
            UserError: the output folder cannot be made.
        """
        path = self.out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the output folder {str(path.parent)!r} ({error.strerror}); choose --out"
            ) from error
        return path

    def finish(self, result: Mapping[str, Any] | Sequence[Any]) -> None:
        """Give the result of the command; with ``--json`` it is printed, as strict JSON, when the command returns.

        Raises:
            RuntimeError: called twice.
        """
        if self.result is not None:
            raise RuntimeError("finish() was called twice; a command has one result")
        self.result = result

    def _enter_bar(self, description: str, total: float | None) -> tuple[Progress, TaskID]:
        if self._progress is None:
            self._progress = _progress(self._progress_console(), disable=self.quiet)
        if self._bars == 0:
            self._progress.start()
        self._bars += 1
        return self._progress, self._progress.add_task(description, total=total)

    def _leave_bar(self, progress: Progress, task: TaskID) -> None:
        self._bars -= 1
        if self._bars:
            progress.remove_task(task)  # an inner bar that is through makes room
            return
        progress.stop_task(task)
        progress.stop()
        self._progress = None

    def _print_aside(self, text: str, style: str | None = None) -> None:
        console = self.console_errors
        if self._progress is not None and console.is_terminal:
            console = self._progress.console  # else the bar on the same terminal would be drawn over the text
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _progress_console(self) -> Console:
        # On a terminal, bars and text share one console, or they would overwrite each other.
        return self.console if self.console.is_terminal else self.console_errors


class Bar:
    """One progress bar of a :class:`Context`."""

    def __init__(self, context: Context, description: str, total: float | None) -> None:
        self._context = context
        self._description = description
        self._total = total
        self._task: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Bar:
        self._task = self._context._enter_bar(self._description, self._total)
        return self

    def advance(self, n: float = 1) -> None:
        """Move on by ``n`` steps."""
        progress, task = self._entered()
        progress.advance(task, n)

    def update(
        self, description: str | None = None, *, total: float | None = None, completed: float | None = None
    ) -> None:
        """Change the description, the total or the number of steps done."""
        progress, task = self._entered()
        progress.update(task, description=description, total=total, completed=completed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        progress, task = self._entered()
        if self._total is None and error is None:
            progress.update(task, total=1, completed=1)
        self._task = None
        self._context._leave_bar(progress, task)

    def _entered(self) -> tuple[Progress, TaskID]:
        if self._task is None:
            raise RuntimeError("a progress bar is used inside its with block only")
        return self._task


_running: list[Context] = []


@contextmanager
def running(context: Context) -> Iterator[None]:
    """Make ``context`` the one that :func:`progress` shows its bars in."""
    _running.append(context)
    try:
        yield
    finally:
        _running.pop()


def progress(description: str, total: float | None = None) -> Bar:
    """A progress bar for library code: among those of the command that is running, or else on stderr.

    Used as :meth:`Context.progress`.
    """
    context = _running[-1] if _running else Context(json=True)
    return context.progress(description, total)


def format_number(value: Any) -> str:
    """Four significant digits for floats, digits for integers, ``str`` for the rest; True and False as yes and no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        if number == 0 or 1e-4 <= abs(number) < 1e6 or not math.isfinite(number):
            return f"{number:.0f}" if abs(number) >= 1e4 and math.isfinite(number) else f"{number:.4g}"
        return f"{number:.3e}"
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _console(*, stderr: bool) -> Console:
    import os

    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the App ends the program quietly

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or os.environ.get("COLUMNS") else _WIDTH_IN_A_FILE
    return PipeConsole(stderr=stderr, width=wide)


def _progress(console: Console, *, disable: bool) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=disable,
    )
