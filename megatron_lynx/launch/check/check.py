"""One checked step, and the count of them.

Megatron's `train_step` is given another function in the place of its schedule. The first time it is called in a step:

    [1] what the pass will read and change is taken
    [2] once, where memory is counted: a pass under the plan, to measure what stock needs
    [3] hooks lifted: stock; its losses and gradients go to the host
    [4] the plan; Megatron's step goes on from what it leaves behind
    [5] all ranks compare; where one differs, stock runs again, and what differs is said: stock from itself, or the plan from stock
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_lynx.apply import Installation
from megatron_lynx.apply.assignment import order_of
from megatron_lynx.apply.match import LiveRun, live_run
from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.agreement import agree, on_rank_0
from megatron_lynx.launch.check.batches import DataIterators
from megatron_lynx.launch.check.outcome import Difference, Outcome, differences
from megatron_lynx.launch.check.reference import IN_WORDS, Kind, Need, out_of_memory, room_bytes, stock
from megatron_lynx.launch.check.state import State
from megatron_lynx.units import format_bytes

Schedule = Callable[..., Any]
"""Megatron's `forward_backward_func`, called with keywords."""


@dataclass(frozen=True)
class _Found:
    """What one rank compared in one step."""

    parameters: int
    losses: int
    size_bytes: int
    differences: tuple[Difference, ...]


class Check:
    """The first `steps` steps of a run. `against`: fitting, none or full."""

    def __init__(self, steps: int, against: str) -> None:
        self._left = steps
        self._against = against
        self._need: Need | None = None
        self._compared: list[_Found] = []
        """Of all ranks, in the latest step."""
        self._kinds: set[str] = set()
        self.steps = 0
        """Checked so far."""

    def around(self, schedule: Schedule, optimizer: Any, installation: Installation) -> Schedule:
        """What `train_step` is to call instead. A later call in the same step (a rerun that Megatron asks for) is not checked."""
        if self._left == 0:
            return schedule
        self._left -= 1
        checked = iter([True])

        def forward_backward(*, model: Any, data_iterator: Any, **others: Any) -> Any:
            if not next(checked, False):
                return schedule(model=model, data_iterator=data_iterator, **others)
            step = _Step(schedule, model, data_iterator, others, optimizer, installation)
            return self._run(step)

        return forward_backward

    def _run(self, step: _Step) -> Any:
        kind = self._kind(step)
        kind, reference = self._reference(step, kind)
        losses = step.planned()
        self._settle(step, kind, reference, Outcome.of(losses, step.run.chunks))
        return losses

    def _kind(self, step: _Step) -> Kind:
        """Equal on all ranks."""
        if self._against != "fitting":
            return "full" if self._against == "full" else "none"
        room = room_bytes()
        if room is not None and self._need is None:
            self._need = step.measured()  # [2]
        fits = room is None or self._need is None or self._need.fits(room)
        kind: Kind = "none" if all(_of_all_ranks(fits)) else "full"
        if kind == "full" and kind not in self._kinds:
            on_rank_0(f"megatron-lynx: --lynx-check: {IN_WORDS['none']} does not fit in memory, so the plan is compared with full")
        return kind

    def _reference(self, step: _Step, kind: Kind) -> tuple[Kind, Outcome]:
        """[3]"""
        try:
            return kind, step.stock(kind)
        except torch.OutOfMemoryError as error:
            if kind == "full" or self._against == "none" or _ranks() > 1:
                raise out_of_memory(self.steps + 1, error) from None
        gc.collect()  # the failed pass, which the error's traceback held
        torch.cuda.empty_cache()
        on_rank_0(f"megatron-lynx: --lynx-check: {IN_WORDS['none']} ran out of memory, so the plan is compared with full")
        self._against = "full"
        return "full", step.stock("full")

    def _settle(self, step: _Step, kind: Kind, reference: Outcome, planned: Outcome) -> None:
        """[5] Returns on all ranks, or ends all of them."""
        found = step.differences(reference, planned, (IN_WORDS[kind], "the plan"))
        self._compared = _of_all_ranks(
            _Found(len(reference.gradients), len(reference.losses), reference.size_bytes, tuple(found[:1]))
        )
        self.steps += 1
        self._kinds.add(kind)
        if not any(rank.differences for rank in self._compared):
            return
        counts = _of_all_ranks(len(found))
        repeated = step.differences(reference, step.stock(kind), ("the first run", "the second"))
        first_repeated = [rank for rank in _of_all_ranks(tuple(repeated[:1])) if rank]
        if first_repeated:
            agree(_not_repeatable(self.steps, kind, min(first_repeated)[0]))
        agree(_plan_differs(self.steps, kind, min(rank.differences for rank in self._compared if rank.differences)[0], sum(counts)))

    def summary(self) -> str | None:
        """What was checked, where all was equal; to be said by rank 0."""
        if not self._compared:
            return None
        parameters, losses, size_bytes = (
            sum(getattr(rank, name) for rank in self._compared) for name in ("parameters", "losses", "size_bytes")
        )
        against = " and ".join(IN_WORDS[kind] for kind in ("none", "full") if kind in self._kinds)
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        where = "" if len(self._compared) == 1 else f" on {len(self._compared)} ranks"
        return (
            f"checked {steps} against {against}: in each, {losses} losses and the gradients of {parameters} parameters "
            f"({format_bytes(size_bytes)}{where}) are equal in every bit"
        )

    @property
    def over(self) -> bool:
        return self._left == 0


class _Step:
    """Passes over one step of Megatron's, each from the same state and the same batches."""

    def __init__(
        self, schedule: Schedule, model: Any, data_iterator: Any, others: dict[str, Any], optimizer: Any, installation: Installation
    ) -> None:
        run = live_run(model)
        assert isinstance(run, LiveRun)  # the plan is installed for it
        self.run = run
        self._schedule = schedule
        self._model = model
        self._optimizer = optimizer
        self._installation = installation
        self._iterators = DataIterators(data_iterator)
        self._others = others
        self._state = State(run.chunks)  # [1]
        self._fresh = True

    def planned(self) -> Any:
        """The losses. [4]"""
        trace = self._installation.engine.trace
        with self._once_more():
            if trace.enabled:
                trace.start()  # without what ran before
            return self._pass()

    def stock(self, kind: Kind) -> Outcome:
        with self._once_more(), self._installation.lifted(), stock(kind, self.run.chunks):
            return Outcome.of(self._pass(), self.run.chunks).on_host()

    def measured(self) -> Need:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with self._once_more():
            self._pass()
        counts = self._installation.engine.take_counts()
        run, microbatches = self.run, self._others["num_microbatches"]
        passes = microbatches * len(run.chunks)
        let_go = (counts.let_go_bytes + counts.offloaded_bytes) // passes
        return Need(torch.cuda.max_memory_allocated() - before, let_go * _most_in_flight(run, microbatches))

    def differences(self, one: Outcome, other: Outcome, names: tuple[str, str]) -> list[Difference]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return differences(one, other, rank=rank, stage=self.run.stage, names=names)

    def _pass(self) -> Any:
        return self._schedule(model=self._model, data_iterator=self._iterators.stand_in, **self._others)

    @contextmanager
    def _once_more(self) -> Iterator[None]:
        """From the state in which Megatron called its schedule: gradients are zero, nothing was read."""
        if not self._fresh:
            self._state.restore()
            self._iterators.again()
            for chunk in self._model:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            torch.cuda.empty_cache()  # one pass's blocks would be the next one's fragments
        self._fresh = False
        yield


def _most_in_flight(run: LiveRun, microbatches: int) -> int:
    count = most = 0
    for turn in order_of(run.pipeline, run.stage, len(run.chunks), run.group_size)(microbatches).all:
        count += 1 if turn.kind == "F" else -1
        most = max(most, count)
    return most


def _plan_differs(step: int, kind: Kind, first: Difference, count: int) -> LynxError:
    places = "one place" if count == 1 else f"{count} places, the first of them here"
    todo = "train without this plan, and report it with the plan and this launch's arguments"
    problem = Problem(first.place, first.found, "the same bits", todo)
    return LynxError(f"--lynx-check: in step {step} the plan and {IN_WORDS[kind]} differ in {places}", [problem])


DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What `--deterministic-mode` of Megatron 0.19 sets in the environment; that of 0.16 to 0.18 leaves all but a check to the user."""


def _not_repeatable(step: int, kind: Kind, first: Difference) -> LynxError:
    wanted = ", ".join(f"{name}={value} (here {os.environ.get(name, 'not set')})" for name, value in DETERMINISTIC.items())
    todo = f"launch with --deterministic-mode, without flash attention and --cross-entropy-loss-fusion, and set {wanted}"
    problem = Problem(first.place, first.found, "the same bits: nothing can be compared with what differs from itself", todo)
    return LynxError(f"--lynx-check: in step {step} {IN_WORDS[kind]} differs from itself when it runs twice", [problem])


def _of_all_ranks(mine: Any) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
