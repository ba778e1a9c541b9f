"""docs/architecture.md and the pages of the runtime and the planner are held to the code: every cited rule is there, and every
module that they name exists. The map of packages is generated from docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_lynx"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
WALKS = [path for path in (ROOT / "docs" / f"{name}.md" for name in ("runtime", "planner")) if path.exists()]
MAP = (ROOT / "docs" / "generated" / "packages.md").read_text()
CITED = re.compile(r"\bR(1?\d)\b(?!\w)")


def rules() -> list[int]:
    return [int(number) for number in re.findall(r"^\*\*R(\d+)\. ", TEXT, re.MULTILINE)]


def packages() -> list[Path]:
    """Every folder with modules, the top one aside."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")} - {PACKAGE}
    return sorted(folder for folder in folders if "__pycache__" not in folder.parts)


def sources() -> list[Path]:
    places = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return [path for path in places if path != Path(__file__)]


def test_rules_are_numbered_from_one() -> None:
    assert rules() == list(range(1, len(rules()) + 1))


def test_every_cited_rule_is_there() -> None:
    unknown = {
        f"{path.relative_to(ROOT)}: R{number}"
        for path in sources()
        for number in CITED.findall(path.read_text())
        if int(number) not in rules()
    }
    assert not unknown


def test_no_text_points_outside_of_the_repository() -> None:
    """The rules used to be in a file that users do not have."""
    assert [path.relative_to(ROOT) for path in sources() if re.search(r"\bDESIGN\b", path.read_text())] == []


@pytest.mark.parametrize("folder", packages(), ids=lambda folder: folder.relative_to(PACKAGE).as_posix())
def test_the_map_says_of_a_package_what_it_says_of_itself(folder: Path) -> None:
    name = folder.relative_to(PACKAGE).as_posix()
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert doc, f"{name} has no docstring"
    sentence = " ".join(doc.split("\n\n")[0].split())
    assert sentence.endswith("."), f"{name}: {sentence}"
    assert f"| `{name}/` | {sentence} |" in MAP, "run `python -m scripts.make_pages packages`"


def test_the_map_has_no_package_that_is_gone() -> None:
    known = {folder.relative_to(PACKAGE).as_posix() for folder in packages()}
    assert set(re.findall(r"^\| `([\w/]+)/` \|", MAP, re.MULTILINE)) == known


def test_every_module_that_is_named_exists() -> None:
    """`runtime/engine`, `plan/plan_file.py`, `runtime/frame.Handle`: in the walks, and where it says how to add something."""
    tops = "|".join(sorted({folder.relative_to(PACKAGE).parts[0] for folder in packages()}))
    text = "\n".join([TEXT, *(path.read_text() for path in WALKS)])
    named = set(re.findall(rf"(?<!/)\b((?:{tops})/[a-z_/0-9]+)", text))
    missing = [name for name in named if not _exists(name.rstrip("/"))]
    assert not missing


def _exists(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()
