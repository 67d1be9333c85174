"""Two ends of the pipe between pytest and its child in Triton's interpreter (see `icml26_shared.testing.plugin`).

The parent sends ``{"run": node id, "next": node id or null}``, the child answers ``{"report": ...}`` for setup, call,
teardown, then ``{"done": node id}``: JSON, one object a line, over two pipes that only these processes hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

MARKER = "triton_interpreter"
REQUESTS_OPTION = "--triton-interpreter-pipe"
_SHUTDOWN_SECONDS = 30.0


class ChildSession:
    """The parent's end: one child pytest that has collected the files of the marked tests and runs them on request."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 closed in close()
        child_read, parent_write = os.pipe()
        parent_read, child_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                _command(config, items, f"{child_read},{child_write}"),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=config.invocation_params.dir,
                env={**os.environ, "TRITON_INTERPRET": "1"},
                pass_fds=(child_read, child_write),
            )
        finally:
            os.close(child_read)
            os.close(child_write)
        self._requests = os.fdopen(parent_write, "w", encoding="utf-8")
        self._answers = os.fdopen(parent_read, "r", encoding="utf-8")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Run one test in the child, and yield its reports as they come in.

        A child that dies gives the test a failing report with the end of the child's output.
        """
        request = {"run": item.nodeid, "next": nextitem.nodeid if nextitem is not None else None}
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            yield self._death(item)
            return
        for line in self._answers:
            answer = json.loads(line)
            if "done" in answer:
                return
            yield self._report(answer["report"])
        yield self._death(item)

    def close(self) -> None:
        """Let the child tear down its fixtures and end; kill it when it does not."""
        if self._log.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(_SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()

    def _report(self, data: dict[str, Any]) -> pytest.TestReport:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        if isinstance(report.longrepr, list):  # a skip's (path, line, reason): pytest wants the tuple that JSON has not
            report.longrepr = tuple(report.longrepr)
        return cast(pytest.TestReport, report)

    def _death(self, item: pytest.Item) -> pytest.TestReport:
        code = self._process.wait()
        self._log.seek(0)
        tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-60:])
        what = f"the process with Triton's interpreter ended with exit code {code} and left this test unfinished"
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={item.name: 1},
            outcome="failed",
            longrepr=f"{what}\n{tail}",
            when="call",
        )


def _command(config: pytest.Config, items: list[pytest.Item], descriptors: str) -> list[str]:
    """The child's command line: the files of the marked tests, and those of this run's options that change a result."""
    option = config.option
    command = [sys.executable, "-m", "pytest", f"{REQUESTS_OPTION}={descriptors}", f"--verbosity={option.verbose}"]
    command += ["--rootdir", str(config.rootpath), "--import-mode", option.importmode]
    command += ["-c", str(config.inipath or os.devnull)]
    for flag, values in (
        ("-p", option.plugins),
        ("-o", option.override_ini),
        ("-W", option.pythonwarnings),
        ("--confcutdir", [option.confcutdir] if option.confcutdir else None),
        ("--timeout", [getattr(option, "timeout", None)]),
        ("--hypothesis-seed", [getattr(option, "hypothesis_seed", None)]),
        ("--hypothesis-profile", [getattr(option, "hypothesis_profile", None)]),
    ):
        for value in values or ():
            if value is not None:
                command += [flag, str(value)]
    command += ["-p", "no:cacheprovider"]
    if config.pluginmanager.hasplugin("xdist"):
        command += ["-n", "0"]
    return [*command, *dict.fromkeys(str(item.path) for item in items)]


def serve(session: pytest.Session, read: int, write: int) -> None:
    """The child's end: run the tests the parent names until it closes its pipe."""
    with os.fdopen(read, "r", encoding="utf-8") as requests, os.fdopen(write, "w", encoding="utf-8") as answers:

        def send(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        session.config.pluginmanager.register(_Forward(session.config, send))
        items = {item.nodeid: item for item in session.items}
        for line in requests:
            request = json.loads(line)
            item = items.get(request["run"])
            if item is None:
                raise pytest.UsageError(
                    f"{request['run']} is not collected when TRITON_INTERPRET=1 is set; "
                    "a marked test must not depend on the variable for its name or parameters"
                )
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(request["next"]))
            send({"done": item.nodeid})


class _Forward:
    """Sends each report of the child to the parent."""

    def __init__(self, config: pytest.Config, send: Any) -> None:
        self._config, self._send = config, send

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send({"report": _plain(data)})


def _plain(value: Any) -> Any:
    """The same value in JSON's types: tests may record anything as a user property or parameter."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return os.fspath(value) if isinstance(value, Path) else repr(value)
