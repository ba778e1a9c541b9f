"""One half of one micro-batch: its policy, its dropped tensors, and the state that recomputes them.

Segments number sites and the code between them, so that a key `(segment, ordinal)` names the same tensor in the record and in a
recomputation that skips kept sites. Handles in autograd's graph own the frame: it is freed with the graph (rule R8).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.refusals import ASKED_TWICE, SECOND_ORDER
from megatron_lynx.runtime.saved import View, detached, is_parameter, memory_of
from megatron_lynx.runtime.site import NO_GRAPH, Key, RecordedGraph, ShortcutStep, Site, SiteCall
from megatron_lynx.runtime.surroundings import NO_HOOKS, ForwardHooks
from megatron_lynx.schedule.schedule import VirtualMicroBatch
from megatron_lynx.timetable import PlannedHalf

Gather = Callable[[Tensor], tuple[Tensor, Any]]
"""Starts an all-gather of a tensor. Returns (its own buffer, `Work`)."""


@dataclass(frozen=True)
class ChunkPolicy:
    whole: Container[int] = ()
    most_delayed_bytes: int = 0
    read_after_send: bool = False
    """Whether its weights' gradients are read only after that of its input is sent."""


@dataclass(frozen=True)
class HalfPolicy(PlannedHalf):
    recompute: frozenset[str] = frozenset()
    gather_site: str | None = None
    """The recomputed site whose first argument is gathered once (sequence parallelism)."""
    gather: Gather | None = None
    keeps_gathered: frozenset[str] = frozenset()
    """Recomputed sites whose gathered argument is small, and kept (sequence parallelism)."""
    chunk: int = 0
    may_draw: Callable[[], bool] = lambda: True
    """Whether the half may draw random numbers in the call that begins now."""
    stays: bool = False
    """Whether its kept tensors stay on the device although its chunk offloads."""
    midway: str | None = None
    """The site before whose backward something begins."""
    passed_over: bool = False
    """Whether it is kept on the device and its collectives have no tasks, so that it needs no record."""
    below_passed_over: bool = False
    fed_by: FrameKey | None = None
    marked: tuple[object, ...] = ()
    """Objects on which each call of its code leaves attributes; a recomputation restores them (rule R13)."""
    allowed_load: float | None = None
    """Load of experts (rows over balanced rows) that the plan's bytes allow, averaged over the halves in flight. Set if the half
    falls back at more (`record.too_many`): its first linears and activation are recomputed, too."""
    hooks: ForwardHooks = field(default=NO_HOOKS, compare=False)

    @cached_property
    def keeping(self) -> HalfPolicy:
        without = replace(self, recompute=frozenset(), gather_site=None, gather=None, keeps_gathered=frozenset())
        return replace(without, checkpoint=False, fed_behind=0, fed_by=None)

    @cached_property
    def fallen_back(self) -> HalfPolicy:
        return replace(self, recompute=self.recompute | self.section.on_rows, allowed_load=None)

    @cached_property
    def may_recompute(self) -> bool:
        return bool(self.recompute) or self.allowed_load is not None

    def goes_out(self, offloading: Container[int]) -> bool:
        """Return whether its kept tensors may go to the host. `offloading`: chunks that offload."""
        return self.chunk in offloading and not self.stays

    @cached_property
    def name(self) -> str:
        return f"{self.half}({self.layer})"


@dataclass(eq=False)
class MicroBatch:
    """One pass of a micro-batch through one chunk of the stage, until its backward is over."""

    number: int
    """Counted from 0 over the whole run; the same in all chunks."""
    index: int = 0
    """Counted from 0 in each step; where batches overlap, since the pipeline was filled."""
    chunk: int = 0
    at_once: bool = False
    """Whether its backward follows its forward directly."""
    output: weakref.ref[Tensor] | None = None
    """Weak: an alias would keep memory that the schedule frees."""
    group: Any = None
    """Its `OffloadGroup`, if some of its tensors may move to the host."""
    rows: dict[frozenset[str], tuple[int, int]] = field(default_factory=dict)
    """(expert halves that it holds, their rows) by the items that these recompute, where experts may fall back
    (`record.too_many`)."""

    @property
    def virtual(self) -> VirtualMicroBatch:
        return self.index, self.chunk

    @property
    def alive(self) -> bool:
        return self.output is None or self.output() is not None


@dataclass(frozen=True)
class Absent:
    """A tensor whose values no recomputation reads. Strides are kept because compiled code (`jit_fuser`) guards on them: a
    mismatch recompiles, and after eight recompilations runs plain code, which draws another dropout mask."""

    view: View
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Absent:
        return cls(View.of(tensor), tensor.device, tensor.requires_grad)

    def made(self) -> Tensor:
        made = torch.empty_strided(self.view.size, self.view.stride, dtype=self.view.dtype, device=self.device)
        if self.requires_grad:  # not a leaf, because code may write into it in place (Megatron's experts add a bias)
            made.as_strided((0,), (1,)).add_(torch.empty(0, device=self.device, requires_grad=True))
        return made


def absent(tensor: Tensor) -> Any:
    """Return a stand-in for a tensor's values. Integers are kept: code may branch on them (tokens per expert)."""
    if is_parameter(tensor):
        return tensor
    return detached(tensor) if tensor.dtype in (torch.int32, torch.int64) else Absent.of(tensor)


@dataclass(frozen=True)
class Memo:
    """A site's outputs (`Absent` for tensors that are not needed), and the random state after it if it may have drawn."""

    outputs: Any
    random: Any | None


@dataclass(frozen=True)
class Fed:
    """Placeholder in a frame's inputs for a tensor that recomputing the half before returns."""

    place: int


@dataclass
class UnderWay:
    """Communication that a stopped recomputation left in flight."""

    works: list[Any] = field(default_factory=list)
    passed: set[int] = field(default_factory=set)
    """Segments of the sites that ran before it stopped. Their outputs' values are not read again."""
    marks: tuple[dict[str, Any], ...] = ()
    """Attributes that the half's code left on the objects that it marks (`HalfPolicy.marked`)."""


class GatheredGradient(NamedTuple):
    source: Tensor
    whole: Tensor
    work: Any
    version: int


@dataclass(eq=False)
class Frame:
    """The record of one half. A recorder fills it; recomputations and backward empty it."""

    policy: HalfPolicy
    micro_batch: MicroBatch
    code: Callable[..., Any]
    on_demand: Callable[[Frame], None]
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    draws: bool = False
    random: Any = None
    """Random state at its begin, if it may have drawn. A fed half begins with the state that the half before leaves; if that one
    may draw, this is None until that one was recomputed."""
    surroundings: Any = ()
    site_states: dict[int, Any] = field(default_factory=dict)
    memos: dict[int, Memo] = field(default_factory=dict)
    views: dict[Key, View] = field(default_factory=dict)
    """Views of a site's argument among the saved tensors."""
    graph: RecordedGraph = NO_GRAPH
    shortcut: tuple[ShortcutStep, ...] = ()
    """Steps that a recomputation runs instead of the half's code, if they suffice."""
    offloaded: bool = False
    wanted: set[Key] = field(default_factory=set)
    results: dict[Key, Tensor] = field(default_factory=dict)
    recomputed: bool = False
    let_go_bytes: int = 0
    source: Frame | None = None
    """Frame of the half before, if that is recomputed for inputs of this one (`Fed`)."""
    returned: tuple[weakref.ref[Tensor], ...] = ()
    """Its outputs, if the half after may not keep them."""
    under_way: UnderWay | None = None
    gathered: dict[int, Any] = field(default_factory=dict)
    """Gathered inputs that the record keeps for the recomputation, by segment."""
    gathering: tuple[Tensor, Any] | None = None
    """(gathered input, the `Work` that fills it), from its start to the end of this half's backward."""
    gradient: Tensor | None = None
    """Gradient of its output while it is recomputed, if it is to be gathered after the input."""
    gathered_gradient: GatheredGradient | None = None
    """Set from then until backward reaches it."""
    on_gathered: Callable[[Tensor], None] | None = None
    """Called with the gathered input when this half's backward has waited for it (`record.Observer`)."""
    marks: list[Any] = field(default_factory=list)
    """Handles of the hooks on the graph by which backward reaches this half. They own the frame until its backward is over."""

    @property
    def key(self) -> FrameKey:
        return self.policy.key

    @property
    def lets_go(self) -> bool:
        """Whether it is still to be recomputed, even if an early gather of the input has left nothing wanted."""
        return not self.recomputed and (bool(self.wanted) or self.gathering is not None or self.policy.feeds)

    def keep(self, key: Key, tensor: Tensor) -> None:
        if key in self.wanted:
            self.wanted.discard(key)
            self.results[key] = tensor.detach()

    def want(self, key: Key, tensor: Tensor) -> Handle:
        self.let_go_bytes += tensor.nbytes if type(tensor) is Tensor else sum(part.nbytes for part in memory_of([tensor]))
        self.wanted.add(key)
        return Handle(self, key)

    def gather_gradient(self, work: Any) -> Any:
        """Start to gather the gradient of its output, after `work`, the gather of its input. Returns `work`."""
        assert self.policy.gather is not None, f"{self.policy.name} has no way to gather"
        assert self.gradient is not None, f"{self.policy.name} has no gradient to gather"
        self.gathered_gradient = GatheredGradient(self.gradient, *self.policy.gather(self.gradient), self.gradient._version)
        self.gradient = None
        return work

    def take_gathered_gradient(self, gradient: Tensor | None) -> GatheredGradient | None:
        """Return the gather of this gradient, once. Another one is waited for and dropped: NCCL writes its buffer until then."""
        begun, self.gathered_gradient = self.gathered_gradient, None
        if begun is None:
            return None
        source = begun.source
        same = gradient is not None and (
            (source.data_ptr(), source.numel(), source.dtype) == (gradient.data_ptr(), gradient.numel(), gradient.dtype)
        )
        if same and source._version == begun.version:
            return begun
        begun.work.wait()
        return None

    def left(self) -> None:
        """Remove the hooks: its backward is over, but the graph may live on (a router keeps a tensor of its last call)."""
        for hook in self.marks:
            hook.remove()
        self.marks.clear()

    def give_up_inputs(self) -> None:
        self.recomputed = True
        self.inputs = self.random = self.source = None
        for held in (self.memos, self.site_states, self.gathered, self.views):
            held.clear()


class Handle:
    """What autograd stores instead of a dropped tensor."""

    __slots__ = ("frame", "key")

    def __init__(self, frame: Frame, key: Key) -> None:
        self.frame = frame
        self.key = key

    def tensor(self) -> Tensor:
        """Return the tensor once, recomputing it now if no window did. Raises `RecomputeError` if it was returned before."""
        frame = self.frame
        if torch.is_grad_enabled():
            raise SECOND_ORDER.of(frame.policy.name)
        if self.key not in frame.results and frame.lets_go:
            frame.on_demand(frame)
        tensor = frame.results.pop(self.key, None)
        if tensor is None:
            raise ASKED_TWICE.of(frame.policy.name)
        return tensor


class Run:
    """A call that keeps everything; base of recorder and recomputer."""

    recomputes = False
    owns_gathered = False
    """Whether the site's gathered input is kept, and so needs a buffer that is not shared."""
    gathering: tuple[Any, Any] | None = None
    """(gathered input of the present site, the `Work` that fills it), if it was started before."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.collectives = 0
        """Windows among the collectives issued so far."""
        self._segment = 0
        self._ordinal = 0
        self._item: str | None = None

    def run(self, *given: Any) -> Any:
        args, kwargs = given
        return self.frame.code(*args, **kwargs)

    def passes(self, site: Site) -> bool:
        return True

    def site(self, call: SiteCall) -> Any:
        return call()

    def window(self, *, exchange: bool) -> Callable[[Any], Any] | None:
        """Return what wraps the `Work` of a collective that a recomputation issues; None leaves the `Work` as it is."""
        return None

    def keep_gathered(self, whole: Any) -> None:
        """Report the gathered input of the present site: a tensor, or TE's quantized storage of one."""

    def experts_got(self, rows: int, balanced: int) -> None:
        """Report the rows that experts are called with. `balanced`: rows under uniform routing."""

    def _enter(self, item: str | None = None) -> None:
        self._segment += 1
        self._ordinal = 0
        self._item = item


class Done:
    """The `Work` of a collective that was waited for before, or that is left in flight for another waiter."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True


DONE = Done()
