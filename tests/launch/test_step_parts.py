"""What a traced step consisted of, from spans as the runtime records them."""

from __future__ import annotations

from megatron_lynx.measure.run_outcome import PartSeconds, StageMeasured, parts_of, stage_of
from megatron_lynx.timeline import Span


def span(kind, start_s, end_s, layer=None, half=None, window=None) -> Span:
    return Span(kind, start_s, end_s, layer, half, 0, window)


STEP = [
    span("forward", 0.0, 10.0, 1, "attention"),
    span("window", 4.0, 9.0, window="fwd.attention.0@1"),
    span("recompute", 4.0, 6.0, 2, "mlp", "fwd.attention.0@1"),
    span("offload", 3.0, 30.0),
    span("forward", 10.0, 16.0, 1, "mlp"),
    span("forward", 16.0, 20.0, 2, "mlp"),
    span("recv", 20.0, 50.0, window="pipe.recv_backward"),
    span("recompute", 21.0, 22.0, 2, "mlp", "pipe.recv_backward"),
    span("backward", 50.0, 70.0, 2, "mlp"),
    span("recompute", 51.0, 54.0, 2, "mlp", "on_demand"),
    span("window", 60.0, 64.0, window="bwd.mlp.0@2"),
    span("recompute", 60.0, 63.0, 1, "attention", "bwd.mlp.0@2"),
    span("weight_gradient", 63.0, 64.0, 2, "mlp", "bwd.mlp.0@2"),
    span("copy_wait", 66.0, 67.0),
]


def test_a_half_computes_what_is_not_inside_it_and_its_weight_gradients():
    found = parts_of(STEP, lambda layer: False)
    assert found["attention"] == PartSeconds(count=1, seconds=5.0)
    assert found["mlp"] == PartSeconds(count=2, seconds=6.0 + 4.0 + (20.0 - 3.0 - 4.0 - 1.0) + 1.0)


def test_a_wait_that_goes_on_says_how_long_communication_is_and_one_that_does_not_says_nothing():
    waits = parts_of(STEP, lambda layer: False)
    assert waits["fwd.attention.0"] == PartSeconds(count=1, seconds=5.0)
    assert waits["bwd.mlp.0"] == PartSeconds()
    assert {place for place in waits if "." in place} == {"fwd.attention.0", "bwd.mlp.0"}, "receives are up to other stages"


def test_layers_with_experts_are_a_kind_of_their_own():
    found = parts_of(STEP, lambda layer: layer == 2)
    assert {kind: part.count for kind, part in found.items() if "." not in kind} == {"attention": 1, "experts": 1, "mlp": 1}
    assert "bwd.experts.0" in found


def test_ranks_are_added_up():
    one = parts_of(STEP, lambda layer: False)
    both = stage_of([StageMeasured(ranks=1, parts=parts) for parts in (one, None, one)]).parts
    assert both is not None
    assert both["mlp"].count == 4
    assert both["fwd.attention.0"].seconds == 10.0
    assert stage_of([StageMeasured(ranks=1)]).parts is None
