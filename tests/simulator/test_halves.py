"""One layer by hand: every item takes 1 s forward and 2 s backward (half of a linear's is wgrad), an all-reduce 5 s."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ATTENTION, MLP, PASSES, Collective, Section
from megatron_lynx.anatomy.address import WindowAddress
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import PricedSection
from megatron_lynx.profiler.profile import BlockProfile, LinkPoint
from megatron_lynx.simulator.halves import segments
from megatron_lynx.simulator.passes import PHASES
from megatron_lynx.simulator.walk import Treated
from megatron_lynx.timeline import Passes
from megatron_lynx.timetable import PlannedHalf
from tests.profiler.made_up import made_up_profile
from tests.simulator.by_hand import passes_of_halves
from tests.tiny_jobs import tiny_job

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "p2p")


def profile_of(interference=1.0, **layout):
    made_up = made_up_profile(tiny_job(**layout))
    halves = {}
    for name in ("attention", "mlp"):
        half = made_up.half(name)
        items = {
            item: costs.model_copy(
                update={
                    "forward_s": 1.0,
                    "backward_s": 2.0,
                    "dgrad_s": 1.0 * item.startswith("linear"),
                    "wgrad_s": 1.0 * item.startswith("linear"),
                }
            )
            for item, costs in half.items.items()
        }
        halves[name] = half.model_copy(update={"items": items})
    links = tuple(LinkPoint(kind=kind, bytes=made_up.message_bytes, seconds=5.0) for kind in KINDS)
    return made_up.model_copy(update={**halves, "links": links, "interference": interference})


def layer(recompute_s, **attention):
    """An attention half that recomputes and an MLP half that does not."""
    where = {"stretches": attention.pop("stretches")} if "stretches" in attention else {}
    planned = PlannedHalf(1, ATTENTION, ATTENTION.names, **where)
    price = PricedSection(HalfMemory(resident=10, regenerated=30, tail=12), recompute_s, stops=attention.pop("stops", {}))
    recomputing = Treated(planned, price, **attention)
    return recomputing, Treated(PlannedHalf(1, MLP), PricedSection(HalfMemory(resident=50, regenerated=0, tail=15)))


IN_WINDOW = {"stretches": ((WindowAddress("bwd", 1, "mlp", 0), None),)}


def test_compute_lies_around_the_windows():
    profile = profile_of(tensor=2)
    forward, backward = segments(profile, "fwd", ATTENTION), segments(profile, "bwd", ATTENTION)
    assert (forward.compute_s, forward.windows_s) == ((5.0, 1.0), (5.0,))
    assert (backward.compute_s, backward.windows_s) == ((10.0, 2.0), (4.0,)), "the reduction starts before wgrad, which hides 1 s"
    assert segments(profile_of(tensor=1), "fwd", MLP).compute_s == (5.0,)


def test_compute_lies_around_the_windows_of_sequence_parallelism():
    profile = profile_of(tensor=2, sequence_parallel=True)
    forward, backward = segments(profile, "fwd", MLP), segments(profile, "bwd", MLP)
    assert (forward.compute_s, forward.windows_s) == ((1.0, 3.0, 1.0), (5.0, 5.0))
    assert (backward.compute_s, backward.windows_s) == ((2.0, 5.0, 1.0, 2.0), (5.0, 4.0, 4.0))


def test_a_collective_in_the_middle_of_a_section_is_a_window_there():
    """Data is all that it takes: here rows are exchanged behind the activation, as experts do."""
    exchange = (Collective("all_gather", "output", "code"),)
    section = Section("exchanging", MLP.half, MLP.method, MLP.items, {("fwd", True): exchange, ("bwd", True): exchange})
    profile = profile_of(tensor=2, sequence_parallel=True)
    forward, backward = (segments(profile, passing, section) for passing in PASSES)
    assert (forward.compute_s, forward.windows_s) == ((3.0, 2.0), (5.0,))
    assert (backward.compute_s, backward.windows_s) == ((6.0, 4.0), (5.0,))


@pytest.mark.parametrize(
    ("recompute_s", "interference", "window", "seconds", "hidden_s"),
    [
        (0.0, 1.0, {}, 30.0, 0.0),  # 11 items of 2 s, two windows of 4 s
        (3.0, 1.0, {}, 33.0, 0.0),
        (3.0, 1.0, IN_WINDOW, 30.0, 3.0),
        (6.0, 1.0, IN_WINDOW, 32.0, 4.0),
        (3.0, 2.0, IN_WINDOW, 31.0, 2.0),  # 4 s of window are worth 2 s of recomputation
    ],
)
def test_a_backward_is_as_long_as_its_parts_and_what_windows_leave_over(recompute_s, interference, window, seconds, hidden_s):
    passes = passes_of_halves(layer(recompute_s, **window), profile_of(interference, tensor=2))
    assert {passes.one("F", phase).seconds for phase in PHASES} == {21.0}
    for one in (passes.one("B", phase) for phase in PHASES):
        assert (one.seconds, one.hidden_s, one.exposed_s) == (seconds, hidden_s, recompute_s - hidden_s)


def test_memory_of_a_backward_step_by_step():
    """The MLP half lets go of all but 15 bytes in its window at 8 s, where the attention half is regenerated."""
    passes = passes_of_halves(layer(3.0, **IN_WINDOW), profile_of(tensor=2))
    assert passes.one("F", "warmup").memory == ((11.0, 10), (21.0, 50))
    steady = passes.one("B", "steady").memory
    assert steady == ((8.0, -35), (8.0, 30), (14.0, -15), (24.0, -28), (30.0, -12))
    assert passes.one("B", "steady").regenerated == ((8.0, 30), (24.0, -28), (30.0, -2)), "let go before what was kept"


def test_a_receive_hides_recomputations():
    attention = Treated(PlannedHalf(1, ATTENTION), PricedSection(HalfMemory(10, 0, 10)))
    received = (("pipe.recv_backward", None),)
    mlp = Treated(PlannedHalf(1, MLP, MLP.names, received), PricedSection(HalfMemory(10, 30, 12), 7.0))
    passes = passes_of_halves((attention, mlp), profile_of(tensor=2))
    assert passes.one("F", "warmup").seconds == 21.0
    for phase in ("steady", "cooldown"):
        assert passes.one("B", phase).seconds == 30.0
        assert passes.one("R", phase).seconds == 7.0


def test_embedding_and_head_are_outside_of_the_layers():
    ends = BlockProfile(forward_s=1.0, backward_s=2.0), BlockProfile(forward_s=3.0, backward_s=4.0)
    passes = passes_of_halves(layer(0.0), profile_of(tensor=2), ends)
    halves = [(span.start_s, span.end_s) for span in passes.one("F", "warmup").spans if span.kind == "forward"]
    assert halves == [(1.0, 12.0), (12.0, 22.0)]
    assert (passes.one("F", "warmup").seconds, passes.one("B", "steady").seconds) == (25.0, 36.0)


def issued(forward_s, backward_s):
    """The passes of one layer whose MLP half is issued in no time, and its attention half in so many seconds."""
    attention, mlp = layer(3.0, host=Passes(forward_s, backward_s))
    return passes_of_halves((attention, mlp), profile_of(tensor=2))


def test_no_pass_is_shorter_than_its_host_time():
    """On the device 21 s and 33 s, as above."""
    passes = issued(42.0, 40.0)
    for forward, backward in ((passes.one("F", phase), passes.one("B", phase)) for phase in PHASES):
        assert (forward.seconds, forward.host_late_s, backward.seconds, backward.host_late_s) == (42.0, 21.0, 40.0, 7.0)
        assert max(span.end_s for span in forward.spans) == 42.0


def test_a_pass_that_waits_for_the_host_does_everything_later():
    """Twice as long: what is held is held from a time twice as late, and as much of it."""
    late, alone = issued(42.0, 0.0).one("F", "steady"), issued(0.0, 0.0).one("F", "steady")
    assert late.memory == tuple((2 * at_s, change) for at_s, change in alone.memory)


def test_host_time_that_the_device_outlasts_changes_nothing():
    known, unknown = issued(21.0, 33.0), issued(0.0, 0.0)
    for kind in ("F", "B"):
        for one, other in ((known.one(kind, phase), unknown.one(kind, phase)) for phase in PHASES):
            assert (one.seconds, one.memory, one.spans, one.host_late_s) == (other.seconds, other.memory, other.spans, 0.0)
