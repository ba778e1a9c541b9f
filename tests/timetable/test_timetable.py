"""What runs when, on stages of a few layers by hand: as a plan says it, and as its chunks see each other."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.anatomy import ATTENTION, EXPERTS, MLP, Section
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, Window, WindowAddress
from megatron_lynx.kinds.captured import in_graph
from megatron_lynx.kinds.opaque.section import OPAQUE
from megatron_lynx.kinds.sections import filling
from megatron_lynx.plan.plan import Offload
from megatron_lynx.timetable import Layout, Pass, PlannedHalf, Task, Timetable


def at(passing: Any, layer: int, half: Any = "mlp", ordinal: int = 0) -> WindowAddress:
    return WindowAddress(passing, layer, half, ordinal)


def mlp(layer: int, *windows: tuple[Window, str | None], gather: Window | None = None, **deferred: Any) -> PlannedHalf:
    """A half that is recomputed in these windows."""
    return PlannedHalf(layer, MLP, MLP.recomputable if windows else (), windows, gather, deferred)


def recompute(layer: int, until: str | None = None, since: str | None = None, gathered: Window | None = None) -> Task:
    return Task("recompute", (layer, "mlp"), until, since, gathered)


def test_only_the_first_part_of_a_recomputation_is_the_one_whose_input_is_gathered() -> None:
    gather, first, second = at("bwd", 3), at("bwd", 3, ordinal=2), at("bwd", 2, ordinal=2)
    halves = [mlp(1, (first, "activation"), (second, None), gather=gather), mlp(2), mlp(3)]
    stage = Timetable([halves], Layout(sequence_parallel=True))
    found = [stage.backward(0).at("in", window) for window in (first, second)]
    assert found == [(recompute(1, "activation", gathered=gather),), (recompute(1, since="activation"),)]


@pytest.mark.parametrize(("window", "early"), [(RECV_BACKWARD, True), (at("bwd", 2), False), (ON_DEMAND, False)], ids=str)
def test_what_is_recomputed_before_its_own_backward_stays_where_all_goes_half_by_half(window: Window, early: bool) -> None:
    half = mlp(1, (window, None))
    for which in ("all", "at_once"):
        offload = Offload(bytes=1000, pace_bytes=100, half_by_half=which)  # type: ignore[arg-type]
        assert offload.stays(half) == (early and which == "all")


def test_an_input_that_is_gathered() -> None:
    """After a wait; the recomputation knows it, and the backward does not wait for it again. What is gathered on demand is
    recomputed on demand, because no window may communicate (rule R2)."""
    gather, window = at("bwd", 2), at("bwd", 2, ordinal=2)
    tasks = {
        gather: {("after", gather): (Task("gather", (1, "mlp")),), ("in", window): (recompute(1, gathered=gather),)},
        ON_DEMAND: {("demand", (1, "mlp")): (recompute(1, gathered=ON_DEMAND),)},
    }
    for place, expected in tasks.items():
        stage = Timetable([[mlp(1, (window, None), gather=place), mlp(2)]], Layout(sequence_parallel=True))
        assert stage.backward(0).tasks == expected
        upper, lower = stage.backward(0).halves
        assert [[wait.gathered for wait in half.waits] for half in (upper, lower)] == [[None] * 3, [None, place, None]]


GATED, CAPTURED = OPAQUE["gated_attention"], in_graph(ATTENTION, ["attn"])


def below(above: Section, *, gathers: bool, sequence_parallel: bool) -> Pass:
    """The backward of a checkpointed layer that begins ahead, with such an attention half in the layer above."""
    attention = PlannedHalf(
        1, ATTENTION, ATTENTION.names, checkpoint=True, fed_behind=1, ahead_to=ATTENTION.row_parallel, gathers_ahead=gathers
    )
    halves = [attention, PlannedHalf(1, MLP, MLP.names, checkpoint=True), PlannedHalf(2, above), mlp(2)]
    return Timetable([halves], Layout(sequence_parallel=sequence_parallel)).backward(0)


@pytest.mark.parametrize(("gathers", "sequence_parallel"), [(False, False), (False, True), (True, True)])
def test_nothing_begins_ahead_where_it_would_never_begin(gathers: bool, sequence_parallel: bool) -> None:
    """No hook is on a half that is kept whole, and a gated delta net has no core: what was planned to begin there began nowhere,
    and the simulated step was too short."""
    begun = below(ATTENTION, gathers=gathers, sequence_parallel=sequence_parallel)
    assert sum(task.do == "begin" for tasks in begun.tasks.values() for task in tasks) == 1 + gathers
    assert bool(begun.beginning("core")) == gathers
    without_core = [section for section in filling("attention") if not section.core and not section.kept_whole]
    assert without_core
    for above in (CAPTURED, GATED, *(without_core if gathers else [])):
        late = below(above, gathers=gathers, sequence_parallel=sequence_parallel)
        again = (Task("recompute", (1, "attention")), recompute(1))
        assert late.tasks == {("enter", (1, "mlp")): again}


def test_waits_that_a_half_has() -> None:
    """Collectives where tensor-parallel ranks are, exchanges where experts are shared out."""
    halves = [PlannedHalf(1, ATTENTION), PlannedHalf(1, EXPERTS), PlannedHalf(2, ATTENTION), PlannedHalf(2, EXPERTS)]
    exchanges = len(EXPERTS.exchanges_of["bwd"])
    for layout, numbers in (
        (Layout(), [0, 1, 0, 1]),
        (Layout(collectives=False, exchanging={2}), [exchanges, 0, 0, 0]),
        (Layout(sequence_parallel=True, exchanging={1}), [0, 3, exchanges, 3]),
    ):
        assert [len(half.waits) for half in Timetable([halves], layout).backward(0).halves] == numbers


@pytest.mark.parametrize(("passing", "layer", "busy"), [("bwd", 3, (3,)), ("fwd", 5, (1, 5)), ("fwd", 2, (2, 6))])
def test_halves_in_which_a_chunk_is_served(passing: str, layer: int, busy: tuple[int, ...]) -> None:
    """In a backward its own, in a forward those at the same place in each chunk."""
    halves = [mlp(each, linear_fc1=(at(passing, layer),)) if each == layer else mlp(each) for each in range(1, 9)]
    stage = Timetable([halves[:4], halves[4:]])
    assert sorted(number for chunk in stage.busy_halves for number, _ in chunk) == list(busy)


def test_weight_gradients_run_in_forwards_of_any_chunk() -> None:
    """At the same place; the second layer of a chunk that has only one has no wait. A backward's wait is the layer's own, and a
    receive is that of the chunk whose gradient it is."""
    fourth, own = at("fwd", 4), at("bwd", 3)
    chunks = [[mlp(3, linear_fc1=(fourth, own, RECV_BACKWARD)), mlp(4)], [mlp(7, linear_fc2=(at("fwd", 7),))], [mlp(8), mlp(9)]]
    stage = Timetable(chunks)
    of_fc1 = (Task("weight_gradient", (3, "mlp"), "linear_fc1"),)
    of_fc2 = (Task("weight_gradient", (7, "mlp"), "linear_fc2"),)
    found = [{moment.place: tasks for moment, tasks in stage.forward(chunk).tasks.items()} for chunk in range(3)]
    assert found == [{at("fwd", 3): of_fc2, fourth: of_fc1}, {at("fwd", 7): of_fc2}, {at("fwd", 8): of_fc2, at("fwd", 9): of_fc1}]
    assert stage.backward(0).at("in", own) == of_fc1
    assert [stage.receive(chunk).at("in", RECV_BACKWARD) for chunk in range(3)] == [of_fc1, (), ()]


def test_a_chunk_without_layers_has_no_forward_to_wait_in() -> None:
    stage = Timetable([[mlp(1, linear_fc1=(at("fwd", 1),))], []])
    assert not stage.forward(1).tasks


def test_a_chunk_that_keeps_everything_hides_what_others_do() -> None:
    window = at("fwd", 1)
    stage = Timetable([[mlp(1), mlp(2, (at("bwd", 2), None), linear_fc1=(window,))]]).beside_kept(0)
    assert stage.forward(1).at("in", window) == (Task("weight_gradient", (2, "mlp"), "linear_fc1"),)
    assert not stage.backward(1).tasks
    second = Timetable([[mlp(1)], [mlp(5), mlp(6)]]).beside_kept(1)
    assert [half.layer for half in second.chunks[-1]] == [5, 6], "its layers are that chunk's"
