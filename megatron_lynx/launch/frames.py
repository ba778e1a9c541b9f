"""`--lynx-check frames`: compares what recomputations and reloads return for some frames with what their forward saved.

    step 1 ... N    forward     some frames are drawn; their saved tensors are copied to the host, too
                    backward    the tensors it gets for them are compared bit for bit when it requests them
                    end         all ranks exit if one differs, before the optimizer uses the gradients

Results of backward are not compared, so kernels need not be deterministic. A fault in backward itself is not seen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lynx.anatomy.address import BACKWARD_PHASES, FrameKey
from megatron_lynx.apply.installation import Installation
from megatron_lynx.apply.live_run import LiveRun, live_run, of_all_ranks
from megatron_lynx.errors import LynxError
from megatron_lynx.launch.check import Difference, Schedule, bits, first_call, frames_differ, unlike
from megatron_lynx.launch.ending import agree
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.frame import Frame
from megatron_lynx.runtime.record import Again, Place, Returned
from megatron_lynx.units import format_bytes


@dataclass(frozen=True)
class _Found:
    frames: int
    again: dict[Again, int]
    size_bytes: int
    kinds: tuple[int, int]
    """Kinds of frames drawn and seen since the run began."""
    first: tuple[Difference, ...]
    differing: int


@dataclass(frozen=True)
class _Drawn:
    step: int
    frame: tuple[int, FrameKey]
    place: Place
    name: str
    original: Original


class FrameCheck:
    """`seed`: of the draws; each rank draws other frames. `lag`: steps between a forward and its backward (1 without flushes)."""

    def __init__(self, steps: int, plan: Plan, *, seed: int = 0, lag: int = 0) -> None:
        self._left = steps
        self._lag = lag
        self._plan = plan
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._draw = Draw(seed + self._rank)
        self._stage = 0
        self._pending: list[_Drawn] = []
        self._reached: dict[tuple[int, FrameKey], int] = {}
        """Drawn frames in the order in which backward reached them."""
        self._compared: list[_Found] = []
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
        frames, size_bytes = (
            sum(getattr(comparison, name) for comparison in self._compared) for name in ("frames", "size_bytes")
        )
        again = sum((Counter(comparison.again) for comparison in self._compared), Counter[Again]())
        gathered = f", and {again['gathered']} inputs that were gathered again," if again["gathered"] else ""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        kinds = [comparison.kinds for comparison in self._compared[-ranks:]]
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        where = "" if ranks == 1 else f" on {ranks} ranks"
        drawn, total = (sum(of_rank) for of_rank in zip(*kinds, strict=True))
        covered = f"all {total} kinds of frames" if drawn == total else f"{drawn} of {total} kinds of frames"
        return (
            f"checked {frames} frames in {steps}{where}, of {covered}: {again['recomputed']} tensors that were recomputed and "
            f"{again['reloaded']} that were reloaded{gathered} ({format_bytes(size_bytes)}) are in every bit what their forward "
            "had saved"
        )

    def wants(self, frame: Frame, offloads: bool) -> bool:
        policy = frame.policy
        windows = self._plan.chunks_of(self._stage)[policy.chunk].rule_for(policy.layer).windows
        where = tuple(windows.of(policy.half, phase) for phase in BACKWARD_PHASES) if policy.recompute else ()
        return self._draw.takes((policy.chunk, policy.half, tuple(sorted(policy.recompute)), where, offloads))

    def saved(self, frame: Frame, place: Place, tensor: Tensor) -> Returned:
        original = Original(tensor, place.again)
        which = frame.micro_batch.number, frame.key
        self._pending.append(_Drawn(self.steps, which, place, _name(frame, place, tensor), original))

        def returned(made: Tensor) -> None:
            self._reached.setdefault(which, len(self._reached))
            original.compare(made)

        return returned

    def _begin(self, model: Any) -> None:
        run = live_run(model)
        assert isinstance(run, LiveRun)  # the plan is installed for it
        self._stage = run.stage
        self.steps += 1
        self._draw.step_begins()

    def _settle(self) -> None:
        over = [drawn for drawn in self._pending if drawn.original.over]
        self._pending = [drawn for drawn in self._pending if not drawn.original.over] if self._lag else []
        differing = self._differences(over)
        mine = _Found(
            frames=len({drawn.frame for drawn in over}),
            again=Counter(drawn.place.again for drawn in over),
            size_bytes=sum(drawn.original.size_bytes for drawn in over),
            kinds=self._draw.kinds,
            first=tuple(differing[:1]),
            differing=len(differing),
        )
        comparisons = of_all_ranks(mine)
        self._compared += comparisons
        if first := [difference for rank in comparisons for difference in rank.first]:
            compared = sum(sum(rank.again.values()) for rank in comparisons)
            agree(frames_differ(min(first), sum(rank.differing for rank in comparisons), compared))

    def _differs(self) -> LynxError | None:
        over = [drawn for drawn in self._pending if drawn.original.over]
        differing = self._differences(over)
        return frames_differ(differing[0], len(differing), len(over)) if differing else None

    def _differences(self, over: list[_Drawn]) -> list[Difference]:
        return sorted(difference for drawn in over if (difference := self._difference(drawn)) is not None)

    def _difference(self, drawn: _Drawn) -> Difference | None:
        description, place = drawn.original.difference(), drawn.place
        if not description:
            return None
        position = drawn.step, self._reached[drawn.frame], place.segment, place.ordinal
        return Difference(position, self._rank, self._stage, f"step {drawn.step}, {drawn.name}", description)


def _name(frame: Frame, place: Place, tensor: Tensor) -> str:
    layer, half = frame.key
    item = "" if place.item is None else f", {place.item}"
    which = f"tensor {place.ordinal}"
    if place.ordinal < 0:
        which = "its gathered input" if place.again == "gathered" else "an argument"
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return f"layer {layer}, {half} half{item}, micro-batch {frame.micro_batch.index} ({which} of segment {place.segment}, {kind})"


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


class _Compared(NamedTuple):
    """On the device: the number of elements that differ, the first one's index, and its bits in both tensors."""

    differing: Tensor
    first: Tensor
    returned: Tensor
    saved: Tensor


class Original:
    def __init__(self, tensor: Tensor, made_by: str) -> None:
        self.made_by = made_by
        self.size_bytes = tensor.nbytes
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._kept: Tensor | None = tensor.detach().to("cpu", copy=True)
        self._compared: _Compared | None = None
        self._unlike = ""

    @torch.no_grad()
    def compare(self, returned: Tensor) -> None:
        """Compare with the tensor that backward gets, the first time."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        self._unlike = unlike(returned, kept, (f"what was {self.made_by}", "what was saved"))
        if self._unlike or kept.numel() == 0:
            return
        mine = bits(returned).clone().flatten()
        saved = bits(kept).to(mine.device).flatten()
        differ = mine != saved
        first = differ.to(torch.uint8).argmax().view(1)
        self._compared = _Compared(differ.sum(), first, mine.index_select(0, first), saved.index_select(0, first))

    @property
    def over(self) -> bool:
        return self._kept is None

    def difference(self) -> str:
        """The difference in words; empty if all bits are equal. Waits for the device."""
        if self._unlike or self._compared is None:
            return self._unlike
        count = int(self._compared.differing)
        if count == 0:
            return ""
        returned, saved = (float(side.cpu().view(self._dtype)) for side in (self._compared.returned, self._compared.saved))
        at = [int(index) for index in torch.unravel_index(self._compared.first.cpu(), self._shape)]
        return (
            f"{count} of {self._shape.numel()} values that differ, the first at {at}: {returned:.9g} {self.made_by} and "
            f"{saved:.9g} saved"
        )
