"""Which module may import which.

Rooms of a package, by the first part of a module's path in it:

- entry rooms `integrations`, `eval`, `cli`, `claims`, `bench`, `demo` (and modules named after one, as `cli_eval` is):
  may import everything of their own package, and what its extras declare, though the latter only inside functions
  (`integrations` and `eval`, which the user imports, at once too: a host's class cannot be subclassed otherwise);
- a module named like one of `integrations`, such as `NAME.verl`, is that integration's short name and belongs to it;
- `kernels`: imports only `kernels`, and Triton; for type checkers the method too;
- `__init__`: may name what lies in `integrations`, but only inside a function or for type checkers;
- every other module is the method: imports only the method and `kernels`, and of other distributions only what the
  package declares as a hard dependency.

Nobody imports another package. `icml26_shared` imports no package.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from workspace import SHARED, Member

ENTRY_ROOMS = ("integrations", "eval", "cli", "claims", "bench", "demo")
HOST_ROOMS = ("integrations", "eval")  # may import a host library at once
CLOSED_ROOMS = ("integrations", "cli")  # nothing imports these
SHARED_MODULE = SHARED.replace("-", "_")


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, with where and when it is imported."""

    file: Path
    line: int
    target: str
    deferred: bool  # inside a function: runs when called, not on import
    typing_only: bool  # under `if TYPE_CHECKING:`

    def says(self, problem: str) -> str:
        return f"{self.file}:{self.line}: imports {self.target}: {problem}"


def violations(member: Member, packages: set[str]) -> list[str]:
    """Every import of `member` that the doors do not allow; `packages` are the module names of all paper packages."""
    found = []
    for file in sorted(member.source.rglob("*.py")):
        for item in imports(file, member.source.parent):
            problem = _problem(item, member, packages)
            if problem:
                found.append(item.says(problem))
    return found


def imports(file: Path, base: Path) -> Iterator[Import]:
    """All imports of `file`, whose absolute module names start under the folder `base`."""
    parts = list(file.relative_to(base).with_suffix("").parts)
    package = parts[:-1]  # of a module and of an `__init__` alike: what one dot means
    yield from _walk(ast.parse(file.read_text("utf-8")), file, base, package, deferred=False, typing_only=False)


def _walk(
    node: ast.AST, file: Path, base: Path, package: list[str], *, deferred: bool, typing_only: bool
) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(file, node.lineno, alias.name, deferred, typing_only)
    elif isinstance(node, ast.ImportFrom):
        for target in _from_targets(node, base, package):
            yield Import(file, node.lineno, target, deferred, typing_only)
    elif isinstance(node, ast.Call) and _is_dynamic_import(node):
        argument = node.args[0]
        assert isinstance(argument, ast.Constant)  # by _is_dynamic_import
        yield Import(file, node.lineno, _absolute(str(argument.value), package), deferred, typing_only)
    inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(node, ast.If) and _is_type_checking(node.test) and child in node.body
        yield from _walk(child, file, base, package, deferred=inside, typing_only=typing_only or guarded)


def _from_targets(node: ast.ImportFrom, base: Path, package: list[str]) -> list[str]:
    """`from a.b import c` means module a.b.c where there is one, else a.b."""
    anchor = package[: len(package) - node.level + 1] if node.level else []
    module = ".".join([*anchor, *([node.module] if node.module else [])])
    return [name if _is_module(base, name := f"{module}.{alias.name}") else module for alias in node.names]


def _is_module(base: Path, dotted: str) -> bool:
    path = base.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _is_dynamic_import(node: ast.Call) -> bool:
    """`importlib.import_module("x")`, `__import__("x")` and `require("x", ...)` with a literal name."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    literal = bool(node.args) and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    return literal and name in {"import_module", "__import__", "require"}


def _absolute(name: str, package: list[str]) -> str:
    dots = len(name) - len(name.lstrip("."))
    return ".".join([*package[: len(package) - dots + 1], name[dots:]]) if dots else name


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def room(dotted: str, member: Member) -> str:
    """The room of a module of `member`: an entry room, `kernels`, `__init__` or `method`."""
    first = dotted.removeprefix(member.module).lstrip(".").partition(".")[0]
    if first in ("", "__init__"):
        return "__init__"
    if first == "__main__":
        return "cli"
    if any((member.source / "integrations" / name).exists() for name in (first, f"{first}.py")):
        return "integrations"
    for name in (*ENTRY_ROOMS, "kernels"):
        if first == name or first.startswith(f"{name}_"):
            return name
    return "method"


def _problem(item: Import, member: Member, packages: set[str]) -> str:
    top = item.target.partition(".")[0]
    here = ".".join(item.file.relative_to(member.source.parent).with_suffix("").parts)
    if top in packages - {member.module}:
        return f"{'the shared package' if member.name == SHARED else 'a package'} imports no other package"
    if member.name == SHARED:
        return ""
    if top == member.module:
        return _problem_inside(item, room(here, member), room(item.target, member))
    if top in sys.stdlib_module_names or top == SHARED_MODULE:
        return ""
    return _problem_outside(item, room(here, member), top, member)


def _problem_inside(item: Import, here: str, there: str) -> str:
    if here in ENTRY_ROOMS:
        return ""
    if here == "kernels":
        allowed = there == "kernels" or (there == "method" and item.typing_only)
        return "" if allowed else f"kernels import only kernels, not {there}"
    if here == "__init__":
        if there in CLOSED_ROOMS and not (item.deferred or item.typing_only):
            return f"{there} must load only when used: import it inside __getattr__"
        return ""
    if there in ENTRY_ROOMS:
        return f"a method module imports only the method and kernels, not {there}"
    if there == "__init__":
        return "import the module that defines the name, not the package itself"
    return ""


def _problem_outside(item: Import, here: str, top: str, member: Member) -> str:
    hard, optional = hard_modules(member), optional_modules(member)
    if top in hard:
        return ""
    if here == "kernels" and top == "triton":
        return ""
    if here not in ENTRY_ROOMS:
        return f"only hard dependencies belong into {here}; declared are: {', '.join(sorted(hard))}"
    if top not in optional:
        return "neither a dependency nor an extra of this package declares it"
    if here not in HOST_ROOMS and not (item.deferred or item.typing_only):
        return "an optional library is imported where it is used, inside the function"
    return ""


def hard_modules(member: Member) -> set[str]:
    """Module names of the declared dependencies."""
    return _modules(tuple(member.project.get("dependencies", ())), member)


def optional_modules(member: Member) -> set[str]:
    """Module names of everything that the extras declare beyond the package and the shared one themselves."""
    extras = member.project.get("optional-dependencies", {})
    declared = _modules(tuple(line for lines in extras.values() for line in lines), member)
    return declared - {member.module, SHARED_MODULE}


def _modules(requirements: tuple[str, ...], member: Member) -> set[str]:
    modules: set[str] = set()
    for requirement in requirements:
        found = re.match(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?", requirement)
        if found is None:
            raise ValueError(f"{member.name}: {requirement!r} is not a requirement")
        name = _normal(found[1])
        modules |= {name.replace("-", "_"), *_modules_of_distribution().get(name, ())}
        extras = [extra.strip() for extra in (found[2] or "").split(",") if extra.strip()]
        if name == SHARED and extras:
            modules |= _modules(_shared_extras(member, tuple(extras)), member)
    return modules


def _shared_extras(member: Member, extras: tuple[str, ...]) -> tuple[str, ...]:
    root = member.folder.parent.parent if member.folder.parent.name == "packages" else member.folder.parent
    table = Member(root / "shared").project["optional-dependencies"]
    return tuple(line for extra in extras for line in table.get(extra, ()))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def _modules_of_distribution() -> dict[str, tuple[str, ...]]:
    """Installed distributions and the modules they bring: scikit-learn brings sklearn."""
    table: dict[str, list[str]] = {}
    for module, names in metadata.packages_distributions().items():
        for name in names:
            table.setdefault(_normal(name), []).append(module)
    return {name: tuple(modules) for name, modules in table.items()}
