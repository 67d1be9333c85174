"""Whether a package has the rooms and papers that every package of this workspace has.

`problems(member)` returns all findings of the checks below. Rooms that a package declares as still to come
(`[tool.icml26] pending = ["bench.py"]` in its pyproject.toml) may be missing, and must not be there; such a package
cannot be released.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from house import stubs
from workspace import Member

ROOMS = (
    "__init__.py",
    "py.typed",
    "baselines.py",
    "bench.py",
    "claims.py",
    "cli.py",
    "demo.py",
    "integrations/__init__.py",
    "kernels/__init__.py",
)
PAPERS = ("pyproject.toml", "README.md", "CHANGELOG.md", "CITATION.cff")
TESTS = {"cli.py": "tests/test_cli.py", "kernels/__init__.py": "tests/test_kernels.py"}
README_SECTIONS = ("Problem", "Install", "Use", "CLI", "Results", "Limits", "Citation")
PLACEHOLDER = "TO WRITE"
PUBLIC_NAMES = range(3, 9)
LONGEST_FILE = 400
LONGEST_FUNCTION = 80
SHORTEST_SECTION = 40  # characters; below that a section says nothing


def problems(member: Member) -> list[str]:
    """What is missing or wrong, one line each; empty for a package in order."""
    checks: tuple[Callable[[Member], list[str]], ...] = (
        rooms,
        pyproject,
        readme,
        changelog,
        citation,
        public_names,
        no_stubs,
        sizes,
        tests_assert,
    )
    if not (member.source / "__init__.py").is_file():
        checks = (rooms, pyproject)  # the others read the version there
    return [f"{member.name}: {problem}" for check in checks for problem in check(member)]


def rooms(member: Member) -> list[str]:
    """Files and folders, a concept module, and the tests that go with rooms."""
    found = [f"{name} is missing" for name in PAPERS if not (member.folder / name).is_file()]
    for name in ROOMS:
        there = (member.source / name).is_file()
        if not there and name not in member.pending:
            found.append(f"src/{member.module}/{name} is missing")
        if there and name in member.pending:
            found.append(f"src/{member.module}/{name} is declared as pending but is there; take it off the list")
    unknown = sorted(set(member.pending) - set(ROOMS) | ({"__init__.py", "py.typed", "cli.py"} & set(member.pending)))
    found += [f"pyproject.toml: {name!r} cannot be pending" for name in unknown]
    for name, test in TESTS.items():
        if name not in member.pending and not (member.folder / test).is_file():
            found.append(f"{test} is missing")
    known = {Path(name).parts[0] for name in ROOMS} | {path.name for path in member.source.glob("integrations/*.py")}
    if not any(path.name not in known and path.suffix == ".py" for path in member.source.glob("*.py")):
        found.append("there is no module with the method: one file a concept beside __init__.py")
    return found


def pyproject(member: Member) -> list[str]:
    """Metadata that an index shows, lower bounds, and one console script called like the package, or its short name."""
    project, found = member.project, []
    if project["name"] != member.folder.name:
        found.append(f"pyproject.toml: the name {project['name']!r} is not the folder's name {member.folder.name!r}")
    for field in ("description", "readme", "license", "authors", "keywords", "classifiers"):
        if not project.get(field) or PLACEHOLDER in str(project[field]):
            found.append(f"pyproject.toml: [project] {field} is missing or still to be written")
    if project.get("requires-python") != ">=3.11":
        found.append("pyproject.toml: requires-python must be '>=3.11'")
    main = f"{member.module}.cli:main"
    if project.get("scripts", {}) != dict.fromkeys((project["name"], *member.short_names), main):
        found.append(f"pyproject.toml: the one console script is {project['name']} = '{main}'")
    requirements = list(project.get("dependencies", ()))
    requirements += [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    for requirement in requirements:
        bare = requirement.partition(";")[0]
        if ">=" not in bare and "==" not in bare and not bare.startswith((f"{project['name']}[", "icml26-shared[")):
            found.append(f"pyproject.toml: {requirement!r} has no lower bound")
    return found


def readme(member: Member) -> list[str]:
    """The sections every README has, in order, each with something in it."""
    path = member.folder / "README.md"
    if not path.is_file():
        return []  # rooms() says so
    sections = _sections(path.read_text("utf-8"))
    found = [f"README.md has no section '## {name}'" for name in README_SECTIONS if name not in sections]
    present = [name for name in sections if name in README_SECTIONS]
    if present != [name for name in README_SECTIONS if name in present]:
        found.append(f"README.md: the sections stand in the order {', '.join(README_SECTIONS)}")
    for name in present:
        if len(sections[name].strip()) < SHORTEST_SECTION or PLACEHOLDER in sections[name]:
            found.append(f"README.md: the section '{name}' is still to be written")
    if "Use" in sections and "```python" not in sections["Use"]:
        found.append("README.md: the section 'Use' has no Python example")
    if "Install" in sections and f"pip install {member.name}" not in sections["Install"].replace("'", ""):
        found.append(f"README.md: the section 'Install' does not say pip install {member.name}")
    if "Results" in sections and "claims.py" not in member.pending:
        found += [
            f"README.md: 'Results' has no <!-- claims:{end} -->"
            for end in ("begin", "end")
            if f"<!-- claims:{end} -->" not in sections["Results"]
        ]
    if "Citation" in sections and not re.search(r"@\w+\{", sections["Citation"]):
        found.append("README.md: the section 'Citation' has no BibTeX entry of the paper")
    return found


def changelog(member: Member) -> list[str]:
    path = member.folder / "CHANGELOG.md"
    if path.is_file() and not re.search(
        rf"^## \[?{re.escape(member.version)}\b", path.read_text("utf-8"), re.MULTILINE
    ):
        return [f"CHANGELOG.md has no section '## {member.version}'"]
    return []


def citation(member: Member) -> list[str]:
    """CITATION.cff: the software, its version, and the paper as the preferred citation."""
    path = member.folder / "CITATION.cff"
    if not path.is_file():
        return []
    text, found = path.read_text("utf-8"), []
    for field in ("cff-version", "message", "title", "authors", "license", "preferred-citation"):
        if not re.search(rf"^{field}:", text, re.MULTILINE):
            found.append(f"CITATION.cff has no field {field}")
    if PLACEHOLDER in text:
        found.append("CITATION.cff is still to be written")
    version = re.search(r"^version:\s*[\"']?([^\"'\s]+)", text, re.MULTILINE)
    if version is None or version[1] != member.version:
        found.append(f"CITATION.cff must say version: {member.version}")
    return found


def public_names(member: Member) -> list[str]:
    """`__all__` names the 3 to 8 public names."""
    tree = _parse(member.source / "__init__.py")
    assigned = dict(_assignments(tree)) if tree else {}
    names = _literal_names(assigned.get("__all__"), assigned)
    if names is None:
        return ["__init__.py has no __all__ written as a list"]
    count = len(names - {"__version__"})
    if count in PUBLIC_NAMES:
        return []
    return [f"__init__.py offers {count} public names; it should be {PUBLIC_NAMES[0]} to {PUBLIC_NAMES[-1]}"]


def no_stubs(member: Member) -> list[str]:
    return [
        f"{path.relative_to(member.folder)}:{line}: {problem}"
        for path in sorted(member.source.rglob("*.py"))
        for line, problem in stubs.stubs(ast.parse(path.read_text("utf-8")))
    ]


def sizes(member: Member) -> list[str]:
    """No file over 400 lines beside blank ones, no function longer than a screen or two."""
    found = []
    for path in sorted(member.source.rglob("*.py")):
        text = path.read_text("utf-8")
        lines = sum(1 for line in text.splitlines() if line.strip())
        if lines > LONGEST_FILE:
            found.append(
                f"{path.relative_to(member.folder)} has {lines} lines beside blank ones; split it at {LONGEST_FILE}"
            )
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - _code_starts(node) + 1
                if length > LONGEST_FUNCTION:
                    where = f"{path.relative_to(member.folder)}:{node.lineno}"
                    found.append(f"{where}: {node.name} has {length} lines of code; at most {LONGEST_FUNCTION}")
    return found


def tests_assert(member: Member) -> list[str]:
    """Every test function checks something, and there are tests at all."""
    files = sorted((member.folder / "tests").rglob("test_*.py"))
    found = [] if files else ["tests/ has no test_*.py"]
    return found + [
        f"{path.relative_to(member.folder)}:{line}: {problem}"
        for path in files
        for line, problem in stubs.tests_without_assertion(ast.parse(path.read_text("utf-8")))
    ]


def _sections(text: str) -> dict[str, str]:
    """Second-level headings and what stands under each; headings inside code fences do not count."""
    sections: dict[str, str] = {}
    current, fenced = "", False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            current = line[3:].strip()
            sections[current] = ""
        elif current:
            sections[current] += line + "\n"
    return sections


def _code_starts(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line after the docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
    return body[0].lineno


def _parse(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text("utf-8")) if path.is_file() else None


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _literal_names(node: ast.expr | None, assigned: dict[str, ast.expr]) -> set[str] | None:
    """The strings of a list, tuple or dict (its keys), `*NAME` of such a constant among them; None if it is not one."""
    if isinstance(node, ast.Name):
        return _literal_names(assigned.get(node.id), assigned)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"sorted", "list", "tuple"} and node.args:
        return _literal_names(node.args[0], assigned)
    if not isinstance(node, ast.List | ast.Tuple | ast.Dict):
        return None
    names: set[str] = set()
    for element in node.keys if isinstance(node, ast.Dict) else node.elts:
        if isinstance(element, ast.Constant) and isinstance(element.value, str):
            names.add(element.value)
        elif isinstance(element, ast.Starred) and (more := _literal_names(element.value, assigned)) is not None:
            names |= more
        else:
            return None
    return names
