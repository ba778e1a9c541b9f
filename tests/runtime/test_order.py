"""What a stage's order says about the pass that comes next."""

from __future__ import annotations

from megatron_lynx.apply.installation import order_of
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule.schedule import Action


def written(order: StageOrder) -> str:
    """`chunk F micro-batch`, pass by pass."""
    return " ".join(f"{one.chunk}{one.kind}{one.micro_batch}" for one, _ in order.all)


def test_1f1b() -> None:
    """Stage 0 of 2: one forward ahead, so the forward of i + 1 serves the backward of i."""
    order = order_of(2, 0, 1, 2)(3)
    assert written(order) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert [order.hidden_by.get((index, 0)) for index in range(3)] == [None, (0, 0), (1, 0)]
    assert not any((index, 0) in order.at_once for index in range(3))
    phases = [phase for _, phase in order.backwards[:3]]
    assert phases == ["steady", "steady", "cooldown"]
    assert len(order.backwards) == 3


def test_the_last_stage_goes_back_at_once() -> None:
    """No forward serves a recomputation there: a forward's own backward is next."""
    order = order_of(2, 1, 1, 2)(3)
    assert written(order) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert all((index, 0) in order.at_once for index in range(3))
    assert [order.hidden_by.get((index, 0)) for index in range(3)] == [None] * 3


def test_interleaved() -> None:
    """Stage 0 of 2, two chunks: a forward serves a backward of the other chunk."""
    order = order_of(2, 0, 2, 2)(4)
    assert written(order).startswith("0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0")
    assert order.hidden_by.get((2, 0)) == (0, 1)
    assert order.hidden_by.get((2, 1)) == (0, 0)
    first = order.backwards[0]
    assert first is not None
    assert first[0].virtual == (0, 1)


def test_a_warm_up_forward_serves_nobody() -> None:
    """Even where a backward comes right behind it: the phase says that what it would serve is not fixed."""
    order = StageOrder([(Action(1, "F", 0), "warmup"), (Action(0, "B", 0), "steady")])
    assert order.hidden_by.get((1, 0)) is None


def test_a_stage_without_an_order_knows_nothing() -> None:
    order = StageOrder(())
    assert order.hidden_by.get((0, 0)) is None
    assert (0, 0) not in order.at_once
    assert not order.backwards
