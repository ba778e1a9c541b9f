"""The table of faults: one entry says what is broken, and which tests see it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, model_validator

from megatron_lynx.validation import Part, validated
from megatron_lynx.yaml_file import read_yaml
from tests.faults.edit import DoesNotApply, broken

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_lynx"
FILES = Path(__file__).parent / "table"


class Fault(Part):
    """One entry."""

    fault: str
    """What is broken, in a few words: its name in the table."""
    place: str
    """Where: a file of the package, or from `tests/` on, without `.py` and a name in it, `runtime/engine::Engine._window`."""
    old: str
    """What that function says: a part of one line, or whole lines."""
    new: str
    """What it says with the fault."""
    why: str
    """What becomes of somebody who has this fault."""
    found_by: tuple[str, ...] = ()
    """The tests that must fail, as pytest names them: each alone has to see the fault."""
    fails_with: str = "AssertionError"
    """The error with which they fail."""
    equivalent: str = ""
    """Why nobody can see it, where that is so; then no test is named."""
    unseen_before: bool = False
    """Whether it was among the faults that the suite of 23 November 2026 did not see."""

    @model_validator(mode="after")
    def _found_or_equivalent(self) -> Fault:
        if bool(self.found_by) == bool(self.equivalent):
            raise ValueError("needed: either tests that find it, or why it is equivalent")
        return self

    @property
    def file(self) -> str:
        file = self.place.partition("::")[0]
        return f"{file}.py" if file.startswith("tests/") else f"{PACKAGE}/{file}.py"

    def put_into(self, root: Path) -> str:
        """The source of the file with the fault. Raises `DoesNotApply`, which names the fault and where such a function is."""
        path, name = root / self.file, self.place.partition("::")[2]
        try:
            if not path.is_file():
                raise DoesNotApply(f"there is no {self.file}")
            source = broken(path.read_text(), name, self.old, self.new)
            ast.parse(source)
        except (DoesNotApply, SyntaxError) as error:
            elsewhere = ", ".join(_files_with(root, name.rpartition(".")[2])) or "nowhere"
            raise DoesNotApply(f"{self.fault}: {self.place}: {error} (a function of that name: {elsewhere})") from None
        return source


class _File(Part):
    """One file of the table."""

    faults: tuple[Fault, ...] = Field(min_length=1)


def faults() -> list[Fault]:
    """All entries, by file and in the order in which they stand there."""
    return [fault for path in sorted(FILES.glob("*.yaml")) for fault in validated(_File, read_yaml(path), path).faults]


def _files_with(root: Path, name: str) -> Iterator[str]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if f"def {name}(" in path.read_text():
            yield str(path.relative_to(root / PACKAGE).with_suffix(""))
