"""A timeline as the page has it, and what each stage holds, by kind."""

from __future__ import annotations

from itertools import accumulate

import pytest

from megatron_lynx.report import views
from megatron_lynx.report.island import FALLBACK, KINDS, kind_of, with_fallbacks
from megatron_lynx.report.views import by_kind, memory_of, view
from megatron_lynx.timeline import MemoryCurve, Span, Timeline, curve_of_parts
from tests.report.samples import as_if_run, simulated

HALF = Span("backward", 0.0, 4e-3, 1, "mlp", 7, None, "backward mlp(1)")
WAIT = Span("window", 1e-3, 3e-3, 1, "mlp", 7, "bwd.mlp.0@1", "bwd.mlp.0@1")
RECOMPUTE = Span("recompute", 1e-3, 2e-3, 1, "attention", 7, "bwd.mlp.0@1", "recompute attention(1)")


def test_spans_column_by_column_each_with_what_it_is_about() -> None:
    made = view("measured", "a step", Timeline({0: (HALF, WAIT, RECOMPUTE), 1: (HALF,)}), {0: 0, 1: 0})
    kinds = [made["subjects"][place]["kind"] for place in made["rows"][0]["spans"]["subject"]]
    assert kinds == ["backward", "window", "wait", "hidden"], "a wait is what was waited for, and a hole"
    assert made["rows"][0]["spans"]["start_ns"] == [0, 1_000_000, 1_000_000, 1_000_000]
    assert made["rows"][0]["spans"]["length_ns"] == [4_000_000, 2_000_000, 2_000_000, 1_000_000]
    assert made["rows"][0]["spans"]["micro_batch"] == [0, 0, 0, 0], "the first one that is there is 0"
    assert made["rows"][1]["spans"]["subject"] == [0], "both ranks ran the same half"
    assert [row["label"] for row in made["rows"]] == ["stage 0, rank 0", "stage 0, rank 1"]


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


def test_a_kind_that_nobody_knows_is_drawn_too() -> None:
    *_, unknown = with_fallbacks(KINDS, {"forward", "checkpoint_write"})
    assert (unknown["name"], unknown["label"]) == ("checkpoint_write", "checkpoint write")
    assert (unknown["light"], unknown["dark"]) == FALLBACK
    assert len({kind["light"] for kind in KINDS} | {kind["dark"] for kind in KINDS}) == 2 * len(KINDS)


def test_memory_in_its_kinds_adds_up_to_the_curve() -> None:
    simulation = simulated()
    for stage in (0, 1):
        memory, curve = memory_of(simulation, stage), simulation.memory(stage)
        totals = [sum(at) for at in zip(*memory["kinds"].values(), strict=True)]
        assert max(totals) == curve.peak_bytes
        assert totals[-1] == 0
        assert max(memory["kinds"]["regenerated"]) == simulation.regenerated(stage).peak_bytes > 0
        assert min(min(held) for held in memory["kinds"].values()) >= 0
        assert memory["time_ns"] == sorted(memory["time_ns"])


def test_a_peak_of_no_duration_is_kept() -> None:
    curve = curve_of_parts([(0.0, ((1.0, 5), (2.0, 7), (2.0, -9)))])
    assert by_kind(curve) == {"time_ns": [0, 10**9, 2 * 10**9, 2 * 10**9], "kinds": {"kept": [0, 5, 12, 3]}}
    assert by_kind(MemoryCurve((0.0,), (0,))) == {"time_ns": [0], "kinds": {"kept": [0]}}


def test_regenerated_bytes_come_and_go() -> None:
    for stage in (0, 1):
        simulation = simulated()
        changes = [change for each in simulation.executed[stage] for _, change in each.content.regenerated]
        assert sum(changes) == 0
        assert min(accumulate(changes)) >= 0


def test_of_too_many_spans_one_rank_of_each_stage_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = as_if_run()
    late = Timeline(timeline.ranks | {3: (*timeline.ranks[3], Span("update", 90.0, 91.0))})
    stages = {rank: rank // 2 for rank in range(4)}
    assert [row["number"] for row in view("measured", "", late, stages)["rows"]] == [0, 1, 2, 3]
    monkeypatch.setattr(views, "MOST_SPANS", 10)
    assert [row["number"] for row in view("measured", "", late, stages)["rows"]] == [0, 3], "the one that ends last"
