"""Pages keep to their budgets of words, their links lead somewhere, and decision records have one form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
RECORDS = sorted(path for path in (ROOT / "docs/decisions").glob("*.md") if path.name != "README.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """The text without fenced and indented code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def records() -> Iterator[tuple[str, str]]:
    for path in RECORDS:
        for record in path.read_text().split("\n## ")[1:]:
            yield f"{path.stem}: {record.splitlines()[0]}", record


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


@pytest.mark.parametrize("record", [record for _, record in records()], ids=[name for name, _ in records()])
def test_a_decision_record_is_short_and_says_why(record: str) -> None:
    parts = re.findall(r"^\* \*\*(\w+)\*\*: ", record, re.MULTILINE)
    assert parts[:2] == ["Decision", "Because"]
    assert parts[2:] in (["Rejected", "Date"], ["Rejected", "Figure", "Date"])
    assert re.search(r"\*\*Date\*\*: 20\d\d-\d\d-\d\d\.$", record.strip())
    assert len(re.sub(r"^\*", "", record, flags=re.MULTILINE).split()) <= 70


def test_the_records_are_few() -> None:
    assert 45 <= len(list(records())) <= 60
