"""A small job with everything that a report can be made from: plan, profile, and a run's files, as if it had been trained."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from megatron_lynx.measure.measurement import save_measurement
from megatron_lynx.plan import save_plan
from megatron_lynx.profiler.profile import save_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.timeline import Span, Timeline, write_trace
from tests.measure.samples import measurement
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

JOB = tiny_job("llama", tensor=2, pipeline=2, microbatches=3)
PLAN, PROFILE = uniform_plan(JOB), made_up_profile(JOB)


def simulated() -> Simulation:
    return rehearse(PLAN, PROFILE)


def as_if_run(slower: float = 1.25) -> Timeline:
    """Both ranks of every stage do what the simulation says, some slower, with micro-batches of the third step."""

    def later(span: Span) -> Span:
        micro_batch = None if span.micro_batch is None else span.micro_batch + 2 * JOB.microbatches
        return span._replace(start_s=slower * span.start_s, end_s=slower * span.end_s, micro_batch=micro_batch)

    stages = simulated().timeline().ranks
    return Timeline({2 * stage + rank: tuple(map(later, spans)) for stage, spans in stages.items() for rank in (0, 1)})


def run_folder(folder: Path) -> Path:
    """What `compare` leaves behind."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(PLAN, folder / "plan.yaml")
    save_profile(PROFILE, folder / "profile.yaml")
    save_measurement(measurement(), folder / "measurement.json")
    write_trace(as_if_run(), folder / "trace.json")
    return folder


CELL = r'<data value="(.*?)">.*?</data>'


def cell_of(text: str) -> Any:
    """The exact value of a figure of the page, or its text; None where there is none."""
    if (figure := re.fullmatch(CELL, text)) is not None:
        return float(figure[1]) if "." in figure[1] or "e" in figure[1] else int(figure[1])
    return None if text == "&ndash;" else unescape(text)


def table_in(page: str, name: str) -> list[list[Any]]:
    """The rows of a table of the page."""
    body = re.search(rf'id="{name}">.*?<tbody>(.*?)</tbody>', page)
    assert body is not None, f"no table {name}"
    return [[cell_of(cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in re.findall(r"<tr>(.*?)</tr>", body[1])]


def tiles_in(page: str) -> dict[str, tuple[float | None, float | None]]:
    """Predicted and measured figures at the top of the page."""
    found = {}
    for label, shown, said in re.findall(r'<div class="tile" .*?>([^<]*)<b>(.*?)</b>(.*?)</div>', page):
        beside = re.search(CELL, said)
        value = cell_of(shown)
        found[label] = (value, None) if said == "predicted" else (cell_of(beside[0]) if beside else None, value)
    return found


def rows_in(page: str) -> list[list[str]]:
    """The labels of the rows of each picture of a step."""
    return [re.findall(r'<text class="row" .*?>(.*?)</text>', svg) for svg in re.findall(r'<svg class="step".*?</svg>', page)]
