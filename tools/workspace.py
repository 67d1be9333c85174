"""What the workspace consists of: its members, their names, versions and extras. Standard library only."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARED = "icml26-shared"

# Extras whose host library cannot live in the main environment, because it pins what the others need newer.
SEPARATE_EXTRAS = frozenset({"verl", "vllm"})


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace: `shared` or `packages/NAME`."""

    folder: Path

    @functools.cached_property
    def pyproject(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text("utf-8"))

    @property
    def project(self) -> dict[str, Any]:
        table: dict[str, Any] = self.pyproject["project"]
        return table

    @property
    def name(self) -> str:
        name: str = self.project["name"]
        return name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module

    @property
    def version(self) -> str:
        text = (self.source / "__init__.py").read_text("utf-8")
        found = re.search(r"^__version__\s*(?::\s*[\w.\[\]]+\s*)?=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"error: {self.source}/__init__.py has no line __version__ = 'X.Y.Z'")
        return found[1]

    @property
    def main_extras(self) -> tuple[str, ...]:
        """Extras that the main environment holds: all but SEPARATE_EXTRAS and `[tool.icml26] separate-extras`."""
        separate = SEPARATE_EXTRAS | set(self._house_table.get("separate-extras", ()))
        return tuple(extra for extra in self.project.get("optional-dependencies", {}) if extra not in separate)

    @property
    def explained_spills(self) -> dict[str, str]:
        """Kernels that spill registers, as "NAME TARGET", with the reason: `[tool.icml26.spills]`."""
        return dict(self._house_table.get("spills", {}))

    @property
    def short_names(self) -> tuple[str, ...]:
        """A second name of the console script, for typing: `[tool.icml26] short-name`."""
        short = self._house_table.get("short-name")
        return () if short is None else (short,)

    @property
    def pending(self) -> tuple[str, ...]:
        """Rooms declared as still to come, in `[tool.icml26] pending`; a package with any is not released."""
        return tuple(self._house_table.get("pending", ()))

    @property
    def _house_table(self) -> dict[str, Any]:
        table: dict[str, Any] = self.pyproject.get("tool", {}).get("icml26", {})
        return table

    def requirement(self, extras: tuple[str, ...]) -> str:
        """The member as uv and pip take it from the root of the workspace: `./packages/NAME[extra,...]`."""
        folder = self.folder.relative_to(self.folder.parents[0 if self.name == SHARED else 1])
        return f"./{folder}[{','.join(extras)}]" if extras else f"./{folder}"


def packages(root: Path = ROOT) -> list[Member]:
    """The paper packages, by name."""
    return [Member(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]


def members(root: Path = ROOT) -> list[Member]:
    """All distributions: the shared one first."""
    return [Member(root / "shared"), *packages(root)]


def member(name: str, root: Path = ROOT) -> Member:
    """The member called `name` (`shared` is accepted for the shared distribution); SystemExit if there is none."""
    for candidate in members(root):
        if name in (candidate.name, candidate.folder.name):
            return candidate
    known = ", ".join(candidate.name for candidate in members(root))
    raise SystemExit(f"error: no package called {name!r}; there are: {known}")
