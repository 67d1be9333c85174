import subprocess
import sys

import pytest

from icml26_shared.errors import MissingExtra, UserError, require


def test_require_returns_the_module_that_was_named():
    import xml.dom

    assert require("xml.dom", "any") is xml.dom


def test_require_names_the_extra_in_a_command_that_installs_it():
    with pytest.raises(MissingExtra) as caught:
        require("no_such_library.part", "manifoldkv[transformers]")
    assert str(caught.value) == (
        "this needs 'no_such_library', which is not installed; install it with: pip install 'manifoldkv[transformers]'"
    )
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "no_such_library.part"


def test_require_takes_the_distribution_from_the_caller():
    source = "from icml26_shared.errors import require\ndef load(): return require('no_such_library', 'plots')\n"
    scope = {"__name__": "stream_spr.figures"}
    exec(source, scope)  # noqa: S102 - a module of another name, without a file
    with pytest.raises(MissingExtra, match=r"pip install 'stream-spr\[plots\]'"):
        scope["load"]()


def test_require_takes_the_distribution_as_given():
    with pytest.raises(MissingExtra, match=r"'maxrl\[trl\]'"):
        require("no_such_library", "trl", distribution="maxrl")


def test_require_passes_on_what_is_broken_inside_an_installed_library(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import its_own_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_own_missing_dependency") as caught:
        require("half_installed", "x")
    assert not isinstance(caught.value, MissingExtra)


def test_user_error_is_no_value_error():
    assert not issubclass(UserError, ValueError)


def test_importing_the_package_and_its_command_line_loads_nothing_heavy():
    code = (
        "import sys, icml26_shared, icml26_shared.cli, icml26_shared.errors\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'rich', 'scipy', 'pandas', 'filelock', 'psutil'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
