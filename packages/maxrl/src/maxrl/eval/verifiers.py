"""Verifiers: ``verify(completion, answer) -> bool`` says whether a rollout passes.

Built in: ``exact``, ``boxed``, ``regex``, ``maze``; any other is named ``module:function``. :class:`Scorer` is what
trainers and evaluations call: it counts the verifier's own failures and can keep the verifier in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from maxrl.eval.maze import judge

Verifier = Callable[[str, str], bool | float | None]


def exact(completion: str, answer: str) -> bool:
    """The completion is the answer, white space at the ends aside."""
    return completion.strip() == answer.strip()


def boxed(completion: str, answer: str) -> bool:
    r"""The last ``\boxed{...}`` of the completion holds the answer, as text without spaces, ``$`` and thousands commas,
    or as the same number."""
    found = _last_boxed(completion)
    return found is not None and _same(found, answer)


def regex(completion: str, answer: str) -> bool:
    """The answer, a regular expression, matches somewhere in the completion."""
    return re.search(answer, completion) is not None


def maze(completion: str, answer: str) -> bool:
    """The completion's actions solve the maze whose token sequence is the answer."""
    return judge(completion, answer)


BUILT_IN: dict[str, Verifier] = {"exact": exact, "boxed": boxed, "regex": regex, "maze": maze}


def get_verifier(name: str) -> Verifier:
    """A built-in verifier, or the function that ``module:function`` names.

    Raises:
        ValueError: no such verifier.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"verifier {name!r}: choose one of {', '.join(BUILT_IN)}, or module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"verifier {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"verifier {name!r} is not a function")
    verifier: Verifier = found
    return verifier


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len(r"\boxed"), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len(r"\boxed{") : i]
    return None


def _same(a: str, b: str) -> bool:
    x, y = (re.sub(r"[\s$,]|\\!|\\,|\\left|\\right", "", s) for s in (a, b))
    if x == y:
        return True
    try:
        return math.isclose(float(x), float(y), rel_tol=1e-9)
    except ValueError:
        return False


class TooManyFailures(RuntimeError):
    """The verifier itself failed more often than allowed."""


class Scorer:
    """Rewards of completions: 1.0, 0.0, or NaN where the verifier raised, timed out, or returned None.

    Args:
        name: of the verifier.
        sandbox: run it in a process of its own, without the environment's secrets, that is killed after ``timeout``.
        timeout: seconds for one completion; only with ``sandbox``.
        max_failures: failures before :class:`TooManyFailures` stops the run; None: never.
    """

    def __init__(
        self, name: str, *, sandbox: bool = False, timeout: float = 10.0, max_failures: int | None = None
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout = {timeout}: it must be positive")
        self.name, self.max_failures, self.failures = name, max_failures, 0
        self._child = _Child(name, timeout) if sandbox else None
        self._verify = get_verifier(name) if not sandbox else None

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """One reward per completion."""
        return [self._one(c, a) for c, a in zip(completions, answers, strict=True)]

    def close(self) -> None:
        """End the verifier's process."""
        if self._child is not None:
            self._child.stop()

    def _one(self, completion: str, answer: str) -> float:
        try:
            if self._child is not None:
                passed = self._child.ask(completion, answer)
            else:
                assert self._verify is not None
                passed = self._verify(completion, answer)
        except Exception as error:  # noqa: BLE001 - the verifier is the user's code: whatever it raises is counted
            return self._failed(f"{type(error).__name__}: {error}")
        if passed is None or (isinstance(passed, float) and math.isnan(passed)):
            return self._failed("it returned no verdict")
        return float(passed)

    def _failed(self, reason: str) -> float:
        self.failures += 1
        if self.max_failures is not None and self.failures > self.max_failures:
            raise TooManyFailures(
                f"verifier {self.name!r} failed {self.failures} times, more than {self.max_failures}; the last time: "
                f"{reason}"
            )
        return math.nan


class _Child:
    """The verifier in a process of its own; questions and answers are lines of JSON."""

    def __init__(self, name: str, timeout: float) -> None:
        self._name, self._timeout = name, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def ask(self, completion: str, answer: str) -> float | None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps([completion, answer]).encode() + b"\n")
        process.stdin.flush()
        reply = self._line(self._timeout)
        if reply is None:
            raise TimeoutError(f"no verdict within {self._timeout:g} s")
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["passed"]  # type: ignore[no-any-return]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.stop()
        keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")}
        keep["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        command = [sys.executable, "-m", "maxrl.eval.verifiers", self._name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=keep)
        ready = self._line(60.0)
        if ready is None or "error" in ready:
            self.stop()
            raise ValueError((ready or {}).get("error", f"verifier {self._name!r} did not start within 60 s"))

    def _line(self, timeout: float) -> dict[str, Any] | None:
        """The next line of the child; None, and the child ended, when it does not come or the child is gone."""
        assert self._process is not None
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], timeout)[0]:
            line = self._process.stdout.readline()
            if line:
                reply: dict[str, Any] = json.loads(line)
                return reply
        self.stop()
        return None


def _serve(name: str) -> None:
    """The child's loop. What the verifier prints goes to stderr, so that it cannot pass for a verdict."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields).encode() + b"\n")

    try:
        verify = get_verifier(name)
    except ValueError as error:
        reply(error=str(error))
        return
    reply(ready=True)
    for line in sys.stdin:
        completion, answer = json.loads(line)
        try:
            passed = verify(completion, answer)
            reply(passed=None if passed is None else float(passed))
        except Exception as error:  # noqa: BLE001 - reported to the parent, which counts it
            reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _serve(sys.argv[1])
