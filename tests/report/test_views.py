"""Bars and curves of a step, as they are drawn."""

from __future__ import annotations

import re
from itertools import accumulate

import pytest

from megatron_lynx.report import drawing
from megatron_lynx.report.drawing import COLUMNS, GUTTER, View, bars_of, kind_of, legend, part_of, shown_rows, step_drawn
from megatron_lynx.report.drawing import SPANS as KINDS
from megatron_lynx.timeline import MemoryCurve, Span, Timeline
from tests.report.samples import as_if_run, simulated

HALF = Span("backward", 0.0, 4e-3, 1, "mlp", 7, None, "backward mlp(1)")
WAIT = Span("window", 1e-3, 3e-3, 1, "mlp", 7, "bwd.mlp.0@1", "bwd.mlp.0@1")
RECOMPUTE = Span("recompute", 1e-3, 2e-3, 1, "attention", 7, "bwd.mlp.0@1", "recompute attention(1)")
SPANS = (HALF, WAIT, RECOMPUTE)


def view(*spans: Span, **more: object) -> View:
    timeline = Timeline({0: spans})
    return View("predicted", "a step", timeline.seconds, timeline, {0: 0}, **more)  # type: ignore[arg-type]


def test_a_wait_is_what_was_waited_for_and_a_gap() -> None:
    assert [kind for kind, _ in bars_of(SPANS)] == ["backward", "window", "wait", "hidden"]


def test_bars_are_where_their_spans_are() -> None:
    svg = step_drawn(view(*SPANS), single=True)
    bars = {
        kind: (float(x), float(width)) for kind, x, width in re.findall(r'k-(\w+)" x="([\d.]+)" y="\d+" width="([\d.]+)', svg)
    }
    assert list(bars) == ["backward", "wait", "hidden", "window"], (
        "what is drawn later lies over the rest; communication is below"
    )
    quarter = COLUMNS / 4
    assert bars["backward"] == (GUTTER, COLUMNS)
    assert bars["wait"] == bars["window"] == (GUTTER + quarter, 2 * quarter)
    assert bars["hidden"] == (GUTTER + quarter, quarter)
    assert "recompute attention(1), bwd.mlp.0@1: 1 ms, micro-batch 7" in svg


def test_shares_of_time_add_up_in_every_column() -> None:
    svg = step_drawn(view(*SPANS), single=False)
    paths = dict(re.findall(r'<path class="k-(\w+)" d="(.*?)"', svg))
    assert list(paths) == ["hidden", "wait", "backward", "window"], "the highest first"
    assert paths["backward"] == "M130 54H130V24.0H442V39.0H443V54.0H1067V39.0H1068V24.0H1380V54Z"


def test_of_a_long_step_a_part_is_drawn_too() -> None:
    assert part_of(view(*SPANS)) is None
    halves = [Span("forward", number, number + 1.0, number, "mlp", 0) for number in range(100)]
    part = part_of(view(*halves))
    assert part == (43.0, 57.0)
    svg = step_drawn(view(*halves), part, single=True)
    assert svg.count("<rect") == 14


def test_memory_has_the_peak_of_every_column() -> None:
    curve = MemoryCurve((0.0, 1e-3, 1e-3, 3e-3), (0, 1000, 10, 0))
    svg = step_drawn(view(*SPANS, memory={0: curve}), single=False)
    (path,) = re.findall(r'class="k-kept" d="(.*?)"', svg)
    (top, *_) = re.findall(r"V([\d.]+)", path)
    bottom = float(path.removeprefix("M130 ").partition("H")[0])
    assert bottom - float(top) == 34, "though it lasts no time"
    assert "1000 B" in svg


@pytest.mark.parametrize(
    ("kind", "window", "drawn"),
    [
        ("recompute", "on_demand", "on_demand"),
        ("recompute", "pipe.recv_backward", "hidden"),
        ("window", "pipe.recv_backward", "recv"),
        ("copy_wait", None, "wait"),
        ("weight_gradient", "fwd.mlp.0@2", "weight_gradient"),
        ("weight_gradient", "flushed", "flushed"),
        ("of a later release", None, "of a later release"),
    ],
)
def test_kinds_of_bars(kind: str, window: str | None, drawn: str) -> None:
    assert kind_of(Span(kind, 0.0, 1.0, window=window)) == drawn  # type: ignore[arg-type]


def test_a_kind_of_a_later_release_is_drawn_too() -> None:
    unknown = Span("checkpoint_write", 0.0, 1.0)  # type: ignore[arg-type]
    assert 'class="k-other"' in step_drawn(view(unknown), single=True)
    assert "checkpoint write" in legend(KINDS, {"forward", "checkpoint_write"})
    colours = [colour for _, *pair in KINDS.values() for colour in pair]
    assert len(colours) == len(set(colours))


def test_regenerated_bytes_come_and_go() -> None:
    for stage in (0, 1):
        simulation = simulated()
        changes = [change for each in simulation.executed[stage] for _, change in each.content.regenerated]
        assert sum(changes) == 0
        assert min(accumulate(changes)) >= 0


def test_of_too_many_ranks_one_rank_of_each_stage_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = as_if_run()
    late = Timeline(timeline.ranks | {3: (*timeline.ranks[3], Span("update", 90.0, 91.0))})
    stages = {rank: rank // 2 for rank in range(4)}
    assert shown_rows(late, stages) == stages
    monkeypatch.setattr(drawing, "MOST_ROWS", 3)
    assert shown_rows(late, stages) == {0: 0, 3: 1}, "the one that ends last"
