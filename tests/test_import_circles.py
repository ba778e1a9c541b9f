"""No two modules need each other, not even for a type: whatever is read first can be understood without the other.

Imports under TYPE_CHECKING count. Imports inside functions do not: they keep `--help` fast, or wait for
a library that not every machine has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_ranks_of_packages import PACKAGE, modules


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: set(imported_by(module)) for module in modules()}
    assert [sorted(circle) for circle in circles(graph)] == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}, "f": {"f"}}
    assert circles(graph) == [frozenset("abc"), frozenset("f")]


def imported_by(module: str) -> Iterator[str]:
    """Our modules that a module imports outside of functions."""
    path = PACKAGE / module.replace(".", "/")
    known = set(modules())
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in outside_functions(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_lynx"):
            source = node.module.removeprefix("megatron_lynx").removeprefix(".")  # type: ignore[union-attr]
            for alias in node.names:
                name = f"{source}.{alias.name}".removeprefix(".")
                yield name if name in known else source
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("megatron_lynx.") for alias in node.names if alias.name.startswith("megatron_lynx.")
            )


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from outside_functions(node)


def circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """The largest sets of modules of which each can be reached from each other one."""
    reached = {module: _reached(graph, module) for module in graph}
    found = {
        frozenset(other for other in reached[module] if module in reached[other]) for module in graph if module in reached[module]
    }
    return sorted(found, key=sorted)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        if (module := ahead.pop()) not in found and module in graph:
            found.add(module)
            ahead += graph[module]
    return found
