"""Functions that only pretend: bodies that do nothing, and tests that check nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DECLARATIONS = {"abstractmethod", "overload"}
NO_OPS = ("No-op", "Nothing", "Do nothing", "Does nothing")  # how the docstring of a no-op begins


def stubs(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`(line, problem)` of each function whose body is only `pass`, `...`, a docstring or `raise NotImplementedError`.

    Not stubs: abstract methods, overloads, methods of a Protocol; a documented no-op (its docstring begins as
    in NO_OPS); a documented refusal (NotImplementedError with a message, and a docstring that names the error).
    """
    for node, owner in _functions(tree, None):
        if _is_declaration(node, owner):
            continue
        doc = ast.get_docstring(node) or ""
        body = [statement for statement in node.body if not _is_constant(statement)]
        if all(isinstance(statement, ast.Pass) for statement in body):
            if not doc.startswith(NO_OPS):
                yield node.lineno, f"{node.name} does nothing; write it, or say 'No-op: why' in its docstring"
        elif len(body) == 1 and _raises_not_implemented(body[0]):
            documented = _has_message(body[0]) and "NotImplementedError" in doc
            if not documented:
                yield node.lineno, f"{node.name} only raises NotImplementedError; a refusal is documented and says why"


def tests_without_assertion(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`(line, problem)` of each test without `assert`, `pytest.raises` or `warns`, or a call named like a check.

    A call of a function of the same module that does check counts.
    """
    functions = [node for node, _ in _functions(tree, None)]
    checking: set[str] = set()
    while True:  # until no further function is found that checks by calling one that does
        found = {node.name for node in functions if any(_checks(inner, checking) for inner in ast.walk(node))}
        if found == checking:
            break
        checking = found
    for node in functions:
        if node.name.startswith("test_") and node.name not in checking:
            yield node.lineno, f"{node.name} asserts nothing"


def _functions(node: ast.AST, owner: ast.ClassDef | None) -> Iterator[tuple[FunctionNode, ast.ClassDef | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield child, owner
        yield from _functions(child, child if isinstance(child, ast.ClassDef) else owner)


def _is_declaration(node: FunctionNode, owner: ast.ClassDef | None) -> bool:
    names = {getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in node.decorator_list}
    bases = {_base_name(base) for base in owner.bases} if owner else set()
    return bool(names & DECLARATIONS) or "Protocol" in bases


def _base_name(base: ast.expr) -> str:
    inner = base.value if isinstance(base, ast.Subscript) else base
    return str(getattr(inner, "attr", getattr(inner, "id", "")))


def _is_constant(statement: ast.stmt) -> bool:
    """A docstring or `...`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _raises_not_implemented(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Raise) or statement.exc is None:
        return False
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return getattr(raised, "id", "") == "NotImplementedError"


def _has_message(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call) and bool(statement.exc.args)


def _checks(node: ast.AST, checking: set[str]) -> bool:
    if isinstance(node, ast.Assert):
        return not _is_always_true(node.test)
    if not isinstance(node, ast.Call):
        return False
    name = str(getattr(node.func, "attr", getattr(node.func, "id", "")))
    named = name in {"raises", "warns", "fail"} or any(word in name for word in ("assert", "check", "expect"))
    return named or name in checking


def _is_always_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)
