"""Puts a fault into the source of one function, which is found by its name, at a place that is found by its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator


class DoesNotApply(Exception):
    """The source is not what an entry of the table was written for."""


def broken(source: str, name: str, old: str, new: str) -> str:
    """The source of a module with `new` in place of `old` within what is called `name` (`Waits._window`, `claims.in_window`).

    `old` is a part of one line, or several whole lines; then `new` is indented as they are. It must be there exactly once.
    """
    lines = source.splitlines()
    begin, end = _lines_of(source, name)
    old_lines, new_lines = old.strip("\n").splitlines(), new.strip("\n").splitlines() or [""]
    found = [*_blocks(lines[begin:end], old_lines)] or [*_parts(lines[begin:end], old_lines)]
    if len(found) != 1:
        raise DoesNotApply(f"`{old.strip()}` is {len(found)} times in {name}, needed once")
    at, size, before, behind = found[0]
    lines[begin + at : begin + at + size] = [before + line for line in new_lines[:-1]] + [before + new_lines[-1] + behind]
    return "\n".join(lines) + "\n"


def _blocks(lines: list[str], wanted: list[str]) -> Iterator[tuple[int, int, str, str]]:
    """Where these whole lines are: (first line, how many, what is before them, what is behind them)."""
    for at in range(len(lines) - len(wanted) + 1):
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        if all(line == (indent + one if one else "") for line, one in zip(lines[at:], wanted, strict=False)):
            yield at, len(wanted), indent, ""


def _parts(lines: list[str], wanted: list[str]) -> Iterator[tuple[int, int, str, str]]:
    """The same for a part of one line."""
    if len(wanted) == 1:
        for at, line in enumerate(lines):
            if line.count(wanted[0]) == 1:
                yield at, 1, *line.split(wanted[0])  # type: ignore[misc]


def _lines_of(source: str, name: str) -> tuple[int, int]:
    """The lines of a function, class or assigned name, counted from 0, decorators included."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        named = [one for one in getattr(node, "body", ()) if part in _names(one)]
        named = named or [one for one in ast.walk(node) if one is not node and part in _names(one)]
        if len(named) != 1:
            raise DoesNotApply(f"{name} is {len(named)} times in this file, needed once")
        [node] = named
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])  # type: ignore[attr-defined]
    return first - 1, node.end_lineno  # type: ignore[attr-defined]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [one.id for one in targets if isinstance(one, ast.Name)]
    return []
