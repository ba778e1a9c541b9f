"""`--lynx-check frames`: compares what recomputations and reloads return for some frames with what their forward saved.

    step 1 ... N    forward     some frames are drawn; their saved tensors are copied to the host, too
                    backward    the tensors it gets for them are copied to the host when it requests them
                    end         both copies are compared bit for bit; all ranks exit if one differs, before the optimizer uses
                                the gradients

Results of backward are not compared, so kernels need not be deterministic. A fault in backward itself is not seen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.installation import Installation
from megatron_lynx.apply.live_run import LiveRun, live_run, of_all_ranks
from megatron_lynx.errors import LynxError
from megatron_lynx.launch.check import Compared, Difference, Schedule, difference, first_call, frames_differ, in_all, to_host
from megatron_lynx.launch.ending import agree
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.frame import Frame, Handle
from megatron_lynx.runtime.saved import tensor_of
from megatron_lynx.runtime.site import Key
from megatron_lynx.units import format_bytes

Again = Literal["recomputed", "reloaded", "gathered"]


@dataclass(frozen=True, eq=False)
class Observed:
    """What autograd holds for a saved tensor of a drawn frame."""

    packed: Any
    returned: Callable[[Tensor], None]

    def tensor(self) -> Tensor:
        tensor = tensor_of(self.packed)
        self.returned(tensor)
        return tensor


@dataclass
class Drawn:
    """One tensor of a frame, on the host: as its forward saved it, and as backward got it."""

    step: int
    frame: tuple[int, FrameKey]
    key: Key
    again: Again
    name: str
    saved: Tensor
    returned: Tensor | None = None
    """None until backward has requested it."""

    @property
    def difference(self) -> str:
        return difference(self.returned, self.saved, (f"what was {self.again}", "what was saved"))


class FrameCheck:
    """`seed`: of the draws; each rank draws other frames. `lag`: steps between a forward and its backward (1 without flushes)."""

    def __init__(self, steps: int, plan: Plan, *, seed: int = 0, lag: int = 0) -> None:
        self._left = steps
        self._lag = lag
        self._plan = plan
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._draw = Draw(seed + self._rank)
        self._stage = 0
        self._pending: list[Drawn] = []
        self._reached: dict[tuple[int, FrameKey], int] = {}
        """Drawn frames in the order in which backward reached them."""
        self._compared: list[Compared] = []
        self._kinds: list[tuple[int, int]] = []
        """By rank: kinds of frames drawn and seen since the run began."""
        self.steps = 0

    def around(self, schedule: Schedule, optimizer: Any, installation: Installation) -> Schedule:
        if self.over:
            return schedule
        draws = self._left > 0
        self._left, self._lag = (self._left - 1, self._lag) if draws else (0, self._lag - 1)

        def forward_backward(*, model: Any, **arguments: Any) -> Any:
            if draws:
                self._begin(model)
                installation.engine.observer = self
            try:
                losses = schedule(model=model, **arguments)
            except Exception as error:
                if (known := self._differs()) is not None:
                    raise known from error  # a backward may fail on a wrong tensor
                raise
            finally:
                installation.engine.observer = None
            self._settle()
            return losses

        return first_call(forward_backward, schedule)

    @property
    def over(self) -> bool:
        return self._left + self._lag == 0

    def summary(self) -> str | None:
        if not self._compared:
            return None
        counts, size_bytes = in_all(self._compared)
        gathered = f", and {counts['gathered']} inputs that were gathered again," if counts["gathered"] else ""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        where = "" if len(self._kinds) == 1 else f" on {len(self._kinds)} ranks"
        drawn, total = map(sum, zip(*self._kinds, strict=True))
        covered = f"all {total} kinds of frames" if drawn == total else f"{drawn} of {total} kinds of frames"
        return (
            f"checked {counts['frames']} frames in {steps}{where}, of {covered}: {counts['recomputed']} tensors that were "
            f"recomputed and {counts['reloaded']} that were reloaded{gathered} ({format_bytes(size_bytes)}) are in every bit "
            "what their forward had saved"
        )

    def wants(self, frame: Frame, offloads: bool) -> bool:
        policy = frame.policy
        windows = self._plan.chunks_of(self._stage)[policy.chunk].rule_for(policy.layer).windows
        where = windows.of(policy.half) if policy.recompute else ""
        return self._draw.takes((policy.chunk, policy.half, tuple(sorted(policy.recompute)), where, offloads))

    def saved(self, frame: Frame, item: str | None, segment: int, packed: Any, tensor: Tensor) -> Observed:
        if isinstance(packed, Handle):
            return Observed(packed, self._draws(frame, item, packed.key, "recomputed", tensor))
        identity = frame.micro_batch.number, frame.key
        before = sum(drawn.again == "reloaded" for drawn in self._pending if drawn.frame == identity)
        return Observed(packed, self._draws(frame, item, (segment, before), "reloaded", tensor))

    def gathered(self, frame: Frame, item: str, segment: int, tensor: Tensor) -> Callable[[Tensor], None]:
        return self._draws(frame, item, (segment, -1), "gathered", tensor)

    def _draws(self, frame: Frame, item: str | None, key: Key, again: Again, tensor: Tensor) -> Callable[[Tensor], None]:
        name = _name(frame, item, key, again, tensor)
        drawn = Drawn(self.steps, (frame.micro_batch.number, frame.key), key, again, name, to_host(tensor))
        self._pending.append(drawn)

        def returned(made: Tensor) -> None:
            self._reached.setdefault(drawn.frame, len(self._reached))
            if drawn.returned is None:
                drawn.returned = to_host(made)

        return returned

    def _begin(self, model: Any) -> None:
        run = live_run(model)
        assert isinstance(run, LiveRun)  # the plan is installed for it
        self._stage = run.stage
        self.steps += 1
        self._draw.step_begins()

    def _settle(self) -> None:
        over = self._returned()
        self._pending = [drawn for drawn in self._pending if drawn.returned is None] if self._lag else []
        counts = Counter[str](drawn.again for drawn in over) + Counter(frames=len({drawn.frame for drawn in over}))
        mine = Compared(counts, sum(drawn.saved.nbytes for drawn in over), self._differences(over))
        ranks = of_all_ranks((mine, self._draw.kinds))
        self._compared += [compared for compared, _ in ranks]
        self._kinds = [kinds for _, kinds in ranks]
        if found := [one for compared, _ in ranks for one in compared.differences]:
            tensors = sum(compared.counts.total() - compared.counts["frames"] for compared, _ in ranks)
            agree(frames_differ(min(found), len(found), tensors))

    def _differs(self) -> LynxError | None:
        over = self._returned()
        differing = self._differences(over)
        return frames_differ(differing[0], len(differing), len(over)) if differing else None

    def _returned(self) -> list[Drawn]:
        return [drawn for drawn in self._pending if drawn.returned is not None]

    def _differences(self, over: list[Drawn]) -> list[Difference]:
        found = []
        for drawn in over:
            if values := drawn.difference:
                position = drawn.step, self._reached[drawn.frame], *drawn.key
                found.append(Difference(position, self._rank, self._stage, f"step {drawn.step}, {drawn.name}", values))
        return sorted(found)


def _name(frame: Frame, item: str | None, key: Key, again: Again, tensor: Tensor) -> str:
    (layer, half), (segment, ordinal) = frame.key, key
    which = f"tensor {ordinal}"
    if ordinal < 0:
        which = "its gathered input" if again == "gathered" else "an argument"
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    of_item = "" if item is None else f", {item}"
    return f"layer {layer}, {half} half{of_item}, micro-batch {frame.micro_batch.index} ({which} of segment {segment}, {kind})"


PER_STEP = 4
"""Frames drawn per rank and step. The host keeps one half's saved tensors for each."""


class Draw:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # a generator that training does not use
        self._left = 0
        self._seen = Counter[Hashable]()
        self._chosen: set[tuple[Hashable, int]] = set()
        self._drawn = Counter[Hashable]()

    @property
    def kinds(self) -> tuple[int, int]:
        return sum(count > 0 for count in self._drawn.values()), len(self._drawn)

    def step_begins(self) -> None:
        """Choose among as many frames as the step before had: those of the kinds that were drawn least, at random."""
        candidates = [
            ((self._drawn[kind] + more, self._random.random()), (kind, number))
            for kind, count in self._seen.items()
            for more, number in enumerate(self._random.sample(range(count), min(count, PER_STEP)))
        ]
        least_drawn = sorted(candidates, key=lambda candidate: candidate[0])[:PER_STEP]
        self._chosen = {chosen for _, chosen in least_drawn}
        self._seen, self._left = Counter(), PER_STEP

    def takes(self, kind: Hashable) -> bool:
        """Whether to draw this frame, the next one of its kind in this step."""
        number = self._seen[kind]
        self._seen[kind] += 1
        self._drawn.setdefault(kind, 0)
        drawn = self._left > 0 and ((kind, number) in self._chosen or not self._drawn[kind])
        self._drawn[kind] += drawn
        self._left -= drawn
        return drawn
