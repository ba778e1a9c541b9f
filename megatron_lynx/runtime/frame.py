"""One layer half of one micro-batch: what it let go, and what is needed to regenerate it.

                       record                                replay                            backward
    half inputs ──> [0] code [1] site [2] code [3] ...    the same code, from the inputs      asks for (frame, key)
                     │        │                            kept sites return their memo        │
                     │        └ kept: memo of outputs      wanted tensors are collected        └ take: handed over once
                     └ saved tensors become handles        stops when none is wanted any more

    checkpoints: attention ──returns──> mlp                the frame of mlp holds no input: it has the frame of attention
                                                           replayed to its end, which collects its own wanted tensors meanwhile

Segments count sites and the stretches of code between them, so that a key `(segment, ordinal)` means the same tensor in the
record and in the replay although the replay skips kept sites. A frame is owned by the handles that autograd's graph holds:
when the graph goes, the frame goes (rule R8).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.policy import HalfPolicy
from megatron_lynx.runtime.recorded_graph import Key, SiteGraph, View
from megatron_lynx.runtime.refusals import asked_twice, second_order
from megatron_lynx.runtime.saved import detached, is_parameter, memory_of
from megatron_lynx.runtime.site import ShortcutStep
from megatron_lynx.schedule.schedule import Phase, VirtualMicroBatch

RowsOf = tuple[frozenset[str], bool]
"""Halves whose rows leave the same: by what their rule replays, and whether the plan keeps everything of the micro-batch."""


@dataclass
class HeldRows:
    """What halves of experts of one micro-batch hold of rows (`runtime.loads`)."""

    halves: int = 0
    rows: int = 0
    """Of all these halves."""


@dataclass(eq=False)
class MicroBatch:
    """One pass of a micro-batch through one chunk of the stage, until its backward is over.

    It knows nothing of frames: a frame knows the micro-batch that it belongs to, the ledger finds the frames of one, and the
    offloader what of one is on the host.
    """

    number: int
    """Counted from 0 over the whole run; the same for all chunks that it passes through."""
    index: int = 0
    """Counted from 0 in each step; where batches overlap, since the pipeline was filled."""
    chunk: int = 0
    ahead: set[FrameKey] = field(default_factory=set)
    """Halves that were regenerated and that backward has not reached."""
    output: weakref.ref[Tensor] | None = None
    """Held weakly: an alias of the output would keep memory that the schedule frees."""
    phase: Phase = "steady"
    """Of its backward."""
    rows: dict[RowsOf, HeldRows] = field(default_factory=dict)
    """What its halves hold of rows of experts, where these may fall back."""

    @property
    def virtual(self) -> VirtualMicroBatch:
        return self.index, self.chunk

    @property
    def alive(self) -> bool:
        return self.output is None or self.output() is not None


@dataclass(frozen=True)
class Absent:
    """Stands for a tensor whose values no replay needs. What it makes has the same geometry, and holds whatever its memory held.

    Megatron compiles some of the code between sites (`jit_fuser`). What is compiled looks at strides before it runs: were they
    others than in the record, it would be compiled again in the middle of a replay, and after eight times not at all, and run as
    plain code, which draws another dropout mask.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Absent:
        return cls(tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def made(self) -> Tensor:
        if not self.requires_grad:
            return self._empty()
        made: Tensor = _Made.apply(torch.empty(0, requires_grad=True), self._empty)  # type: ignore[no-untyped-call]
        return made

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class _Made(torch.autograd.Function):
    """A tensor that asks for a gradient as one does that a site returned. A leaf would not: code may add to what it is given in
    place, as Megatron's experts add their second linear's bias."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        raise AssertionError("a replay's own graph is never run backward")


def absent(tensor: Tensor) -> Any:
    """Whole numbers are few, and code may go by their values: so many rows for each expert."""
    if is_parameter(tensor):
        return tensor
    return detached(tensor) if tensor.dtype in WHOLE_NUMBERS else Absent.of(tensor)


WHOLE_NUMBERS = (torch.int32, torch.int64)
"""Types of numbers that count."""


@dataclass(frozen=True)
class Memo:
    """What a site returned (tensors, or `Absent` for those that are not needed), and the random state behind it where the site
    may have drawn from it. The record makes those of kept sites, a replay up to a site those of the sites that it ran."""

    outputs: Any
    random: Any | None


@dataclass(frozen=True)
class Fed:
    """Stands in a frame's inputs for a tensor that it does not hold: what the half before returns when it runs again whole."""

    place: int
    """Which of the tensors that that half returns it is."""


@dataclass
class UnderWay:
    """What a replay communicates that nobody has waited for."""

    works: list[Any] = field(default_factory=list)
    """What to wait for before anything of it is used."""
    passed: set[int] = field(default_factory=set)
    """The segments of the sites that the replay ran before: nothing behind reads the values of what they returned."""
    marks: tuple[dict[str, Any], ...] = ()
    """What the half's code had left on the objects that it marks (`HalfPolicy.marked`)."""

    def wait(self) -> None:
        """Whoever uses what travelled comes behind this."""
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class GatheredGradient:
    """The gradient of what a half returned, which is gathered before its backward comes to that."""

    source: Tensor
    whole: Tensor
    work: Any
    version: int
    """Of the source, when it began."""

    def is_of(self, gradient: Tensor) -> bool:
        """Whether nothing has changed the gradient on its way from the half's output to where it is gathered."""
        source = self.source
        same = source.data_ptr() == gradient.data_ptr() and source.numel() == gradient.numel() and source.dtype == gradient.dtype
        return same and source._version == self.version


def _never(frame: Frame) -> None:
    raise AssertionError(f"{frame.policy.name} has no way to run again")


@dataclass(eq=False)
class Frame:
    """The record of one half. A recorder fills it; replays, and the backward that takes what they found, empty it."""

    policy: HalfPolicy
    micro_batch: MicroBatch
    code: Callable[..., Any]
    """The half's own code, without hooks."""
    on_demand: Callable[[Frame], None] = _never
    """Computes again all that was let go and is not there yet."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    draws: bool = False
    """Whether it may have drawn random numbers."""
    random: Any = None
    """The random state that it began with, where it may have drawn. A half that is fed begins with the one that the half before
    leaves, and holds none if that one may draw: it is there again when that one has run again."""
    surroundings: Any = ()
    site_states: dict[int, Any] = field(default_factory=dict)
    """By segment, what sites that a replay may run keep from call to call (scales of FP8)."""
    memos: dict[int, Memo] = field(default_factory=dict)
    views: dict[Key, View] = field(default_factory=dict)
    """How to find the tensors that share memory with an argument of their site, and are not the argument itself."""
    sites: dict[int, SiteGraph] = field(default_factory=dict)
    """Where the sites' tensors were let go, by segment."""
    lets_go_in: Collection[int] = ()
    """The segments in which anything was let go."""
    shortcut: tuple[ShortcutStep, ...] = ()
    """What a replay runs instead of the half's code, where that is enough."""
    offloaded: bool = False
    """Whether what its replay needs may be on the host."""
    wanted: set[Key] = field(default_factory=set)
    found: dict[Key, Tensor] = field(default_factory=dict)
    replayed: bool = False
    let_go_bytes: int = 0
    source: Frame | None = None
    """The frame of the half before, where that is run again for inputs of this one, which stand there as `Fed`."""
    returned: tuple[weakref.ref[Tensor], ...] = ()
    """What the half returned, where the one behind it may not keep it."""
    under_way: UnderWay | None = None
    """What its replay, which stopped there, communicates meanwhile."""
    gathered: dict[int, Any] = field(default_factory=dict)
    """What replayed sites gathered in the record and find again in the replay, by segment."""
    gathering: tuple[Tensor, Any] | None = None
    """The gathered input and the Work that fills it, from its start to the end of this half's backward."""
    gradient: Tensor | None = None
    """That of what it returned, while it runs again, where it is to be gathered behind its input."""
    gathered_gradient: GatheredGradient | None = None
    """From then on, until its backward comes to it."""
    told: Callable[[Tensor], None] | None = None
    """Whom to show the gathered input when this half's backward has waited for it; usually nobody (`watched`)."""
    mark: Any = None
    """The hook in the graph that tells when backward reaches this half. It owns the frame, until the half's backward is over."""
    midway: Any = None
    """Likewise the one that tells when backward comes to `policy.midway`."""
    key: FrameKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.policy.key

    @property
    def lets_go(self) -> bool:
        """Whether its replay is still to come: an empty one, where gathering the input ahead of time made all that was wanted."""
        return not self.replayed and (bool(self.wanted) or self.gathering is not None or self.policy.feeds)

    @property
    def waits(self) -> bool:
        """Whether a backward that needs this frame is still to come."""
        return self.lets_go or bool(self.found)

    def keep(self, key: Key, tensor: Tensor) -> None:
        """Hold a tensor that was regenerated until backward takes it, if it is wanted."""
        if key in self.wanted:
            self.wanted.discard(key)
            self.found[key] = tensor.detach()

    def want(self, key: Key, tensor: Tensor) -> Handle:
        """The handle that autograd gets instead of a tensor that is let go."""
        self.let_go_bytes += tensor.nbytes if type(tensor) is Tensor else sum(part.nbytes for part in memory_of([tensor]))
        self.wanted.add(key)
        return Handle(self, key)

    def gather_gradient(self) -> None:
        """Begin to gather the gradient of what it returned."""
        assert self.policy.gather is not None, f"{self.policy.name} has no way to gather"
        assert self.gradient is not None, f"{self.policy.name} has no gradient to gather"
        whole, work = self.policy.gather(self.gradient)
        self.gathered_gradient = GatheredGradient(self.gradient, whole, work, self.gradient._version)
        self.gradient = None

    def take_gathered_gradient(self, gradient: Tensor | None) -> GatheredGradient | None:
        """Returns the gather of this gradient, once, if it was begun. A gather that is of no use is waited for and dropped: NCCL
        writes its buffer until then."""
        begun, self.gathered_gradient = self.gathered_gradient, None
        if begun is None or (gradient is not None and begun.is_of(gradient)):
            return begun
        begun.work.wait()
        return None

    def left(self) -> None:
        """Its backward is over. The graph may live on: a router of experts keeps a tensor of its last call."""
        for hook in (self.mark, self.midway):
            if hook is not None:
                hook.remove()
        self.mark = self.midway = None

    def give_up_inputs(self) -> None:
        """The replay is over; nothing will run from the inputs again."""
        self.replayed = True
        self.inputs = self.random = self.source = None
        self.memos.clear()
        self.site_states.clear()
        self.gathered.clear()
        self.views.clear()
        self.sites.clear()


class Handle:
    """What autograd holds instead of a tensor that was let go."""

    __slots__ = ("frame", "key")

    def __init__(self, frame: Frame, key: Key) -> None:
        self.frame = frame
        self.key = key

    def tensor(self) -> Tensor:
        """The tensor, which is replayed now if no window did that. It is handed over for good.

        Raises `ReplayError` when it is asked for again.
        """
        frame = self.frame
        if torch.is_grad_enabled():
            raise second_order(frame.policy.name)
        if self.key not in frame.found and frame.lets_go:
            frame.on_demand(frame)
        found = frame.found.pop(self.key, None)
        if found is None:
            raise asked_twice(frame.policy.name)
        return found


def tensor_of(held: Any) -> Tensor:
    """The tensor in whose place autograd holds this: a `Handle`, an `OffloadedTensor`, or the tensor itself."""
    return held if isinstance(held, Tensor) else held.tensor()
