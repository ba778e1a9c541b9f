"""Pages keep to their budgets of words, their links lead somewhere, and decision records have one form. Generated parts are those
of their files, and the files are what commands and code say today (`python -m scripts.make_pages`)."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lynx.config import load_job
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.plan.plan import Offload, Stage
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.version import __version__
from megatron_lynx.yaml_file import read_yaml
from scripts import make_pages, make_site
from scripts.make_plans import launch_words
from tests.long import long

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
RECORDS = sorted(path for path in (ROOT / "docs/decisions").glob("*.md") if path.name != "README.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
BUDGETS = {
    "README": 1200,
    "CHANGELOG": 1500,
    "CONTRIBUTING": 800,
    "docs/quickstart": 900,
    "docs/reading": 900,
    "docs/launching": 2400,
    "docs/your_launch": 1300,
    "docs/plan_file": 1600,
    "docs/models": 2800,
    "docs/offloading": 1000,
    "docs/double_buffered": 1100,
    "docs/when_not": 1800,
    "docs/runtime": 2300,
    "docs/planner": 1800,
    "docs/architecture": 1500,
    "docs/gpu": 900,
    "docs/troubleshooting": 1100,
}
"""Most words of a page, without code and generated parts."""


def prose(text: str) -> str:
    """The text without generated parts, fenced and indented code."""
    text = re.sub(r"<!-- generated: .*?<!-- end -->", "", text, flags=re.DOTALL)
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
    assert 45 <= len(list(records())) <= 75, "replace a record that no longer holds, rather than adding one"


def test_every_page_has_a_budget_and_keeps_to_it() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    words = {path.relative_to(ROOT).with_suffix("").as_posix(): len(prose(path.read_text()).split()) for path in pages}
    assert words.keys() <= BUDGETS.keys()
    assert {name: count for name, count in words.items() if count > BUDGETS[name]} == {}


def test_release_notes_and_citation_are_of_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__ == read_yaml(ROOT / "CITATION.cff")["version"]


def test_generated_parts_are_those_of_their_files() -> None:
    for path in make_pages.PAGES:
        text = path.read_text(encoding="utf-8")
        assert make_pages.placed(text) == text, f"{path.name}: run `python -m scripts.make_pages`"


def test_every_generated_file_has_a_name() -> None:
    found = {path for path in make_pages.FOLDER.rglob("*") if path.is_file()}
    assert found == {make_pages.path_of(name) for name in make_pages.names()}


@pytest.mark.parametrize("name", ["flags", "packages"])
def test_generated_lists_are_current(name: str) -> None:
    assert make_pages.path_of(name).read_text() == make_pages.made(name), f"run `python -m scripts.make_pages {name}`"


SHORT = ("estimate_full", "explain")
"""Screens without a plan to make; `make check` has the others, too."""


@pytest.mark.parametrize("name", [*SHORT, *long(*(name for name in make_pages.SCREENS if name not in SHORT))])
@pytest.mark.slow
def test_shown_commands_print_what_is_shown(name: str) -> None:
    if name in make_pages.IN_MEGATRON and "MEGATRON_LM_DIR" not in os.environ:
        pytest.skip("needs a checkout of Megatron-LM 0.19 (MEGATRON_LM_DIR)")
    assert make_pages.path_of(name).read_text() == make_pages.made(name), f"run `python -m scripts.make_pages {name}`"


def test_a_stale_part_is_put_right() -> None:
    page = "before\n<!-- generated: plan -->\n\nstale\n\n<!-- end -->\nafter\n"
    assert make_pages.placed(page) == page.replace("stale", make_pages.part_of("plan"))


def test_output_is_cut_where_it_is_not_shown() -> None:
    lines = ["one", "two", "three", "four"]
    assert list(make_pages.chosen(lines, ("two", "four"))) == ["...", "two", "...", "four"]
    assert list(make_pages.chosen(lines, ())) == lines


def test_messages_that_troubleshooting_explains_exist() -> None:
    """Each quoted piece of the first column is a part of a text in the package."""
    texts = "\n".join(
        node.value
        for path in (ROOT / "megatron_lynx").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = [line for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if line.startswith("| ")]
    quoted = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    pieces = [piece.strip(" :,") for quote in quoted for piece in re.split(r"\.\.\.| N ", quote)]
    assert len(pieces) > 20
    assert [piece for piece in pieces if piece not in texts] == []


def test_links_of_the_site_stay_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What lies outside of the site is named by its path."""
    monkeypatch.setattr(make_site, "SITE", tmp_path)
    index = make_site.linked(ROOT / "README.md", tmp_path / "index.md")
    assert "](quickstart.md)" in index
    assert "](docs/" not in index
    inner = make_site.linked(ROOT / "docs/decisions/README.md", tmp_path / "decisions/README.md")
    assert "](runtime.md)" in inner
    for path in make_site.sources():
        if path.suffix == ".md":
            target = tmp_path / make_site.placed(path)
            for link in LINK.findall(prose(make_site.linked(path, target))):
                name = link.partition("#")[0]
                known = {tmp_path / make_site.placed(each) for each in make_site.sources()}
                assert re.match(r"[a-z]+:", link) or not name or (target.parent / name).resolve() in known, link


def test_the_site_has_every_key_of_a_plan() -> None:
    page = make_site.schema()
    assert all(f"| `{key}` |" in page for key in ("half_by_half", "ahead_depth", "weight_gradients", "experts_hold"))
    assert "## install" in make_site.api()


def test_yaml_that_pages_show_is_read(tmp_path: Path) -> None:
    """Stages and offload entries of plans, and jobs."""
    seen = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)):
            path = tmp_path / f"{page.stem}-{number}.yaml"
            path.write_text(block)
            data = read_yaml(path)
            if "stages" in data:
                Stage.model_validate(data["stages"][0])
                seen.add("stage")
            elif "offload" in data:
                Offload.model_validate(data["offload"])
                seen.add("offload")
            else:
                load_job(path)
                seen.add("job")
    assert seen == {"stage", "offload", "job"}


@pytest.mark.slow
def test_the_stage_that_is_solved_by_hand_is_the_plans(tmp_path: Path) -> None:
    """docs/planner.md: eleven of stage 0's lower layers recompute linear_fc1 as well, the lowest ones. README: stage 3."""
    words = [*launch_words("llama3_70b", "h800-80g", "none"), "--tensor-model-parallel-size", "8", "--micro-batch-size", "2"]
    job = job_of(read_launch(words), "h800-80g", {"budget.memory_gib": 40})
    stages = make_plan(job, analytic_profile(job)).stages
    stage = stages[0]
    again = {layer for rule in stage.rules if "linear_fc1" in rule.recompute for layer in rule.layers}
    assert again == set(range(1, 12))
    assert "**eleven layers at B, eight at A**" in (ROOT / "docs/planner.md").read_text()
    shown = tmp_path / "readme.yaml"
    shown.write_text(re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0])
    assert Stage.model_validate(read_yaml(shown)["stages"][0]).rules == stages[3].rules
