import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings

import pytest

from icml26_shared.cli import App, format_number
from icml26_shared.console import Context, progress
from icml26_shared.errors import MissingExtra, UserError


def make_app(**options):
    app = App("tool", summary="a tool for tests", **options)

    @app.command("show", help="show numbers", arguments=lambda p: p.add_argument("--rate", type=float, default=0.5))
    def show(ctx, args):
        with ctx.progress("outer", 2) as bar:
            for _ in ctx.track([1, 2], "inner"):
                bar.advance()
        ctx.table("Rates [%]", ["name", "rate"], [["[bold]a", args.rate], ["b", None]])
        ctx.note("a remark")
        ctx.say("the rate is [high]")
        return {"rate": args.rate, "seed": ctx.seed, "out": ctx.out, "nothing": float("nan")}

    return app


@pytest.fixture
def app():
    return make_app()


def fail_with(error):
    app = App("tool")

    @app.command("fail", help="fail")
    def fail(ctx, args):
        raise error

    return app


# --- what is printed --------------------------------------------------------------------------------------------------


def test_text_and_tables_go_to_stdout_and_remarks_to_stderr(app, capsys):
    assert app.run(["show"]) == 0
    out, err = capsys.readouterr()
    assert "Rates [%]" in out
    assert "[bold]a" in out
    assert "0.5" in out
    assert "–" in out
    assert out.rstrip().endswith("the rate is [high]")
    assert "a remark" in err
    assert "outer" in err, "the bar goes to stderr when stdout is no terminal"
    assert "outer" not in out


def test_json_is_the_only_thing_on_stdout(app, capsys):
    assert app.run(["show", "--json", "--seed", "7", "--out", "there", "--rate", "0.25"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"rate": 0.25, "seed": 7, "out": "there", "nothing": None}
    assert "NaN" not in out
    assert "Rates [%]" in err
    assert "the rate is [high]" in err


def test_quiet_leaves_results_and_drops_bars_and_remarks(app, capsys):
    assert app.run(["show", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "the rate is [high]" in out
    assert err == ""


def test_common_options_may_stand_before_the_command(app, capsys):
    assert app.run(["--json", "--seed", "3", "show"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 3


def test_defaults_of_seed_and_out(capsys):
    assert make_app(seed=11).run(["show", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["seed"], result["out"]) == (11, "tool-out")


def test_a_command_without_result_prints_an_empty_document(capsys):
    app = App("tool")
    app.command("work", lambda ctx, args: None, help="work")
    assert app.run(["work", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


def test_an_exit_code_and_a_result_go_together(capsys):
    app = App("tool")

    @app.command("check", help="check")
    def check(ctx, args):
        ctx.finish({"ok": False})
        return 1

    assert app.run(["check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False}


def test_finishing_twice_is_a_fault_of_the_program(capsys):
    app = App("tool")

    @app.command("check", help="check")
    def check(ctx, args):
        ctx.finish({})
        return {}

    assert app.run(["check"]) == 1
    assert "finish() was called twice" in capsys.readouterr().err


def test_version_names_the_distribution(capsys):
    import numpy

    assert App("tool", distribution="numpy").run(["--version"]) == 0
    assert capsys.readouterr().out == f"tool {numpy.__version__}\n"


def test_help_lists_commands_and_common_options(app, capsys):
    app.command("ruler generate", "nowhere:run", help="write a task")
    assert app.run(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("a tool for tests", "show", "show numbers", "ruler", "--json", "--seed", "--out", "--quiet"):
        assert word in out
    assert app.run(["show", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("show numbers", "--rate", "--json", "--seed", "--out", "--quiet"):
        assert word in out


def test_commands_in_groups(app, capsys):
    app.command("ruler generate", lambda ctx, args: {"length": args.length}, help="write a task",
                arguments=lambda parser: parser.add_argument("--length", type=int))  # fmt: skip
    assert app.run(["ruler", "generate", "--length", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"length": 5}
    assert app.run(["ruler"]) == 2
    assert "ruler generate" in capsys.readouterr().err


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "error: no command given; choose from show (tool --help)"),
        (["shwo"], "error: unknown command 'shwo'; did you mean 'show'? (tool --help)"),
        (["zzz"], "error: unknown command 'zzz'; choose from show (tool --help)"),
        (["show", "--rat", "1"], "error: unknown option '--rat'; did you mean '--rate'? (tool show --help)"),
        (["show", "--rate", "x"], "error: argument --rate: invalid float value: 'x' (tool show --help)"),
        (["show", "--rate"], "error: argument --rate: expected one argument (tool show --help)"),
        (["show", "more"], "error: one argument too many: 'more' (tool show --help)"),
        (["show", "--seed", "-1"], "error: argument --seed: a seed is a whole number from 0 to 4294967295, got '-1'"),
        (["show", "--seed", "1.5"], "error: argument --seed: a seed is a whole number from 0 to 4294967295, got '1.5'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(app, capsys, arguments, said):
    assert app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("ratio 2 is outside\n[0, 1)"), "error: ratio 2 is outside [0, 1)"),
        (ValueError("ratio 2 is outside [0, 1)"), "error: ratio 2 is outside [0, 1)"),
        (TypeError("keys must be floating point, got int8"), "error: keys must be floating point, got int8"),
        (NotImplementedError("layer 3 has a latent cache"), "error: layer 3 has a latent cache"),
        (MissingExtra("install it with: pip install 'x[y]'"), "error: install it with: pip install 'x[y]'"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "error: No such file or directory: a.txt"),
        (PermissionError(13, "Permission denied", "/b"), "error: Permission denied: /b"),
        (OSError(28, "No space left on device"), "error: [Errno 28] No space left on device"),
    ],
)
def test_errors_that_speak_to_the_user_are_one_line_and_exit_code_2(capsys, error, said):
    assert fail_with(error).run(["fail"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", said + "\n")


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("k"), ZeroDivisionError("z"), OSError("socket")])
def test_faults_of_the_program_show_a_traceback_and_exit_code_1(capsys, error):
    assert fail_with(error).run(["fail"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert type(error).__name__ in err


def test_a_value_error_of_the_interpreter_or_a_library_is_a_fault_of_the_program(capsys):
    import numpy as np

    app = App("tool")
    app.command("builtin", lambda ctx, args: int("x"), help="h")
    app.command("call", lambda ctx, args: make_app(1, 2), help="h")
    app.command("library", lambda ctx, args: np.zeros((2, 3)).reshape(7), help="h")
    app.command("stdlib", lambda ctx, args: json.loads("{"), help="h")
    for name in ("builtin", "call", "library", "stdlib"):
        assert app.run([name]) == 1
        assert capsys.readouterr().err.startswith("Traceback")


def test_tracebacks_of_bad_input_on_demand(capsys, monkeypatch):
    monkeypatch.setenv("ICML26_TRACEBACK", "1")
    assert fail_with(ValueError("bad")).run(["fail"]) == 2
    assert capsys.readouterr().err.startswith("Traceback")


def test_with_json_an_error_leaves_stdout_empty(capsys):
    assert fail_with(ValueError("bad")).run(["fail", "--json"]) == 2
    assert capsys.readouterr() == ("", "error: bad\n")


def test_warnings_are_one_line(capsys):
    app = App("tool")
    app.command("warn", lambda ctx, args: warnings.warn("the file was cut", stacklevel=1), help="h")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert app.run(["warn"]) == 0
    assert capsys.readouterr().err == "warning: the file was cut\n"


def test_registering_twice_is_an_error(app):
    with pytest.raises(ValueError, match="'show' is registered already"):
        app.command("show", lambda ctx, args: None, help="again")


def test_an_output_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    app = App("tool")
    app.command("write", lambda ctx, args: {"path": ctx.out_file("a/b.txt")}, help="h")
    assert app.run(["write", "--out", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert "cannot make the output folder" in err
    assert "choose --out" in err
    assert app.run(["write", "--out", str(tmp_path / "new"), "--json"]) == 0
    assert (tmp_path / "new" / "a").is_dir()


# --- context ----------------------------------------------------------------------------------------------------------


def test_numbers_in_tables():
    assert [format_number(x) for x in (0.123456, 12345.678, 1234.56, 1e-7, 1234567.0, 0.0, 3, True, "x")] == [
        "0.1235", "12346", "1235", "1.000e-07", "1.235e+06", "0", "3", "yes", "x",
    ]  # fmt: skip


def test_a_table_checks_its_rows():
    with pytest.raises(ValueError, match="a row has 1 cells for 2 columns"):
        Context().table("t", ["a", "b"], [[1]])


def test_a_bar_outside_its_block_is_an_error():
    bar = Context(quiet=True).progress("x", 3)
    with pytest.raises(RuntimeError, match="inside its with block"):
        bar.advance()


def test_nested_bars_share_one_display_and_end_with_their_blocks():
    context = Context(quiet=True)
    with context.progress("a", 2) as outer:
        shared = context._progress
        with context.progress("b", 4) as inner:
            assert context._progress is shared
            inner.advance(3)
            assert [(task.description, task.completed, task.total) for task in shared.tasks] == [
                ("a", 0, 2),
                ("b", 3, 4),
            ]
        outer.update("c", completed=2)
        assert [(task.description, task.completed) for task in shared.tasks] == [("c", 2)]
    assert context._progress is None


# --- as a process -----------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
from icml26_shared.cli import App

app = App("tool", summary="a tool")
app.standard(demo="no_such_module:run", claims="no_such_module:CLAIMS", bench="no_such_module:run")

@app.command("noisy", help="print everywhere")
def noisy(ctx, args):
    print("stray text")
    os.write(1, b"from C\\n")
    os.system("echo from a child")
    ctx.say("said")
    return {"ok": True}

@app.command("long", help="work until stopped", arguments=lambda p: p.add_argument("--count", type=int, default=10**9))
def long(ctx, args):
    from icml26_shared.checkpoint import JsonlStore
    with JsonlStore(ctx.out_file("rows.jsonl"), key=("i",)) as store, ctx.progress("long", args.count) as bar:
        print("started", file=sys.stderr, flush=True)
        for i in range(args.count):
            if not store.done(i):
                time.sleep(0.01)
                store.append({"i": i})
            bar.advance()
    return {"rows": args.count}

@app.command("lines", help="print many lines")
def lines(ctx, args):
    for number in range(200_000):
        ctx.say(f"line {number}")

@app.command("colors", help="colours")
def colors(ctx, args):
    ctx.table("t", ["a"], [["ä≥"]])
    ctx.say("green", style="green")

@app.command("aside", help="remarks beside a bar")
def aside(ctx, args):
    import warnings
    from icml26_shared.console import progress
    with ctx.progress("outer", 10) as bar:
        with progress("inner of a library"):
            ctx.note("a remark")
            warnings.warn("look out")
            time.sleep(0.3)
        bar.advance(10)

@app.command("pipe", help="a broken pipe of its own")
def pipe(ctx, args):
    raise BrokenPipeError("a worker died")

if __name__ == "__main__":
    app.main()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "tool.py"
    path.write_text(PROGRAM)
    return path


def execute(program, *arguments, env=None, **options):
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}, **options
    )


def test_json_stays_clean_when_libraries_and_children_print(program):
    done = execute(program, "noisy", "--json")
    assert json.loads(done.stdout) == {"ok": True}
    for text in ("stray text", "from C", "from a child", "said"):
        assert text in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_a_state_that_the_same_command_resumes(program, tmp_path, number):
    # A shell starts what it puts into the background with SIGINT ignored, and that is inherited; a terminal does not.
    heeding = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    program_line = [sys.executable, str(program), "long", "--json", "--out", str(tmp_path)]
    command = [sys.executable, "-c", heeding, *program_line]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "started" not in process.stderr.readline():
        pass
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err.rstrip().endswith("interrupted; run the same command again to resume")
    assert "Traceback" not in err
    before = len((tmp_path / "rows.jsonl").read_text().splitlines()) - 1
    assert before > 0
    done = execute(program, "long", "--json", "--out", str(tmp_path), "--count", str(before + 3))
    assert json.loads(done.stdout) == {"rows": before + 3}
    indices = [json.loads(line)["i"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    assert indices == list(range(before + 3))


def test_a_closed_stdout_is_quiet(program):
    script = f"{shlex.quote(sys.executable)} '{program}' lines | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "line 0\n141\n"
    assert done.stderr == ""


def test_no_stdout_at_all_is_no_fault(program):
    for arguments in ("noisy", "noisy --json", "colors"):
        script = f"exec {shlex.quote(sys.executable)} '{program}' {arguments} >&-"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def test_a_broken_pipe_that_is_not_stdout_is_shown(program):
    done = execute(program, "pipe")
    assert done.returncode == 1
    assert "a worker died" in done.stderr


def test_help_and_errors_import_nothing_of_the_package(program):
    for arguments in (["--help"], ["demo", "--help"], ["claims", "--help"], ["bench", "--help"]):
        done = execute(program, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
    for option in ("--list", "--only", "--write", "--fresh"):
        assert option in execute(program, "claims", "--help").stdout
    done = execute(program, "demo")
    assert done.returncode == 1
    assert "no_such_module" in done.stderr


def on_a_terminal(program, *arguments, env):
    """Output of a command whose stdout and stderr are a terminal."""
    import pty

    main, side = pty.openpty()
    base = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments], stdin=side, stdout=side, stderr=side, env={**base, **env}
    )
    os.close(side)
    parts = []
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    os.close(main)
    assert process.wait(timeout=60) == 0
    return b"".join(parts).decode()


def test_no_color(program):
    colored = on_a_terminal(program, "colors", env={"TERM": "xterm-256color"})
    assert "\x1b[32mgreen" in colored
    without = on_a_terminal(program, "colors", env={"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "\x1b[32m" not in without
    assert "green" in without


def test_bars_and_remarks_share_a_terminal(program):
    shown = on_a_terminal(program, "aside", env={"TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "100"})
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", shown)]
    assert "a remark" in lines
    assert "warning: look out" in lines
    assert any(line.startswith("inner of a library") for line in lines)
    assert any(re.match(r"outer .* 10/10 ", line) for line in lines)


def test_a_bar_of_library_code_without_a_command_goes_to_stderr(capsys):
    with progress("converting", 2) as bar:
        bar.advance(2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "converting" in err


def test_a_terminal_without_unicode_is_no_fault(program):
    done = execute(program, "colors", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"})
    assert done.returncode == 0
    assert done.stderr == ""
    assert "green" in done.stdout
