"""The manners of every command line: the same flags, one-line errors, exit codes, JSON, interruption.

A package declares its commands and gets the rest::

    from icml26_shared.cli import App

    app = App(name="manifoldkv", distribution="manifoldkv", summary="KV-cache compression by distance to the centroid")
    app.standard(demo="manifoldkv.demo:run", claims="manifoldkv.claims:CLAIMS", bench="manifoldkv.bench:run")
    app.command("diagnose", run="manifoldkv.diagnose_command:run", help="say which metric suits a model",
                arguments=lambda parser: parser.add_argument("model"))

    def main() -> None:
        app.main()

Handlers named as ``"module:function"`` are imported when their command runs, so ``NAME --help`` stays fast.

Exit codes: 0 done; 1 the program failed (traceback on stderr); 2 bad input (one line on stderr); 130 interrupted by
Ctrl-C or SIGTERM; 141 the reader of stdout went away. ``ICML26_TRACEBACK=1`` shows tracebacks of bad input too.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from icml26_shared._parser import Parser, parse
from icml26_shared._process import (
    one_line_warnings,
    prepare_streams,
    silence_stdout,
    stdout_for_json,
    stdout_is_gone,
    terminate_as_interrupt,
)
from icml26_shared.console import Bar, Context, format_number, running
from icml26_shared.errors import MissingExtra, UserError

__all__ = ["App", "Bar", "Context", "Handler", "format_number"]

Handler = Callable[[Context, argparse.Namespace], Any]
Arguments = Callable[[argparse.ArgumentParser], Any]
_MAX_SEED = 2**32 - 1
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


@dataclass(frozen=True)
class _Command:
    name: str
    run: Handler | str
    help: str
    arguments: Arguments | str | None
    resumable: bool


class App:
    """A command line program.

    Args:
        name: name of the console script.
        distribution: distribution whose version ``--version`` shows. Default: ``name``.
        summary: one line on what the program does.
        seed: default of ``--seed``.
    """

    def __init__(self, name: str, *, distribution: str | None = None, summary: str = "", seed: int = 0) -> None:
        self.name = name
        self.distribution = distribution or name
        self.summary = summary
        self.seed = seed
        self._commands: dict[str, _Command] = {}

    def command(
        self,
        name: str,
        run: Handler | str | None = None,
        *,
        help: str,
        arguments: Arguments | str | None = None,
        resumable: bool = True,
    ) -> Callable[[Handler], Handler]:
        """Register a command; without ``run`` it is a decorator.

        Args:
            name: e.g. ``"diagnose"``; ``"ruler generate"`` makes a command in a group.
            run: ``run(ctx, args)``, or ``"module:function"``, imported when the command runs. It returns None, an exit
                code, or the result as a mapping, which is passed to :meth:`Context.finish`.
            help: one line.
            arguments: adds the command's arguments to the parser it is given; a function or ``"module:function"``.
            resumable: whether the same command, run again after Ctrl-C, continues.
        """
        if name in self._commands:
            raise ValueError(f"the command {name!r} is registered already")

        def register(handler: Handler) -> Handler:
            self._commands[name] = _Command(name, handler, help, arguments, resumable)
            return handler

        if run is not None:
            self._commands[name] = _Command(name, run, help, arguments, resumable)
        return register

    def standard(
        self,
        *,
        demo: Handler | str | None = None,
        claims: str | Sequence[Any] | None = None,
        bench: Handler | str | None = None,
        demo_arguments: Arguments | str | None = None,
        bench_arguments: Arguments | str | None = None,
    ) -> None:
        """Register ``demo``, ``claims`` and ``bench``, as far as given.

        Args:
            demo: ``run(ctx, args)`` returning a JSON-able mapping.
            claims: the package's list of :class:`icml26_shared.claims.Claim`, or its ``"module:NAME"``.
            bench: ``run(ctx, args)`` returning an :class:`icml26_shared.bench.BenchReport` or a JSON-able mapping.
            demo_arguments, bench_arguments: add further arguments to these commands.
        """
        if demo is not None:
            self.command(
                "demo", demo, help="do the main job on a real input and show the result", arguments=demo_arguments
            )
        if claims is not None:

            def run_claims(ctx: Context, args: argparse.Namespace) -> Any:
                from icml26_shared.claims import run_command

                return run_command(ctx, args, _resolve(claims))

            self.command(
                "claims", run_claims, help="check the paper's claims and report what holds", arguments=_claims_arguments
            )
        if bench is not None:

            def run_bench(ctx: Context, args: argparse.Namespace) -> Any:
                from icml26_shared.bench import run_command

                return run_command(ctx, args, _resolve(bench))

            def arguments(parser: argparse.ArgumentParser) -> None:
                _write_argument(parser, "bench")
                _fresh_argument(parser)
                if bench_arguments is not None:
                    _resolve(bench_arguments)(parser)

            self.command("bench", run_bench, help="measure against the usual alternatives", arguments=arguments)

    def main(self, argv: Sequence[str] | None = None) -> NoReturn:
        """Run and exit: for the console script."""
        prepare_streams()
        sys.exit(self.run(argv))

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Run with these arguments (default: ``sys.argv[1:]``) and return the exit code."""
        command: _Command | None = None
        try:
            with terminate_as_interrupt():
                parser = self._parser()
                args = {"seed": self.seed} | parse(parser, sys.argv[1:] if argv is None else list(argv))
                if args.get("version"):
                    print(f"{self.name} {self._version()}", flush=True)
                    return 0
                command = args.pop("_command", None)
                if command is None:
                    raise UserError(f"no command given; choose from {', '.join(self._commands)} ({self.name} --help)")
                return self._execute(command, args)
        except SystemExit as exit:  # argparse's --help
            return int(exit.code or 0)
        except KeyboardInterrupt:
            again = "; run the same command again to resume" if command is not None and command.resumable else ""
            return _fail(f"interrupted{again}", 130, prefix="")
        except Exception as error:  # noqa: BLE001 - the one place that turns errors into exit codes
            return self._report(error, command)

    def _execute(self, command: _Command, args: dict[str, Any]) -> int:
        ctx = Context(
            self.name,
            distribution=self.distribution,
            json=args["json"],
            quiet=args["quiet"],
            seed=args["seed"],
            out=args["out"],
        )
        with running(ctx), stdout_for_json() if ctx.json else nullcontext(), one_line_warnings(ctx):
            returned = _resolve(command.run)(ctx, argparse.Namespace(**args))
            code = returned if isinstance(returned, int) else 0
            if returned is not None and not isinstance(returned, int):
                ctx.finish(returned)
        if ctx.json:
            _print_json(ctx.result if ctx.result is not None else {})
        sys.stdout.flush()
        return code

    def _report(self, error: Exception, command: _Command | None) -> int:
        if isinstance(error, BrokenPipeError) and stdout_is_gone():
            silence_stdout()
            return 141
        users = self._is_users(error, command)
        if users and not os.environ.get("ICML26_TRACEBACK"):
            return _fail(_one_line(error), 2)
        import traceback

        traceback.print_exception(error)
        return 2 if users else 1

    def _parser(self) -> Parser:
        parser = Parser(prog=self.name, description=self.summary, allow_abbrev=False)
        parser.add_argument(
            "--version", action="store_true", default=argparse.SUPPRESS, help="show the version and exit"
        )
        _common_arguments(parser, self)
        groups: dict[str, Any] = {"": parser.add_subparsers(metavar="COMMAND", title="commands")}
        for command in self._commands.values():
            group, _, last = command.name.rpartition(" ")
            if group not in groups:
                names = [name.rpartition(" ")[2] for name in self._commands if name.rpartition(" ")[0] == group]
                above = groups[""].add_parser(group, help=f"{', '.join(names)}", allow_abbrev=False)
                groups[group] = above.add_subparsers(metavar="COMMAND", title="commands")
            sub = groups[group].add_parser(last, help=command.help, description=command.help, allow_abbrev=False)
            sub.set_defaults(_command=command, _parser=sub)
            sub.fill = lambda parser, arguments=command.arguments: self._fill(parser, arguments)
        return parser

    def _fill(self, parser: Parser, arguments: Arguments | str | None) -> None:
        _common_arguments(parser, self)
        if arguments is not None:
            _resolve(arguments)(parser)

    def _version(self) -> str:
        from importlib import metadata

        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return "(not installed)"

    def _is_users(self, error: BaseException, command: _Command | None) -> bool:
        """Whether this error speaks to the user, or shows a fault of the program."""
        if isinstance(error, (UserError, MissingExtra)):
            return True
        if isinstance(error, OSError):
            return error.filename is not None or error.errno in _DISK_ERRORS or isinstance(error, FileNotFoundError)
        if isinstance(error, (ValueError, TypeError, NotImplementedError, ImportError)):
            return _raised_on_purpose(error, {"icml26_shared", *self._packages(command)})
        return False

    def _packages(self, command: _Command | None) -> Iterator[str]:
        yield self.distribution.replace("-", "_")
        if command is not None:
            run = command.run
            yield (run if isinstance(run, str) else run.__module__).partition(":")[0].partition(".")[0]


def _common_arguments(parser: argparse.ArgumentParser, app: App) -> None:
    # SUPPRESS: the flags may stand before or after the command, and the later parser must not undo the earlier one.
    group = parser.add_argument_group("common options")
    off = argparse.SUPPRESS
    group.add_argument(
        "--json", action="store_true", default=off, help="print the result as one JSON document on stdout"
    )
    group.add_argument(
        "--seed", type=_seed, metavar="N", default=off, help=f"seed of all randomness (default {app.seed})"
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=off,
        help=f"folder for files that are written (default {app.name}-out)",
    )
    group.add_argument("--quiet", action="store_true", default=off, help="no progress bars and remarks")


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _MAX_SEED:
        raise argparse.ArgumentTypeError(f"a seed is a whole number from 0 to {_MAX_SEED}, got {text!r}")
    return value


def _claims_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="list the claims and their rules; measure nothing")
    parser.add_argument("--only", action="append", metavar="ID", help="check this claim only (may be repeated)")
    _write_argument(parser, "claims")
    _fresh_argument(parser)


def _write_argument(parser: argparse.ArgumentParser, marker: str) -> None:
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="README",
        help=f"write the table between <!-- {marker}:begin --> and <!-- {marker}:end --> of this file "
        "(default: the package's README.md)",
    )


def _fresh_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fresh", action="store_true", help="measure again all that an earlier run left in --out")


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"a handler is named as 'module:function', got {name!r}")
    found = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _resolve(value: Any) -> Any:
    return _load(value) if isinstance(value, str) else value


def _raised_on_purpose(error: BaseException, packages: set[str]) -> bool:
    """Whether the error comes from a ``raise`` statement in one of these packages (a check of an argument).

    A ValueError or TypeError that the interpreter or another library raises is a fault to be shown in full.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    if module not in packages:
        return False
    import dis

    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__


def _fail(message: str, code: int, prefix: str = "error: ") -> int:
    with suppress(BrokenPipeError):
        print(f"{prefix}{message}", file=sys.stderr, flush=True)
    return code


def _print_json(result: Any) -> None:
    from icml26_shared._files import dumps

    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    print(dumps(result, indent=2, ensure_ascii=ascii_only), flush=True)
