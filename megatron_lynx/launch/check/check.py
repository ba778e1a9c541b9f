"""One checked step, and the count of them.

Megatron's `train_step` is given another function in the place of its schedule. The first time it is called in a step:

    [1] what the pass will read and change is taken
    [2] once, where memory is counted: a pass under the plan, to measure what stock needs
    [3] hooks lifted: stock; its losses and gradients go to the host
    [4] the plan; Megatron's step goes on from what it leaves behind
    [5] all ranks compare; where one differs, stock runs again, and it is said what differs: stock from itself, or the plan

Where a rank runs out of memory in [2] to [5], others wait for it in a collective: it says so, and ends all (`alarm`).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_lynx.apply import Installation
from megatron_lynx.apply.all_ranks import of_all_ranks
from megatron_lynx.launch.agreement import agree, on_rank_0
from megatron_lynx.launch.alarm import ending_together
from megatron_lynx.launch.check.outcome import Difference, Outcome
from megatron_lynx.launch.check.reference import IN_WORDS, Need, ReferenceSetting, room_bytes
from megatron_lynx.launch.check.step import Schedule, Step
from megatron_lynx.launch.check.tolerance import head_tolerances
from megatron_lynx.launch.check.verdict import OutOfMemory, enough_memory, not_repeatable, plan_differs
from megatron_lynx.units import format_bytes


@dataclass(frozen=True)
class _Found:
    """What one rank compared in one step."""

    parameters: int
    losses: int
    size_bytes: int
    differences: tuple[Difference, ...]
    near: Mapping[str, float]
    """Gradients that need not be equal in every bit."""


class Check:
    """The first `steps` steps of a run. `against`: fitting, none or full. `head_in_pieces`: the gradient of the head's weight
    need only be near stock's."""

    def __init__(self, steps: int, against: str, *, head_in_pieces: bool = False) -> None:
        self._left = steps
        self._against = against
        self._head_in_pieces = head_in_pieces
        self._need: Need | None = None
        self._compared: list[_Found] = []
        """What all ranks compared in the latest step."""
        self._settings: set[str] = set()
        self.steps = 0
        """Steps that were checked so far."""

    def around(self, schedule: Schedule, optimizer: Any, installation: Installation) -> Schedule:
        """What `train_step` is to call instead. A later call in the same step (a rerun that Megatron asks for) is not checked."""
        if self._left == 0:
            return schedule
        self._left -= 1
        checked = iter([True])

        def forward_backward(*, model: Any, data_iterator: Any, **others: Any) -> Any:
            if not next(checked, False):
                return schedule(model=model, data_iterator=data_iterator, **others)
            step = Step(schedule, model, data_iterator, others, optimizer, installation)
            return self._run(step)

        return forward_backward

    def _run(self, step: Step) -> Any:
        with ending_together():
            setting = self._setting(step)
            setting, reference = self._reference(step, setting)
            with enough_memory(self.steps + 1, "the plan"):
                losses = step.planned()
            self._settle(step, setting, reference, Outcome.of(losses, step.run.chunks))
            return losses

    def _setting(self, step: Step) -> ReferenceSetting:
        """Which stock setting this step is compared with; the same on all ranks."""
        if self._against != "fitting":
            return "full" if self._against == "full" else "none"
        device = next(step.run.chunks[0].parameters()).device
        if room_bytes(device) is not None and self._need is None:
            with enough_memory(self.steps + 1, "the plan"):
                self._need = step.measured()  # [2]
        room = room_bytes(device)  # behind that pass, whose messages made buffers outside of torch's allocator
        lacking = None if room is None or self._need is None else self._need.lacking(room)
        short = [(rank, said) for rank, said in enumerate(of_all_ranks(lacking)) if said is not None]
        if short and "full" not in self._settings:
            _say_full(f"does not fit in memory ({', '.join(f'rank {rank} {said}' for rank, said in short[:3])})")
        return "full" if short else "none"

    def _reference(self, step: Step, setting: ReferenceSetting) -> tuple[ReferenceSetting, Outcome]:
        """Losses and gradients of stock, and the setting that they were made with. [3]"""
        try:
            with enough_memory(self.steps + 1, IN_WORDS[setting]):
                return setting, step.stock(setting)
        except OutOfMemory:
            if setting == "full" or self._against == "none" or not _alone():
                raise
        gc.collect()  # the failed pass, which the error's traceback held
        torch.cuda.empty_cache()
        _say_full("ran out of memory")
        self._against = "full"
        with enough_memory(self.steps + 1, IN_WORDS["full"]):
            return "full", step.stock("full")

    def _settle(self, step: Step, setting: ReferenceSetting, reference: Outcome, planned: Outcome) -> None:
        """Compare the two passes: returns on all ranks, or ends all of them. [5]"""
        near = head_tolerances(step.run.chunks) if self._head_in_pieces else {}
        found = step.differences(reference, planned, (IN_WORDS[setting], "the plan"), near)
        self._compared = of_all_ranks(
            _Found(len(reference.gradients), len(reference.losses), reference.size_bytes, tuple(found[:1]), near)
        )
        self.steps += 1
        self._settings.add(setting)
        if not (first := [difference for rank in self._compared for difference in rank.differences]):
            return
        count = sum(of_all_ranks(len(found)))
        with enough_memory(self.steps, IN_WORDS[setting]):
            again = step.stock(setting)
        repeated = step.differences(reference, again, ("the first run", "the second"))
        if restless := [difference for rank in of_all_ranks(repeated[:1]) for difference in rank]:
            agree(not_repeatable(self.steps, setting, min(restless)))
        agree(plan_differs(self.steps, setting, min(first), count, head_in_pieces=self._head_in_pieces))

    def summary(self) -> str | None:
        """A sentence on what was checked and found equal, for rank 0 to print; None where nothing was checked."""
        if not self._compared:
            return None
        parameters, losses, size_bytes = (
            sum(getattr(rank, name) for rank in self._compared) for name in ("parameters", "losses", "size_bytes")
        )
        against = " and ".join(IN_WORDS[setting] for setting in ("none", "full") if setting in self._settings)
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        where = "" if len(self._compared) == 1 else f" on {len(self._compared)} ranks"
        return (
            f"checked {steps} against {against}: in each, {losses} losses and the gradients of {parameters} parameters "
            f"({format_bytes(size_bytes)}{where}) are equal in every bit{self._but_for()}"
        )

    def _but_for(self) -> str:
        near = {name: tolerance for rank in self._compared for name, tolerance in rank.near.items()}
        if not near:
            return ""
        most = max(near.values())
        return f", but for {' and '.join(near)}: within {most:.1g} of its largest value, as the plan's head is in pieces"

    @property
    def over(self) -> bool:
        return self._left == 0


def _say_full(why: str) -> None:
    on_rank_0(f"megatron-lynx: --lynx-check: {IN_WORDS['none']} {why}, so the plan is compared with {IN_WORDS['full']}")


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1
