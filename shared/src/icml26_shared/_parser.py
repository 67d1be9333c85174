"""Argument parser with one-line errors, suggestions, and arguments added only when it is used."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from icml26_shared.errors import UserError


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors, suggestions, and arguments added only when it is used."""

    fill: Callable[[Parser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"unknown command {value!r}{_suggest(value, action.choices)}")
        super()._check_value(action, value)


def parse(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    namespace, rest = parser.parse_known_args(list(argv))
    args = {"json": False, "quiet": False, "out": None, **vars(namespace)}
    used: Parser = args.pop("_parser", parser)
    if rest:
        options = [option for action in used._actions for option in action.option_strings]
        first = rest[0].partition("=")[0]
        if first.startswith("-"):
            used.error(f"unknown option {first!r}{_suggest(first, options)}")
        used.error(f"one argument too many: {first!r}")
    return args


def _suggest(value: str, choices: Any) -> str:
    close = difflib.get_close_matches(value, list(choices), n=1)
    return f"; did you mean {close[0]!r}?" if close else (f"; choose from {', '.join(choices)}" if choices else "")
