"""What a plan's tasks run beside: on one rank, in the order in which the host does it. Runs inside `RankPool`.

    issued allreduce 3        torch.distributed was asked for it                    `tests.instruments.posted`, below all hooks
    recompute attention(2)       a task of a window, named as the plan names it        what the runtime does for the task
    waited allreduce 3        somebody waits for it: compute comes behind it

Whether a collective is asynchronous, and who turned it into a window, does not count here: only when it was issued, when it was
waited for, and what was done between. That is all that a window is for, and no gradient shows whether it is so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from unittest import mock

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.instruments.posted import MESSAGES, Posted, WorkListener, listening_to_works

GRADIENT = "gradient"
OUTSIDE = (ON_DEMAND, "flushed")
"""Where the runtime says that a task ran which ran in no window."""


@dataclass(frozen=True)
class Event:
    what: Literal["issued", "waited", "recompute", "weight gradient", "gather", "midway", "site"]
    """`midway`: backward comes to the core attention of a half in whose midst something may begin. `site`: a checkpoint comes to
    one while a gradient is gathered beside it."""
    name: str
    """Of a task what it is about, `attention(2)`; of a work the method of `ProcessGroup`, or `gradient`: it is received."""
    window: str = ""
    """Of a task: the window that it runs in; of a gather that it runs behind."""
    work: int = 0
    """Of a work: which one."""

    def __str__(self) -> str:
        return f"{self.what} {self.name}"


@dataclass
class Timeline:
    """All events of one step."""

    events: list[Event] = field(default_factory=list)

    @property
    def tasks(self) -> list[Event]:
        """Recomputations and weight gradients that ran in a window, as the runtime says."""
        return [event for event in self.events if event.what in ("recompute", "weight gradient") and event.window not in OUTSIDE]

    @property
    def gathers(self) -> list[Event]:
        """Those that ran behind a window."""
        return [event for event in self.events if event.what == "gather" and event.window not in OUTSIDE]

    def window_of(self, task: Event) -> list[str]:
        """From the issue of what a task runs beside to the wait for it. Empty if nothing was under way: what is waited for next,
        of the kind that its window is of, was issued behind the task, or somebody had waited for it before."""
        at = self._place(task)
        over = {event.work for event in self.events[:at] if event.what == "waited"}
        issued = {event.work: place for place, event in enumerate(self.events[:at]) if event.what == "issued"}
        for place, event in enumerate(self.events[at:], at):
            if event.work in self._gathered or not _is_of(event, task.window):
                continue
            if event.what == "waited" and event.work in issued.keys() - over:
                return [str(one) for one in self.events[issued[event.work] : place + 1] if one.work in (0, event.work)]
            break
        return []

    def beside(self, gather: Event) -> list[str]:
        """What was issued and done between a gather's issue and the first wait for it."""
        at = self._place(gather)
        begin = next(place for place, event in enumerate(self.events[at:], at) if event.what == "issued")
        work = self.events[begin].work
        end = next(place for place, event in enumerate(self.events) if event.what == "waited" and event.work == work)
        return [str(event) for event in self.events[begin + 1 : end] if event.what != "waited"]

    def _place(self, task: Event) -> int:
        return next(place for place, event in enumerate(self.events) if event is task)

    @cached_property
    def _gathered(self) -> set[int]:
        """The works of gathers of ours: they are under way beside windows, and waited for in tasks."""
        places = [place for place, event in enumerate(self.events) if event.what == "gather"]
        return {next(event.work for event in self.events[place:] if event.what == "issued") for place in places}


def _is_of(event: Event, window: str) -> bool:
    """Whether a work may be what compute waits for in a window of that name."""
    return event.what in ("issued", "waited") and (
        event.name == GRADIENT if window == RECV_BACKWARD else event.name not in (*MESSAGES, GRADIENT)
    )


def timelines(rank: int, job: Job, plans: list[Plan], training: dict[str, Any], model: dict[str, Any]) -> list[Timeline]:
    """One step under each plan."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    found = []
    with stand_in_for_fused_gradient():
        seed_random_numbers(7)
        trained = Training(job, build_model(job, **model), **training)
        for plan in plans:
            timeline = Timeline()
            with install(trained.chunks, plan), noted(timeline):
                trained.step(synthetic_batches(job, 0))
            found.append(timeline)
    return found


@contextmanager
def noted(timeline: Timeline) -> Iterator[None]:
    """Inside, what happens on this rank is noted. A plan is to be in force: receives are told apart above its hooks."""
    from megatron.core.pipeline_parallel import p2p_communication

    from megatron_lynx.runtime.engine import Engine
    from megatron_lynx.runtime.recompute import Recomputations, Recomputer
    from megatron_lynx.runtime.weight_gradients import WeightGradients

    notes = _Notes(timeline)
    with ExitStack() as stack:
        stack.enter_context(listening_to_works(notes))
        for owner, name, note in (
            (Recomputations, "recompute", notes.recompute),
            (Recomputations, "gather", notes.gather),
            (Engine, "_gather", notes.gather_task),
            (Engine, "reach", notes.reached),
            (Recomputer, "site", notes.site),
            (WeightGradients, "_compute", notes.weight_gradient),
            (p2p_communication, "_p2p_ops", notes.exchange),
            (p2p_communication, "_batched_p2p_ops", notes.exchange),
        ):
            stack.enter_context(mock.patch.object(owner, name, _noting(getattr(owner, name), note)))
        yield


def _noting(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return method(*args, **kwargs)

    return noted


class _Notes(WorkListener):
    def __init__(self, timeline: Timeline) -> None:
        self._events = timeline.events
        self._works: dict[Any, Event] = {}
        self._gradients: set[int] = set()
        """Where gradients are received."""
        self._gathers_for: str = ON_DEMAND
        """The window of the task that gathers next."""

    def posted(self, work: Any, posted: Posted, args: tuple[Any, ...]) -> None:
        is_gradient = posted.operation == "recv" and args[0][0].data_ptr() in self._gradients
        self._works[work] = Event("issued", GRADIENT if is_gradient else posted.operation, work=len(self._works) + 1)
        self._events.append(self._works[work])

    def waits(self, work: Any) -> None:
        if (issued := self._works.get(work)) is not None:
            self._events.append(Event("waited", issued.name, work=issued.work))

    def exchange(self, *, tensor_recv_next: Any, **others: Any) -> None:
        self._gradients = set() if tensor_recv_next is None else {tensor_recv_next.data_ptr()}

    def recompute(self, recomputations: Any, frame: Any, window: str, *until: Any) -> None:
        self._gathers_for = ON_DEMAND
        self._events.append(Event("recompute", f"{frame.policy.half}({frame.policy.layer})", window))

    def gather_task(self, engine: Any, frame: Any, task: Any, reached: Any) -> None:
        self._gathers_for = str(reached.place)

    def reached(self, engine: Any, through: Any, reached: Any, *of: Any) -> None:
        if reached.at == "core":
            layer, half = reached.place
            self._events.append(Event("midway", f"{half}({layer})"))

    def site(self, recomputer: Any, call: Any) -> None:
        if recomputer.frame.gathered_gradient is not None:
            self._events.append(Event("site", call.site.name))

    def gather(self, recomputations: Any, frame: Any) -> None:
        self._events.append(Event("gather", f"{frame.policy.half}({frame.policy.layer})", self._gathers_for))

    def weight_gradient(self, gradients: Any, entry: Any, window: str) -> None:
        layer, linear = entry.linear
        self._events.append(Event("weight gradient", f"{linear}({layer})", window))
