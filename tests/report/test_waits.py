"""What ran in which wait, on a step that can be worked out on paper."""

from __future__ import annotations

from megatron_lynx.report.drawing import View, trimmed
from megatron_lynx.report.tables import WaitUse, seconds_of, stage_table, tiles_of, use_table, waits_of
from megatron_lynx.timeline import MemoryCurve, Span, Timeline
from tests.report.samples import simulated

SPANS = (
    Span("backward", 0.0, 10.0, 2, "mlp", 0),
    Span("window", 2.0, 6.0, 2, "mlp", 0, "bwd.mlp.0@2"),
    Span("recompute", 2.0, 3.0, 1, "attention", 0, "bwd.mlp.0@2", "recompute attention(1)"),
    Span("weight_gradient", 3.0, 3.5, 3, "mlp", 0, "bwd.mlp.0@2"),  # type: ignore[arg-type]
    Span("recompute", 6.0, 6.75, 1, "attention", 0, "on_demand"),
    Span("backward", 10.0, 18.0, 1, "mlp", 0),
    Span("window", 12.0, 13.0, 1, "mlp", 0, "bwd.mlp.0@1"),
    Span("recv", 20.0, 24.0, window="pipe.recv_backward"),
    Span("recompute", 22.0, 23.0, 4, "mlp", 1, "pipe.recv_backward"),
    Span("copy_wait", 24.0, 24.5),
)
VIEW = View("predicted", "a step", 24.5, Timeline({0: SPANS}), {0: 0}, {0: "1-4"}, {0: MemoryCurve((0.0,), (1024,))})


def test_what_ran_in_which_wait() -> None:
    assert waits_of(SPANS) == {
        "bwd.mlp.0": WaitUse(2, 5.0, 1.5, {"recompute attention", "weight gradient mlp"}),
        "pipe.recv_backward": WaitUse(1, 4.0, 1.0, {"recompute mlp"}),
    }
    table = use_table(VIEW)
    assert table.rows[0] == ["stage 0", "bwd.mlp.0", 2, 5.0, 2.5, 1.5, 3.5, 0.3, "recompute attention, weight gradient mlp"]


def test_where_a_step_went() -> None:
    assert list(seconds_of(SPANS).values()) == [0.0, 18.0, 2.0, 0.75, 0.0, 0.5, 9.0, 6.5]
    assert stage_table([VIEW]).rows == [["stage 0", "predicted", "1-4", 0.0, 18.0, 2.0, 0.75, 0.0, 0.5, 9.0, 6.5, 1024]]
    tiles = {tile.label: tile.predicted for tile in tiles_of([VIEW], [], None, None)}
    assert tiles == {"passes": 24.5, "recompute hidden": 2.0 / 2.75}


def test_spans_say_what_the_simulation_says() -> None:
    simulation = simulated()
    for stage, spans in simulation.timeline().ranks.items():
        figures = seconds_of(spans)
        assert abs(figures["recompute hidden"] - simulation.total(stage, "hidden_s")) < 1e-12
        assert abs(figures["recompute exposed"] - simulation.total(stage, "exposed_s")) < 1e-12


def test_a_wait_is_over_when_its_communication_is() -> None:
    """The simulator draws it until the recomputation in it is over, so 3 s of a busy device looked like an unused wait."""
    spans = (
        Span("window", 0.0, 5.0, 2, "mlp", 0, "bwd.mlp.0@2"),
        Span("recompute", 0.0, 2.0, 1, "attention", 0, "bwd.mlp.0@2"),
        Span("recompute", 2.0, 5.0, 1, "attention", 0, "on_demand"),
        Span("window", 6.0, 8.0, 2, "attention", 0, "bwd.attention.0@2"),
    )
    uses = waits_of(trimmed(Timeline({0: spans})).ranks[0])
    assert (uses["bwd.mlp.0"].seconds, uses["bwd.mlp.0"].unused_s) == (2.0, 0.0)
    assert (uses["bwd.attention.0"].seconds, uses["bwd.attention.0"].unused_s) == (2.0, 2.0)
