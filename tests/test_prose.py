"""Habits of prose become fewer: the stored figures of package and pages may only fall (`python -m scripts.prose --store`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import prose

MOST_IN_PAGES = 2.0
"""Habits in 1,000 words of pages."""


@pytest.mark.parametrize("name", ["package", "pages"])
def test_the_figure_has_not_risen(name: str) -> None:
    stored = json.loads(prose.STORED.read_text())
    assert prose.figure(prose.parts()[name]) <= stored[name], "`python -m scripts.prose` names the files with most"


def test_pages_are_plain() -> None:
    assert json.loads(prose.STORED.read_text())["pages"] <= MOST_IN_PAGES


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Returns the activations of a layer.", 0),
        ("What it holds is kept.", 1),
        ("Nobody looks into what comes behind it.", 4),
        ("The tensor is let go of, and made again as ever.", 3),
        ("It runs. Of the layers one is kept. None is dropped.", 2),
    ],
)
def test_habits_are_counted(text: str, count: int) -> None:
    assert prose.habits_in(text).total() == count


def test_docstrings_comments_and_pages_are_read_and_code_is_not(tmp_path: Path) -> None:
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    module.write_text('"""What it holds."""\n\nNAME = "nobody"  # nobody\n')
    page.write_text("Nobody.\n\n```text\nnobody\n```\n\n<!-- generated: plan -->\nnobody\n<!-- end -->\n\n    nobody\n")
    assert prose.counted([module])[0][module].total() == 2
    assert prose.counted([page])[0][page].total() == 2


def test_a_stored_figure_never_rises() -> None:
    assert prose.lowered({"package": 5.0, "pages": 1.0}, {"package": 4.0, "pages": 2.0}) == {"package": 4.0, "pages": 1.0}
    assert prose.lowered({}, {"pages": 2.0}) == {"pages": 2.0}
