"""What a stage's order says about the pass that comes next."""

from __future__ import annotations

from megatron_lynx.apply.installation import order_of
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule.schedule import Action


def written(order: StageOrder) -> str:
    """`chunk F micro-batch`, pass by pass."""
    return " ".join(f"{one.chunk}{one.kind}{one.micro_batch}" for one, _ in order.all)


def test_1f1b() -> None:
    """Stage 0 of 2: one forward ahead, so the backward of i follows the forward of i + 1."""
    order = order_of(2, 0, 1, 2)(3)
    assert written(order) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert order.before_other == {(1, 0), (2, 0)}
    assert not any((index, 0) in order.at_once for index in range(3))
    phases = [phase for _, phase in order.backwards[:3]]
    assert phases == ["steady", "steady", "cooldown"]
    assert len(order.backwards) == 3


def test_the_last_stage_goes_back_at_once() -> None:
    """A forward's own backward is next."""
    order = order_of(2, 1, 1, 2)(3)
    assert written(order) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert all((index, 0) in order.at_once for index in range(3))
    assert not order.before_other


def test_interleaved() -> None:
    """Stage 0 of 2, two chunks: a backward of the other chunk follows a forward."""
    order = order_of(2, 0, 2, 2)(4)
    assert written(order).startswith("0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0")
    assert {(2, 0), (2, 1)} <= order.before_other
    first = order.backwards[0]
    assert first is not None
    assert first[0].virtual == (0, 1)


def test_no_backward_of_another_micro_batch_is_expected_in_warm_up() -> None:
    """Even where a backward comes right after it: the phase says that no copy comes back there."""
    order = StageOrder([(Action(1, "F", 0), "warmup"), (Action(0, "B", 0), "steady")])
    assert not order.before_other


def test_a_stage_without_an_order_knows_nothing() -> None:
    order = StageOrder(())
    assert not order.before_other
    assert (0, 0) not in order.at_once
    assert not order.backwards
