"""The page as a file: one piece, no network, and no name that gets out of its place."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_lynx.errors import ConfigError
from megatron_lynx.report.contents import Asked, contents
from megatron_lynx.report.given import Given
from megatron_lynx.report.island import ASSETS, SCRIPTS, STYLES, Island, page, write_page
from tests.report.samples import JOB, PLAN, PROFILE


@pytest.fixture(scope="module")
def island() -> Island:
    given = Given(("plan.yaml",), {"plan": "plan.yaml", "profile": "profile.yaml"}, plan=PLAN, profile=PROFILE)
    return contents(Asked(given, JOB, PROFILE, 3, lambda done, of: None))


class Elements(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_in_it_is_fetched(island: Island) -> None:
    text = page(island)
    for _, attributes in Elements(text).tags:
        assert attributes.keys() & {"src", "action", "srcset"} == set()
        assert (attributes.get("href") or "data:").startswith("data:")
    assert set(re.findall(r"https?://[^\"' )]*", text)) <= {"http://www.w3.org/2000/svg"}, "the namespace of SVG is only a name"
    assert re.findall(r"@import|url\(|\bimport\b|\bfetch\(|XMLHttpRequest", text) == []
    assert "default-src 'none'" in text


def test_names_from_files_stay_text(island: Island) -> None:
    evil = "</script><script>alert(1)</script><!-- styles -->"
    text = page({**island, "title": evil, "notes": [evil]})
    assert text.count("<script") == page(island).count("<script") == 2
    found = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert (found["title"], found["notes"]) == (evil, [evil])


def test_every_file_of_the_page_is_used() -> None:
    used = {f"{name}.css" for name in STYLES} | {f"{name}.js" for name in SCRIPTS} | {"page.html"}
    assert {file.name for file in ASSETS.iterdir()} == used


def test_files_of_the_page_are_installed() -> None:
    setup = (ASSETS.parents[2] / "setup.py").read_text()
    assert '[f"assets/*.{suffix}" for suffix in ("html", "css", "js")]' in setup
    assert {file.suffix for file in ASSETS.iterdir()} == {".html", ".css", ".js"}


def test_it_is_written_whole(island: Island, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page(island, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_page(island, tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(island)
