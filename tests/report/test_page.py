"""The page as a file: no script, no network, and no name that gets out of its place."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from megatron_lynx.report.contents import report
from megatron_lynx.report.drawing import kind_of
from megatron_lynx.report.given import Given
from megatron_lynx.units import format_seconds
from tests.report.samples import JOB, PLAN, PROFILE, rows_in, simulated, table_in, tiles_in

EVIL = "</style><script>alert(1)</script>"


def page_of(name: str = "plan.yaml") -> str:
    return report(Given((name,), {"plan": name, "profile": "profile.yaml"}, plan=PLAN, profile=PROFILE), JOB, PROFILE, 3)


@pytest.fixture(scope="module")
def page() -> str:
    return page_of()


class Elements(HTMLParser):
    """Collects elements of a page, and checks that they are closed in order."""

    OPEN = frozenset(("meta", "link"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.within: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.OPEN:
            self.within.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.within.pop() == tag


def test_nothing_in_it_is_fetched_or_run(page: str) -> None:
    elements = Elements(page)
    assert elements.within == []
    for tag, attributes in elements.tags:
        assert tag not in ("script", "iframe", "img", "object")
        assert attributes.keys() & {"src", "action", "srcset", "onclick"} == set()
        assert (attributes.get("href") or "data:").startswith("data:")
    assert re.findall(r"https?:|@import|url\(", page) == []
    assert "default-src 'none'" in page


def test_names_from_files_stay_text(page: str) -> None:
    evil = page_of(EVIL)
    assert "<script" not in evil
    assert evil.count("&lt;script&gt;") >= 2
    assert [tag for tag, _ in Elements(evil).tags] == [tag for tag, _ in Elements(page).tags]


def test_figures_of_a_step_are_the_simulation_s(page: str) -> None:
    step = simulated()
    assert tiles_in(page)["passes"] == (step.step_s, None)
    assert f'<b><data value="{step.step_s!r}">{format_seconds(step.step_s)}</data></b>' in page
    for stage, row in enumerate(table_in(page, "stages")):
        assert row[0] == f"stage {stage}"
        assert row[5:7] == pytest.approx([step.total(stage, "hidden_s"), step.total(stage, "exposed_s")], abs=1e-12)


def test_a_short_step_is_drawn_bar_by_bar(page: str) -> None:
    assert rows_in(page) == [["stage 0", "stage 1"]]
    bars = re.findall(r'<rect class="k-(\w+)" x="[\d.]+" y="\d+" width="([\d.]+)".*?<title>(.*?)</title>', page)
    names = {title.partition(",")[0] for _, _, title in bars}
    for spans in simulated().timeline().ranks.values():
        assert {span.name for span in spans if span.seconds} <= names
    drawn = sum(kind == "hidden" for kind, _, _ in bars)
    assert drawn == sum(kind_of(span) == "hidden" for spans in simulated().timeline().ranks.values() for span in spans)
