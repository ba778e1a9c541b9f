"""Only `anatomy` and `kinds` know what a layer consists of: elsewhere no half, item or window is named, and nobody counts halves.

A new kind of layer is then a new section, and no search through the package. What may be written all the same is listed with its
reason; an entry that is no longer needed must go.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from megatron_lynx.anatomy import HALVES, ITEMS, LATENT
from tests.test_ranks_of_packages import PACKAGE

TABLES = (
    "anatomy/",
    "kinds/",
    "apply/kinds.py",
    "apply/transformer_engine.py",
    "stock/setting.py",
)
"""What Megatron and Transformer Engine call their things, and the anatomy itself."""

EXCEPTIONS = {
    ("stock/legality.py", "'mlp'"): "one of Megatron's `recompute_modules`, which are not our sections",
    ("launch_arguments/today.py", "'mlp'"): "one of Megatron's captured modules, which are not our sections",
    ("plan/rule.py", "'mlp'"): "a value of the key `checkpoint`, as plan files spell it",
    ("solver/options.py", "'rotary'"): "the item whose code asks the host for lengths of packed sequences",
}
"""(file, what is written there): why it is no half, item or window."""

LATENT_ITEMS = {name for section in LATENT.values() for name in section.names}
WINDOW = re.compile(rf"\b(fwd|bwd)\.({'|'.join(HALVES)})")
NAME_ENDS = {"linear_", "_bda", "layernorm"}
"""Parts of items' names that once told what an item is for."""
NO_HALVES = ("rank", "micro")
"""Numbers that may be even or odd: neighbours of a rank, sizes of micro-batches."""


def test_nobody_else_names_halves_items_and_windows() -> None:
    assert sorted(set(all_findings()) - EXCEPTIONS.keys()) == []


def test_exceptions_are_needed_and_few() -> None:
    assert sorted(EXCEPTIONS.keys() - set(all_findings())) == []
    assert len(EXCEPTIONS) <= 12


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('half == "mlp"', ["'mlp'"]),
        ('layer.recompute("linear_fc1")', ["'linear_fc1'"]),
        ('window = f"bwd.mlp.{n}"', ["'bwd.mlp.'"]),
        ('windows = {"bwd.attention.0+1"}', ["'bwd.attention.0+1'"]),
        ('item.startswith("linear_")', ["startswith('linear_')"]),
        ('item.endswith(("_bda", "layernorm"))', ["endswith('_bda')", "endswith('layernorm')"]),
        ('f"{half}_bda" in recomputation', ["f'{...}_bda'"]),
        ("first if number % 2 else second", ["% 2"]),
        ("hosts[rank % 2]", []),
        ("zip(halves[::2], halves[1::2])", ["[::2]", "[::2]"]),
        ('def f():\n    """The mlp half, bwd.mlp.0, `linear_fc1`."""', []),
        ('model = {"norm": "layernorm"}', []),
        ('HEADER = f"{half} of {count % 20}"', []),
    ],
)
def test_what_is_found(code: str, what: list[str]) -> None:
    assert list(findings(ast.parse(code))) == what


def all_findings() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith(TABLES):
            yield from ((file, what) for what in findings(ast.parse(path.read_text())))


def findings(tree: ast.AST) -> Iterator[str]:
    """What is written in a file beside its docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in (*HALVES, *ITEMS, *LATENT_ITEMS) or WINDOW.search(node.value):
                yield repr(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
            yield from (f"{node.func.attr}({name!r})" for name in texts_in(node.args) if name in NAME_ENDS)
        elif isinstance(node, ast.JoinedStr) and any(name in NAME_ENDS for name in texts_in(node.values)):
            yield f"f'{''.join(part.value if isinstance(part, ast.Constant) else '{...}' for part in node.values)}'"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and is_two(node.right):
            yield from () if isinstance(node.left, ast.Name) and node.left.id in NO_HALVES else ("% 2",)
        elif isinstance(node, ast.Slice) and is_two(node.step):
            yield "[::2]"


def texts_in(nodes: list[ast.expr]) -> list[str]:
    constants = (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Constant))
    return [part.value for part in constants if isinstance(part.value, str)]


def is_two(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == 2
