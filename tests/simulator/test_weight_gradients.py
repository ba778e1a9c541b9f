"""Deferred weight gradients, simulated: one layer by hand (every item 1 s forward, 2 s backward, a collective 5 s), the queue,
and the cool-down beside zero-bubble's published schedule."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ATTENTION, DENSE, MLP
from megatron_lynx.anatomy.address import RECV_BACKWARD, SEND_BACKWARD, WindowAddress
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import PricedSection, WeightGradient, weight_gradient
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.simulator.halves import segments
from megatron_lynx.simulator.passes import Entry
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.walk import Treated, Walk
from megatron_lynx.timetable import Linear, Pass, PlannedHalf, Task
from tests.simulator.by_hand import passes_of_halves
from tests.simulator.test_halves import profile_of

A_SECOND = WeightGradient(1.0, 3, 4)
PLENTY = 10**6


def passes_of(waits, tensor=2, most_bytes=PLENTY, interference=1.0, **reduced):
    """A layer that recomputes nothing. `waits`: of the linears that defer their weight gradients."""
    halves = tuple(
        Treated(
            PlannedHalf(1, section, deferred={name: waits[name] for name in reversed(section.linears) if name in waits}),
            PricedSection(HalfMemory(resident=50, regenerated=0, tail=15)),
            deferred={name: A_SECOND for name in reversed(section.linears) if name in waits},
        )
        for section in DENSE.values()
    )
    return passes_of_halves(halves, profile_of(interference, tensor=tensor), deferral=(0, most_bytes), **reduced)


def step_of(passes, microbatches=2):
    return simulate(with_flushes(1, microbatches), [[passes]])


def at(passing, half, ordinal=0):
    return WindowAddress(passing, 1, half, ordinal)


def test_what_is_deferred_hides_nothing_beside_it():
    """Without its own wgrad the reduction of a column-parallel linear's gradient is exposed whole."""
    profile = profile_of(tensor=2)
    stock, row, both = (segments(profile, "bwd", MLP, off) for off in ((), ("linear_fc2",), MLP.linears))
    assert (stock.compute_s, stock.windows_s) == ((8.0, 2.0), (4.0,))
    assert (row.compute_s, row.windows_s) == ((7.0, 2.0), (4.0,))
    assert (both.compute_s, both.windows_s) == ((6.0, 2.0), (5.0,))
    whole = profile_of(tensor=2, sequence_parallel=True)
    assert segments(whole, "bwd", MLP, MLP.linears).windows_s == (5.0, 4.0, 5.0)
    assert sum(segments(whole, "bwd", MLP, MLP.linears).compute_s) == 8.0


def test_a_wait_hides_what_it_has_room_for():
    """The row-parallel linear's in the wait of its own half: 4 s long, of which 1 s is filled; then under slowdown."""
    stock, filled = step_of(passes_of({})), step_of(passes_of({"linear_fc2": (at("bwd", "mlp"),)}))
    assert filled.step_s == stock.step_s - 2, "one second a micro-batch"
    assert (filled.total(0, "filled_s"), filled.total(0, "unfilled_s")) == (2.0, 0.0)
    slowed = step_of(passes_of({"linear_fc2": (at("bwd", "mlp"),)}, interference=8.0))
    assert (slowed.total(0, "filled_s"), slowed.total(0, "unfilled_s")) == (1.0, 1.0), "4 s have room for half a second of it"
    assert slowed.step_s == stock.step_s - 1


def test_a_forward_takes_what_the_backward_before_it_left():
    """Of the first micro-batch; the last one's is flushed at the end of its backward."""
    waits = {"linear_fc1": (at("fwd", "attention"),)}
    stock, filled = step_of(passes_of({}), 3), step_of(passes_of(waits), 3)
    assert (filled.total(0, "filled_s"), filled.total(0, "unfilled_s")) == (2.0, 1.0)
    assert filled.step_s == stock.step_s - 3 + 1 + 3, "the reduction that it hid is a second longer each time"
    spans = [span for span in filled.timeline().ranks[0] if span.kind == "weight_gradient"]
    assert [(span.name, span.window) for span in spans] == [
        ("weight gradient linear_fc1(1)", "fwd.attention.0@1"),
        ("weight gradient linear_fc1(1)", "fwd.attention.0@1"),
        ("weight gradient linear_fc1(1)", "flushed"),
    ]


def test_entries_hold_their_operands_until_they_run():
    """From when their half no longer does: at the beginning of the next forward one micro-batch's are there."""
    waits = {"linear_fc1": (at("fwd", "mlp"),), "linear_fc2": (at("bwd", "attention"),)}
    filled = step_of(passes_of(waits), 2)
    _, second = (each for each in filled.executed[0] if each.action.kind == "F")
    curve = filled.memory(0)
    held = [size for time_s, size in zip(curve.times_s, curve.bytes, strict=True) if time_s <= second.start_s]
    assert held[-1] == A_SECOND.bytes, "linear_fc1's; linear_fc2's ran in the backward"
    assert curve.bytes[-1] == 0
    assert min(curve.bytes) == 0


def test_what_does_not_fit_runs_at_once():
    """A bound of one entry: the second one makes the first one run, which then hides nothing."""
    waits = {"linear_fc1": (at("fwd", "mlp"),), "linear_fc2": (at("fwd", "mlp"),)}
    roomy, tight = step_of(passes_of(waits)), step_of(passes_of(waits, most_bytes=A_SECOND.bytes))
    assert (roomy.total(0, "filled_s"), roomy.total(0, "unfilled_s")) == (2.0, 2.0)
    assert (tight.total(0, "filled_s"), tight.total(0, "unfilled_s")) == (1.0, 3.0)
    assert max(tight.memory(0).bytes) <= max(roomy.memory(0).bytes)


FC1, FC2 = (Entry(Linear(1, "mlp", name), 0, A_SECOND) for name in MLP.linears)


def walk_of(pending, chunk=0, most_bytes=PLENTY):
    return Walk({}, (chunk, most_bytes), pending, Pass())


def tasks_of(*entries):
    return [Task("weight_gradient", entry.of[:2], entry.of.name) for entry in entries]


def ran(walk):
    return [(span.name, span.window) for span in walk.over().spans]


def test_entries_of_a_linear_run_in_the_order_in_which_they_came():
    walk = walk_of((FC1, FC2), most_bytes=2 * A_SECOND.bytes)
    walk.defer(FC1.of, [A_SECOND])
    assert ran(walk) == [("weight gradient linear_fc1(1)", "flushed")], "the oldest one of the chunk"
    assert walk.pending == [FC2, FC1]
    walk.during(RECV_BACKWARD, tasks_of(FC1))
    assert ran(walk)[1:] == [("weight gradient linear_fc1(1)", RECV_BACKWARD)]
    walk.during(RECV_BACKWARD, tasks_of(FC1))
    assert len(ran(walk)) == 2, "there is none left"
    other = walk_of(walk.pending, chunk=1, most_bytes=A_SECOND.bytes)
    other.flush()
    assert other.pending == [FC2], "another chunk's are not its own"
    other.defer(FC1.of, [WeightGradient(1.0, 8, 0)])
    assert other.pending == [FC2], "what is larger than the bound runs itself"
    assert len(ran(other)) == 1


@pytest.mark.parametrize(("wait", "filled_s"), [(at("fwd", "mlp"), 1.0), (at("bwd", "mlp", 2), 0.0)])
def test_the_last_backward_defers_nothing_where_gradients_are_reduced_meanwhile(wait, filled_s):
    """What a linear has left then runs right before its own (as in the runtime, with --overlap-grad-reduce)."""
    waits = {"linear_fc2": (wait,)}
    stock, later, reduced = (
        step_of(passes).executed[0] for passes in (passes_of({}), passes_of(waits), passes_of(waits, reduced_in_backward=True))
    )
    contents = [each.content for each in reduced if each.action.kind != "R"]
    assert [each.action for each in reduced] == [each.action for each in later]
    assert (sum(content.filled_s for content in contents), contents[-1].unfilled_s) == (filled_s, 1.0 - filled_s)
    assert contents[-1].seconds == stock[-1].content.seconds + 1.0 - filled_s
    assert contents[1].seconds == stock[1].content.seconds - 1.0, "the one before defers"
    assert sum(change for content in contents for _, change in content.memory) == 0


def zero_bubble_step_s(pipeline, microbatches, forward_s, backward_s, weight_s):
    """ZB-H1 (Qi et al., ICLR '24), without messages: 1F1B's forwards and backwards, every gradient handed on before its weight
    gradients, which stage s computes s micro-batches later; what is left fills the cool-down and the end."""
    orders = []
    for stage in range(pipeline):
        warmup = pipeline - 1 - stage
        order = [("F", number) for number in range(warmup)]
        for number in range(microbatches):
            order += [("F", number + warmup)] * (number + warmup < microbatches) + [("B", number)]
            order += [("W", number - stage)] * (number >= stage)
        orders.append(order + [("W", number) for number in range(microbatches - stage, microbatches)])
    takes_s, done, clocks = {"F": forward_s, "B": backward_s, "W": weight_s}, {}, [0.0] * pipeline
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, number = order[0]
                from_stage = stage - 1 if kind == "F" else stage + 1 if kind == "B" else None
                needed = kind, number, from_stage
                if from_stage in range(pipeline) and needed not in done:
                    break
                clocks[stage] = max(clocks[stage], done.get(needed, 0.0)) + takes_s[kind]
                done[kind, number, stage] = clocks[stage]
                order.pop(0)
    return max(clocks)


@pytest.mark.parametrize("pipeline", [2, 4])
def test_cooldown_beside_zero_bubble(pipeline):
    """A plan fills the receives of cool-down, but not 1F1B's bubble: a chunk's last backward computes what is left before its
    gradient is sent, because gradients may be read behind it, and the stages before wait for it. ZB-H1 sends first: its bubble is
    (p - 1)(F + B - W), that of 1F1B (p - 1)(F + B + W)."""
    stock, microbatches = passes_of({}, tensor=1), 2 * pipeline
    everything = {name: (RECV_BACKWARD,) for section in (ATTENTION, MLP) for name in section.linears}
    schedule = with_flushes(pipeline, microbatches)
    ours = simulate(schedule, [[passes_of(everything, tensor=1)]] * (pipeline - 1) + [[stock]])
    plain = simulate(schedule, [[stock]] * pipeline)
    forward_s, backward_s, weight_s = 11.0, 18.0, 4.0
    each_s, others = forward_s + backward_s + weight_s, pipeline - 1
    assert ours.step_s == plain.step_s == (microbatches + others) * each_s
    assert ours.bubble_s(0) - ours.total(0, "filled_s") == plain.bubble_s(0) == others * each_s
    assert ours.total(0, "filled_s") > 0
    zero_bubble_s = zero_bubble_step_s(pipeline, microbatches, forward_s, backward_s, weight_s)
    assert zero_bubble_s == microbatches * each_s + others * (forward_s + backward_s - weight_s)


def handed_on(pipeline, microbatches, stages, **more):
    """A step in which these stages send their input's gradient before their weight gradients; and the stock step."""
    stock, send = passes_of({}, tensor=1), {"read_after_send": True, **more}
    everything = {name: (SEND_BACKWARD,) for section in (ATTENTION, MLP) for name in section.linears}
    ours = passes_of(everything, tensor=1, **send)
    schedule = with_flushes(pipeline, microbatches)
    return simulate(schedule, [[ours if stage in stages else stock] for stage in range(pipeline)]), simulate(
        schedule, [[stock]] * pipeline
    )


@pytest.mark.parametrize("pipeline", [2, 4])
def test_gradients_sent_before_weight_gradients(pipeline):
    """Every stage but the first: the cool-down is shorter by p - 1 times W, so 1F1B's bubble is (p - 1)(F + B). ZB-H1 also fills
    it, with the first stage's. Of one stage alone, once W. Where gradients are reduced in the last backward, nothing. Backwards
    before cool-down delay none."""
    forward_s, backward_s, weight_s, microbatches = 11.0, 18.0, 4.0, 2 * pipeline
    ours, stock = handed_on(pipeline, microbatches, range(1, pipeline))
    assert stock.step_s == (microbatches + pipeline - 1) * (forward_s + backward_s + weight_s)
    assert ours.step_s == stock.step_s - (pipeline - 1) * weight_s
    assert ours.step_s >= zero_bubble_step_s(pipeline, microbatches, forward_s, backward_s, weight_s)
    assert handed_on(pipeline, microbatches, [1])[0].step_s == stock.step_s - weight_s
    assert handed_on(pipeline, microbatches, range(1, pipeline), reduced_in_backward=True)[0].step_s == stock.step_s
    assert sum(size for _, size in ours.executed[1][-1].content.memory) == -4 * A_SECOND.bytes, "one by one they are freed"
    assert ours.memory(1).bytes[-1] == 0
    left = [[each.action.micro_batch for each in stage if each.action.kind == "W"] for stage in ours.executed]
    assert left == [[], *([*range(microbatches - max(1, pipeline - 1 - stage), microbatches)] for stage in range(1, pipeline))]


def test_the_other_half_is_priced_where_a_profile_does_not_know_it():
    profile = profile_of(tensor=2)
    half = profile.mlp.model_copy(
        update={"items": {name: item.model_copy(update={"wgrad_s": 0.0}) for name, item in profile.mlp.items.items()}}
    )
    assert weight_gradient(profile.model_copy(update={"mlp": half}), MLP, "linear_fc1").seconds == 1.0


def test_a_wait_runs_its_linears_in_the_order_of_the_plan():
    """What does not fit is left over of the last one."""
    walk = walk_of((FC1, FC2))
    walk.during(RECV_BACKWARD, tasks_of(FC2, FC1), room_s=1.0)
    assert ran(walk) == [("weight gradient linear_fc2(1)", RECV_BACKWARD), ("weight gradient linear_fc1(1)", "flushed")]
    assert walk.pending == []
