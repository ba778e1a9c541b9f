"""The page in a real browser: it opens without a complaint, shows what its JSON says, zooms, and goes through the plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lynx.config import load_job
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.report.contents import Asked, contents
from megatron_lynx.report.given import given_in
from megatron_lynx.report.island import Island, write_page
from tests.report.browser import Browser, Page, installed_browser, started
from tests.report.samples import run_folder

PROGRAM = installed_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")

JOB = "jobs/llama3-8b-h800-80g"
GUTTER, AXIS = 128, 22
"""Where bars begin in the schedule, in pixels."""


def asked(names: list[str], budgets: int) -> Island:
    given = given_in(names)
    costs = given.profile if given.job is None else analytic_profile(given.job)
    return contents(Asked(given, given.job, costs, budgets, lambda done, of: None))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with started(PROGRAM, tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Island, Path]:
    """The page of a job."""
    island = asked([JOB], budgets=4)
    path = tmp_path_factory.mktemp("planned") / "report.html"
    write_page(island, path)
    return island, path


@pytest.fixture
def page(browser: Browser, planned: tuple[Island, Path]) -> Iterator[Page]:
    page = browser.open(planned[1])
    yield page
    assert page.complaints == []


def stretch(page: Page) -> tuple[float, float]:
    """The stretch of time that is drawn, nanoseconds."""
    return tuple(float(page.value(f"document.querySelector('#bars').dataset.{end}")) for end in ("start", "end"))  # type: ignore[return-value]


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector('{selector}').textContent"))


def cells(page: Page, table: str) -> list[list[str]]:
    rows = f"[...document.querySelectorAll('#table-{table} tbody tr')]"
    return page.value(f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))")  # type: ignore[no-any-return]


def test_it_shows_what_its_json_says(page: Page, planned: tuple[Island, Path]) -> None:
    island, _ = planned
    assert page.value("document.title") == f"{JOB} - megatron-lynx report"
    assert (text(page, "h1"), text(page, "#subject")) == (JOB, island["subject"])
    assert "of stock none, stock selective, stock full that fits" in text(page, "#verdict") == island["verdict"]
    assert page.value("document.querySelectorAll('.tile').length") == len(island["tiles"])
    step_s = island["tiles"][0]["predicted"]
    assert text(page, ".tile .value") == f"{step_s:.1f} s"
    stages = next(table for table in island["tables"] if table["id"] == "stages")
    assert [row[:3] for row in cells(page, "stages")] == [row[:3] for row in stages["rows"]]
    shown = page.value("[...document.querySelectorAll('.stage summary b')].map((each) => each.textContent)")
    assert shown == [f"stage {stage}" for stage in range(load_job(JOB).parallel.pipeline)]
    assert page.value("document.querySelectorAll('#scatter circle').length") == sum(
        point["by"] == "plan" for point in island["points"]
    )


def test_bars_are_where_the_spans_are(page: Page, planned: tuple[Island, Path]) -> None:
    """A span is asked for by the pixel at which it must be; a click tells of it below the schedule."""
    view = planned[0]["views"][0]
    spans = view["rows"][0]["spans"]
    longest = max(
        (place for place, subject in enumerate(spans["subject"]) if view["subjects"][subject]["kind"] == "recv"),
        key=lambda place: spans["length_ns"][place],
    )
    left, top, width, _ = page.place("#bars")
    middle_ns = spans["start_ns"][longest] + spans["length_ns"][longest] / 2
    x = left + GUTTER + (width - GUTTER) * middle_ns / view["step_ns"]
    page.click((x, top + AXIS + 15 + 32 + 6))
    assert view["subjects"][spans["subject"][longest]]["name"] in text(page, "#details")
    assert "pipeline message, stage 0, predicted" in text(page, "#details")


def test_it_zooms_from_a_step_to_a_half(page: Page, planned: tuple[Island, Path]) -> None:
    step_ns = planned[0]["views"][0]["step_ns"]
    assert stretch(page) == (0, step_ns)
    left, top, width, _ = page.place("#bars")
    page.drag((left + GUTTER, top + 60), (left + GUTTER + (width - GUTTER) / 4, top + 60))
    assert stretch(page) == (pytest.approx(0, abs=1), pytest.approx(step_ns / 4, rel=1e-3))
    middle = (left + (width + GUTTER) / 2, top + 60)
    for _ in range(20):
        page.mouse("mouseWheel", middle, deltaX=0, deltaY=-120, modifiers=2)
    page.drawn()
    start, end = stretch(page)
    assert end - start < step_ns / 1000
    assert (start + end) / 2 == pytest.approx(step_ns / 8, rel=1e-2), "what was under the pointer stays there"
    page.click(middle, count=2)
    name = page.value(
        "(() => {const s = JSON.parse(document.querySelector('#island').textContent).views[0], r = s.rows[0].spans; "
        f"const i = r.start_ns.findLastIndex((at, i) => at <= {step_ns / 8} && at + r.length_ns[i] >= {step_ns / 8} "
        "&& ['forward', 'backward'].includes(s.subjects[r.subject[i]].kind)); return [r.start_ns[i], r.length_ns[i]]})()"
    )
    start, end = stretch(page)
    assert start <= name[0] + 1
    assert end >= name[0] + name[1] - 1
    assert end - start <= 1.2 * name[1]
    page.value("document.querySelector('#bars').focus()")
    page.key("0")
    assert stretch(page) == (0, step_ns)
    page.key("+")
    assert stretch(page)[1] - stretch(page)[0] == pytest.approx(step_ns / 1.6)


def test_the_slider_goes_through_the_plans(page: Page, planned: tuple[Island, Path]) -> None:
    plans = sorted(
        (point for point in planned[0]["points"] if point["by"] == "plan"),
        key=lambda point: (point["memory_bytes"] or 0, -point["step_s"]),
    )
    page.place("#budget")
    for place, point in enumerate(plans):
        page.value(
            f"(() => {{const s = document.querySelector('#budget'); s.value = {place}; s.dispatchEvent(new Event('input'))}})()"
        )
        assert text(page, "#chosen dd") == point["label"]
        recomputed = sum(
            what == "recompute" for stage in point["stages"] for each in stage["treatments"] for _, what in each["items"]
        )
        assert page.value("document.querySelectorAll('.chip.recompute').length") == recomputed
        assert page.value("document.querySelectorAll('#scatter .chosen').length") == 1


def test_tables_are_sorted_by_a_click(page: Page, planned: tuple[Island, Path]) -> None:
    table = next(table for table in planned[0]["tables"] if table["id"] == "waits-predicted")
    button = "[...document.querySelectorAll('#table-waits-predicted th button')].find((each) => each.textContent === 'seconds')"
    shown = [row[:2] for row in table["rows"]]
    assert [row[:2] for row in cells(page, "waits-predicted")] == shown
    for downwards in (True, False):
        page.value(f"{button}.click()")
        in_order = sorted(table["rows"], key=lambda row: float(row[3] or 0), reverse=downwards)
        assert [row[:2] for row in cells(page, "waits-predicted")] == [row[:2] for row in in_order]


def test_light_and_dark(page: Page) -> None:
    def background() -> str:
        return str(page.value("getComputedStyle(document.body).backgroundColor"))

    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    assert background() == "rgb(255, 255, 255)"
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert background() == "rgb(20, 23, 28)"
    page.value("document.querySelector('#theme').click()")
    assert background() == "rgb(255, 255, 255)", "the reader's choice counts more than the system's"


def test_a_run_is_seen_beside_its_prediction(browser: Browser, tmp_path: Path) -> None:
    island = asked([str(run_folder(tmp_path / "run"))], budgets=0)
    write_page(island, tmp_path / "report.html")
    page = browser.open(tmp_path / "report.html")
    assert text(page, "#views") == "predictedmeasuredboth"
    assert page.value("document.querySelector('#bars').dataset.rows") == "6", "two stages, four ranks"
    page.value("document.querySelector('#views button').click()")
    page.drawn()
    assert page.value("document.querySelector('#bars').dataset.rows") == "2"
    assert stretch(page)[1] == island["views"][0]["step_ns"]
    assert "recompute exposed" in text(page, "#tables")
    assert page.complaints == []
