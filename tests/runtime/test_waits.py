"""What runs while an engine waits: tasks before the wait proper and behind it, by phase, within the ahead depth.

One stage, layers of MLP halves alone. Each half ends in a collective in forward, and in one in backward, right when backward
reaches it: before anything that it saved is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.anatomy import MLP
from megatron_lynx.anatomy.address import RECV_BACKWARD, Window, WindowAddress
from megatron_lynx.errors import RecomputeError
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import DONE, ChunkPolicy, Frame, MicroBatch
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule.schedule import Action
from megatron_lynx.timetable import Layout, PlannedHalf, Timetable
from tests.runtime.tiny_half import ACTIVATION, FC1, NORM, WIDTH, TinyHalf, policy, reporting_to

RECOMPUTED = frozenset([NORM, FC1, ACTIVATION])
AT_ONCE = StageOrder([(Action(0, "F", 0), "steady"), (Action(0, "B", 0), "steady")])


def backward_of(layer: int) -> WindowAddress:
    return WindowAddress("bwd", layer, "mlp", 0)


class Work:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> bool:
        self._log.append(f"waited {self._name}")
        return True


def issued(engine: Engine, work: Work) -> Any:
    """As the hooks on collectives do it."""
    window = engine.window()
    return work if window is None else window(work)


class _Collective(torch.autograd.Function):
    """Waits for the group in forward (`after`) and in backward (`before`)."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, after: Callable[[], None], before: Callable[[], None]) -> Tensor:
        ctx.before = before
        after()
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.before()
        return gradient, None, None


@dataclass
class Stage:
    """An engine and the layers of its chunks. `log` has what ran, in order."""

    places: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Where layers are recomputed; others on demand."""
    order: StageOrder = AT_ONCE
    chunks: Sequence[range] = (range(1, 4),)
    gathers: Container[int] = ()
    """Layers whose input is gathered."""
    deferred: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """Linears of the last layer, and where their weight gradients run: they are noted in place of that."""
    layout: Layout = Layout()  # noqa: RUF009
    around_collectives: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """What a half's code enters to communicate, in both passes."""
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        timetable = Timetable([[self._planned(layer) for layer in chunk] for chunk in self.chunks], self.layout)
        policies = [ChunkPolicy()] * len(self.chunks)
        self.engine = Engine(timetable, policies, order=lambda microbatches: self.order)
        self.engine.weight_gradients.run = self._filled  # type: ignore[method-assign]
        self.layers = {layer: TinyHalf(reporting_to(self.engine)) for chunk in self.chunks for layer in chunk}
        self._outputs: dict[tuple[int, int], Tensor] = {}

    def _filled(self, linear: tuple[int, str], window: str) -> None:
        self.log.append(f"{linear} in {window}")

    def _planned(self, layer: int) -> PlannedHalf:
        deferred = self.deferred if layer == self.chunks[-1][-1] else {}
        return PlannedHalf(layer, MLP, (NORM, FC1, ACTIVATION), **self.places.get(layer, {}), deferred=deferred)

    def _half(self, layer: int, chunk: int, hidden: Tensor) -> Tensor:
        more: dict[str, Any] = {"gather_site": FC1, "gather": self._gather} if layer in self.gathers else {}
        return self.engine.half(policy(RECOMPUTED, layer=layer, chunk=chunk, **more), self._code(layer), (hidden,), {})  # type: ignore

    def _code(self, layer: int) -> Callable[[Tensor], Tensor]:
        def issue(name: str) -> Callable[[], None]:
            def communicate() -> None:
                with self.around_collectives:
                    issued(self.engine, Work(self.log, name)).wait()

            return communicate

        def code(hidden: Tensor) -> Tensor:
            made = self.layers[layer](hidden)
            return _Collective.apply(made, issue(f"fwd {layer}"), issue(f"bwd {layer}"))  # type: ignore[no-any-return]

        return code

    def _gather(self, tensor: Tensor) -> tuple[Tensor, Work]:
        self.log.append("gather")
        return tensor, Work(self.log, "gather")

    def forward(self, micro_batch: int, chunk: int, microbatches: int = 2) -> None:
        hidden = torch.randn(3, WIDTH, requires_grad=True)
        with self.engine.forward_pass(micro_batch, chunk, microbatches) as ended_with:
            for layer in self.chunks[chunk]:
                hidden = self._half(layer, chunk, hidden)
            ended_with(hidden)
        self._outputs[micro_batch, chunk] = hidden
        for layer in self.layers.values():
            layer.ran.clear()

    def backward(self, micro_batch: int, chunk: int) -> None:
        output = self._outputs.pop((micro_batch, chunk))
        with self.engine.backward_pass(output):
            output.sum().backward()

    def run(self) -> list[tuple[Any, ...]]:
        """One step in the stage's order: (micro-batch, layer, window) of every recomputation."""
        self.engine.trace.start()
        for one, _ in self.order.all:
            (self.forward if one.kind == "F" else self.backward)(one.micro_batch, one.chunk)
        events = self.engine.trace.stop()
        return [(event.micro_batch, event.layer, event.window) for event in events if event.kind == "recompute"]


def within(*windows: Window, until: Sequence[str] = (), gather: Window | None = None) -> dict[str, Any]:
    """In these windows, stretch by stretch, the first ones until these items."""
    return {"stretches": tuple(zip_longest(windows, until)), "gathered": gather}


def test_recomputations_run_before_the_wait() -> None:
    stage = Stage({2: within(backward_of(3))})
    usual = stage.layers[2].fc1.forward
    stage.layers[2].fc1.forward = lambda given: (stage.log.append("fc1 of 2"), usual(given))[1]  # type: ignore
    recomputations = stage.run()
    backward = stage.log[stage.log.index("waited fwd 3") + 1 :]
    assert backward == ["fc1 of 2", "waited bwd 3", "waited bwd 2", "waited bwd 1"]
    assert recomputations == [(0, 2, "bwd.mlp.0@3"), (0, 3, "on_demand"), (0, 1, "on_demand")]
    counts = stage.engine.take_counts()
    assert (counts.recorded, counts.in_windows, counts.on_demand) == (3, 1, 2)


def test_a_half_in_its_own_window_is_not_ahead() -> None:
    stage = Stage({layer: within(backward_of(layer)) for layer in (1, 2, 3)})
    assert [window for *_, window in stage.run()] == ["bwd.mlp.0@3", "bwd.mlp.0@2", "bwd.mlp.0@1"]
    counts = stage.engine.take_counts()
    assert (counts.in_windows, counts.on_demand) == (3, 0)


def test_gathers_run_behind_the_wait() -> None:
    """And the recomputation goes on from there: the norm, which ran for the gather, does not run again."""
    places = {1: within(backward_of(2), gather=backward_of(3)), 2: within("on_demand", gather=backward_of(3))}
    stage = Stage(places, gathers=(1, 2, 3))
    recomputations = stage.run()
    backward = stage.log[stage.log.index("waited fwd 3") + 1 :]
    assert backward == ["waited bwd 3", "gather", "gather", "gather", "waited bwd 2", "waited bwd 1"]
    assert recomputations == [(0, 3, "on_demand"), (0, 1, "bwd.mlp.0@2"), (0, 2, "on_demand")]
    assert {layer: stage.layers[layer].ran for layer in (1, 2, 3)} == {1: [NORM, FC1], 2: [NORM, FC1], 3: [NORM, FC1]}
    assert stage.engine.take_counts().gathered == 3


def test_a_recomputation_whose_gather_was_missed_does_not_gather_in_its_window() -> None:
    """Rule R2: it would queue behind what the window hides, and what comes behind it too. It is recomputed on demand."""
    stage = Stage({1: within(backward_of(2))}, gathers=(1, 2, 3))
    assert [window for *_, window in stage.run()] == ["on_demand"] * 3
    backward = stage.log[stage.log.index("waited fwd 3") + 1 :]
    assert backward == ["waited bwd 3", "gather", "waited bwd 2", "gather", "waited bwd 1", "gather"]


def test_a_recomputation_over_two_windows() -> None:
    """It is one recomputation, which counts where it ends, and none of its sites runs twice."""
    stage = Stage({1: within(backward_of(3), backward_of(2), until=[FC1])})
    assert [recompute for recompute in stage.run() if recompute[1] == 1] == [(0, 1, "bwd.mlp.0@3"), (0, 1, "bwd.mlp.0@2")]
    assert stage.layers[1].ran == [NORM, FC1]
    counts = stage.engine.take_counts()
    assert (counts.in_windows, counts.on_demand) == (1, 2)


def test_a_recomputation_that_is_only_begun_ends_on_demand() -> None:
    stage = Stage({1: within(backward_of(3), until=[FC1])})
    assert [recompute for recompute in stage.run() if recompute[1] == 1] == [(0, 1, "bwd.mlp.0@3"), (0, 1, "on_demand")]
    assert stage.layers[1].ran == [NORM, FC1]
    counts = stage.engine.take_counts()
    assert (counts.in_windows, counts.on_demand) == (0, 3)


PHASES = StageOrder(
    [
        (Action(0, "F", 0), "warmup"),
        (Action(1, "F", 0), "steady"),
        (Action(0, "B", 0), "steady"),
        (Action(1, "B", 0), "cooldown"),
    ]
)


def test_hooks_of_the_half_that_waits_do_not_see_what_is_recomputed_in_its_window() -> None:
    """They took what layer 2 saves for tensors of layer 3, which waited."""
    packed: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor), lambda _: packed[0])
    stage = Stage({2: within(backward_of(3))}, order=PHASES, around_collectives=hooks)
    packed.append(torch.zeros(()))
    assert stage.run()[0] == (0, 2, "bwd.mlp.0@3")
    assert len(packed) == 1


def test_a_receive_is_a_window_of_the_backward_that_comes_next() -> None:
    stage = Stage({3: within(RECV_BACKWARD)}, order=PHASES)
    for micro_batch in (0, 1):
        stage.forward(micro_batch, 0)
    for micro_batch in (0, 1):
        received = stage.engine.receive([Work(stage.log, "first"), Work(stage.log, "second")])
        for work in received:
            work.wait()
        assert stage.log[-2:] == ["waited first", "waited second"]
        assert stage.engine.take_counts().in_windows == 1, "in the first wait only"
        stage.backward(micro_batch, 0)


def test_tasks_of_one_wait_run_in_the_plans_order() -> None:
    """Weight gradients come behind recomputations, gathers behind the wait."""
    places = {3: within(backward_of(4)), 2: within(backward_of(4)), 1: within(backward_of(2), gather=backward_of(4))}
    stage = Stage(places, chunks=(range(1, 5),), gathers=(1,), deferred={FC1: (backward_of(4),)})
    recomputations = stage.run()
    assert stage.log[4:7] == [f"(4, '{FC1}') in bwd.mlp.0@4", "waited bwd 4", "gather"]
    assert [(layer, window) for _, layer, window in recomputations if window != "on_demand"] == [
        (3, "bwd.mlp.0@4"),
        (2, "bwd.mlp.0@4"),
        (1, "bwd.mlp.0@2"),
    ]


def test_of_several_works_the_first_wait_alone_is_a_window() -> None:
    """Where a receive is waited for with a send, a second window would take a second weight gradient of each linear."""
    stage = Stage(order=PHASES, deferred={FC1: (RECV_BACKWARD,)})
    for micro_batch in (0, 1):
        stage.forward(micro_batch, 0)
    stage.backward(0, 0)
    stage.log.clear()
    for work in stage.engine.receive([Work(stage.log, "first"), Work(stage.log, "second")]):
        work.wait()
    assert stage.log == [f"(3, '{FC1}') in pipe.recv_backward", "waited first", "waited second"]
    stage.backward(1, 0)  # nodes hold the stage that holds its graph: without a backward they would stay


def test_a_recomputation_that_communicates_is_refused() -> None:
    """Rule R2: its collective would queue behind the one that it hides behind."""
    stage = Stage({2: within(backward_of(3))})
    layer = stage.layers[2]
    usual = layer.fc1.forward
    layer.fc1.forward = lambda given: (issued(stage.engine, Work(stage.log, "inner")).wait(), usual(given))[1]  # type: ignore
    with pytest.raises(RecomputeError, match="a recomputation would communicate"):
        stage.run()
    assert not stage.engine.busy


def test_a_collective_without_a_task_is_no_window() -> None:
    """It is issued as Megatron issues it; only its number counts, so that the next one keeps its name."""
    second = WindowAddress("bwd", 3, "mlp", 1)
    stage = Stage({2: within(second)}, layout=Layout(sequence_parallel=True))
    stage.forward(0, 0)
    seen = []

    def look(gradient: Tensor) -> None:
        seen.extend(stage.engine.window() is None for _ in range(3))

    stage._outputs[0, 0].register_hook(lambda gradient: None)
    output = stage._outputs[0, 0]
    assert output.grad_fn is not None
    output.grad_fn.register_prehook(look)  # behind the hook by which backward reaches the half
    stage.backward(0, 0)
    assert seen == [True, False, True]


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered again", "never gathered"])
def test_a_gathered_gradient_of_no_use_is_waited_for(gathered: bool) -> None:
    """NCCL writes its buffer until then, and the allocator would give it to another tensor. CPU ranks never show it."""
    engine, log = Engine(), []
    half = TinyHalf(reporting_to(engine))

    def begin() -> None:
        frame = engine.ledger.entered
        assert frame is not None
        frame.gradient = torch.ones(3, WIDTH)
        frame.gather_gradient(DONE)
        if gathered:
            assert engine.gathered_gradient(torch.ones(3, WIDTH)) is None, "another gradient"
            assert log == ["waited gather"]

    def code(hidden: Tensor) -> Tensor:
        return _Collective.apply(half(hidden), lambda: None, begin)  # type: ignore[no-any-return]

    with engine.forward_pass(0, 0, 1) as ended_with:
        own = policy(RECOMPUTED, gather=lambda tensor: (tensor, Work(log, "gather")))
        output = engine.half(own, code, (torch.randn(3, WIDTH, requires_grad=True),), {})
        ended_with(output)
    with engine.backward_pass(output):
        output.sum().backward()
    assert log == ["waited gather"]


def test_only_the_gather_that_fills_its_own_buffer_is_served() -> None:
    """The same half gathers its gradient, too: it would read what was gathered of its input."""
    engine, log = Engine(), []
    frame = Frame(policy(RECOMPUTED), MicroBatch(0), lambda hidden: hidden, lambda frame: None)
    buffer = torch.empty(6, WIDTH)
    frame.gathering = buffer, Work(log, "input")
    engine.ledger.enter(frame)
    assert engine.started_gather(torch.empty(6, WIDTH)) is None
    assert engine.started_gather(buffer.view(-1)) is frame.gathering[1]


def test_outside_of_schedules_an_engine_is_busy_until_all_that_was_let_go_is_back() -> None:
    """A plan that was removed in between would leave a backward nobody to ask (rule R7)."""
    engine = Engine()
    half = TinyHalf(reporting_to(engine))
    output = engine.half(policy(RECOMPUTED), half.forward, (torch.randn(3, WIDTH, requires_grad=True),), {})
    assert engine.busy
    output.sum().backward()
    assert not engine.busy


def test_a_trace_shows_every_window() -> None:
    stage = Stage()
    stage.engine.trace.start()
    stage.forward(0, 0)
    stage.backward(0, 0)
    assert [span.kind for span in stage.engine.trace.stop()].count("window") == 6


def test_a_half_in_which_nothing_happens_is_passed_over() -> None:
    """No frame, no hook on its output; backward has left the half above it when it gets there."""
    engine, entered = Engine(), []
    lower, upper = (policy(layer=1, passed_over=True), policy(RECOMPUTED, layer=2, below_passed_over=True))
    layers = {1: TinyHalf(reporting_to(engine)), 2: TinyHalf(reporting_to(engine))}
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    between = engine.half(lower, layers[1].forward, (hidden,), {})
    assert between._backward_hooks is None
    output = engine.half(upper, layers[2].forward, (between,), {})
    layers[2].fc1.weight.register_hook(lambda gradient: entered.append(engine.in_backward_of is not None))
    layers[1].fc2.weight.register_hook(lambda gradient: entered.append(engine.in_backward_of is not None))
    output.sum().backward()
    assert entered == [True, False]
    assert engine.take_counts().recorded == 1
