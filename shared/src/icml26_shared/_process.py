"""Streams and signals of a process that runs a command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from icml26_shared.console import Context


def prepare_streams() -> None:
    """Make stdout and stderr usable where they are closed or cannot show Unicode."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open as long as the process
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows '?', not a traceback


def stdout_is_gone() -> bool:
    """Whether the reader of stdout or stderr has closed it."""
    import select

    if not hasattr(select, "poll"):
        return True  # cannot be told there; a broken pipe is nearly always stdout
    poll = select.poll()
    try:
        for stream in (sys.stdout, sys.stderr):
            poll.register(stream.fileno(), 0)
    except (OSError, ValueError):
        return True
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def silence_stdout() -> None:
    """Nobody reads stdout any more: let the interpreter's last flush go nowhere."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextmanager
def stdout_for_json() -> Iterator[None]:
    """Send whatever libraries and child processes print on stdout to stderr, for the sake of the JSON document."""
    stdout = sys.stdout
    stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = stdout
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def one_line_warnings(ctx: Context) -> Iterator[None]:
    """Warnings meant for users as one line; those for programmers as always."""
    import warnings

    previous = warnings.showwarning

    def show(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if file is None and issubclass(category, UserWarning):
            ctx.warn(str(message))
        else:
            previous(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = previous


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM (a scheduler, ``timeout``, ``docker stop``) end the run as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
