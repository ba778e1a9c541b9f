"""The moment of a step in which an error was raised, in words and by its name in a plan's predictions.

    noted by the engine              the traceback passes through  moment
    -------------------------------  ----------------------------  ------------------------------------------------
    anything                         a delayed weight gradient     weight_gradient
    a recomputation                                                replay, of the half that is recomputed
    a forward, in a half                                           forward
    a forward, in no half            neither layers nor embedding  loss, on the last chunk of the last stage
    a backward, in a half                                          backward
    a backward, in no half yet       the loss's own backward       loss
                                     anything else                 head_backward, on the last chunk of the last stage
    a backward, or nothing           Megatron's distributed        reduction
    nothing                          the optimizer                 first_update, or update
    nothing                          messages between stages       message
    nothing                          anything else                 None: only the run's progress is reported

Backward runs in C++, so the engine only knows which half it has reached: the embedding's backward follows the first layer's
attention half, and the head's comes before the last layer's MLP half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import Any, NamedTuple

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.pending import Entry
from megatron_lynx.runtime.policy import HalfPolicy
from megatron_lynx.runtime.progress import Whereabouts, whereabouts_of

DISTRIBUTED = "megatron.core.distributed"
MESSAGES = "megatron.core.pipeline_parallel.p2p_communication"
WEIGHT_GRADIENTS = "megatron_lynx.runtime.weight_gradients"
ATTENTION, MLP = HALVES


@dataclass(frozen=True)
class Moment:
    """A moment of a step. `planned`: the moments of a plan's predictions that it may be."""

    words: str
    name: str | None = None
    planned: tuple[str, ...] = ()
    micro_batch: int | None = None
    chunk: int = 0
    half: FrameKey | None = None


@dataclass(frozen=True)
class Rank:
    """The state of a rank that tells its moments apart."""

    plan: Plan
    stage: int
    chunks: Sequence[Any] = ()
    """Its models, without wrappers."""
    optimizer: Any = None
    stepped: bool = False
    """Whether the optimizer has created its state."""
    may_grow: bool = True
    """Whether expandable segments are possible. With --use-nccl-ub and an older torch, Megatron raises."""

    def is_last(self, chunk: int) -> bool:
        return (self.stage, chunk) == (self.plan.parallel.pipeline - 1, self.plan.parallel.chunks - 1)

    def top_half_is_seen(self, chunk: int) -> bool:
        """Whether the engine notices when backward reaches a chunk's last half: it hooks only halves with planned work."""
        entry = self.plan.chunks_of(self.stage)[chunk]
        rule = entry.rule_for(entry.layers.last)
        return entry.offload is not None or rule.checkpoints(MLP) or bool(rule.replays(MLP))


class _Passed(NamedTuple):
    module: str
    function: str
    local: dict[str, Any]


def moment_of(error: BaseException, rank: Rank) -> Moment | None:
    """The moment; None for an error outside of passes, updates and messages."""
    causes = [*causes_of(error)]
    where = next(filter(None, map(whereabouts_of, causes)), None)
    frames = [frame for each in causes for frame, _ in walk_tb(each.__traceback__)]
    passed = [_Passed(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name, frame.f_locals) for frame in frames]
    if (entry := _put_off(passed)) is not None:
        layer, linear = entry.linear
        words = f"a weight gradient that was put off, of layer {layer}, {linear}"
        return Moment(words, "weight_gradient", ("backward",), chunk=entry.chunk, half=(layer, entry.half))
    if (where is None or where.passing == "backward") and _in(passed, DISTRIBUTED):
        beside = f", beside the backward of micro-batch {where.micro_batch}" if where and where.micro_batch is not None else ""
        return Moment(f"the reduction of gradients{beside}", "reduction", ("reduction",))
    if where is None:
        if _is_in(passed, rank.optimizer):
            name = "update" if rank.stepped else "first_update"
            words = "an update" if rank.stepped else "the first update, which makes the optimizer's state"
            return Moment(words, name, (name,))
        return Moment("a message between stages", "message") if _in(passed, MESSAGES) else None
    if where.replays:
        return _at("a replay of", where, "replay", ("backward",))
    return _in_forward(where, passed, rank) if where.passing == "forward" else _in_backward(where, passed, rank)


def _in_forward(where: Whereabouts, passed: Sequence[_Passed], rank: Rank) -> Moment:
    if half := where.half or _half_called(passed):
        return _at("the forward of", where, "forward", ("forward",), half)
    model = rank.chunks[where.chunk] if where.chunk < len(rank.chunks) else None
    if _is_in(passed, getattr(model, "embedding", None)):
        return _at("the embedding's forward of", where, "forward", ("forward",))
    if _is_in(passed, getattr(model, "decoder", None)) or not rank.is_last(where.chunk):
        return _at("the forward of", where, "forward", ("forward",))
    return _at("the loss of", where, "loss", ("loss",))


def _in_backward(where: Whereabouts, passed: Sequence[_Passed], rank: Rank) -> Moment:
    if where.half is not None:
        first = rank.plan.chunks_of(rank.stage)[where.chunk].layers.first
        embedding = (rank.stage, where.chunk, where.half) == (0, 0, (first, ATTENTION))
        moment = _at("the backward of", where, "backward", ("backward", *(["embedding_backward"] if embedding else [])))
        return replace(moment, words=f"{moment.words}, or of the embedding behind it") if embedding else moment
    if not rank.is_last(where.chunk):
        return _at("the backward of", where, "backward", ("backward",))
    if any(one.function == "backward" and "cross_entropy" in one.module for one in passed):
        return _at("the loss's backward of", where, "loss", ("loss",))
    if rank.top_half_is_seen(where.chunk):
        return _at("the head's backward of", where, "head_backward", ("head_backward", "loss"))
    return _at("the backward of the head, or of halves that the plan leaves alone, of", where, "backward", ("backward",))


def _at(what: str, where: Whereabouts, name: str, planned: Sequence[str] = (), half: FrameKey | None = None) -> Moment:
    half = half or where.half
    words = [] if where.micro_batch is None else [f"micro-batch {where.micro_batch}"]
    words += [f"chunk {where.chunk}"] if where.chunk else []
    words += [] if half is None else [f"layer {half[0]}", f"{half[1]} half"]
    return Moment(f"{what} {', '.join(words) or 'a micro-batch'}", name, tuple(planned), where.micro_batch, where.chunk, half)


def _half_called(passed: Sequence[_Passed]) -> FrameKey | None:
    """The half that the engine was called with, if it has no planned work."""
    policies = [one.local.get("policy") for one in passed]
    return next(((policy.layer, policy.half) for policy in reversed(policies) if isinstance(policy, HalfPolicy)), None)


def _put_off(passed: Sequence[_Passed]) -> Entry | None:
    """The delayed weight gradient that is being computed, if any."""
    entries = (one.local.get("entry") for one in reversed(passed) if one.module == WEIGHT_GRADIENTS)
    return next((entry for entry in entries if isinstance(entry, Entry)), None)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_in(passed: Sequence[_Passed], module: Any) -> bool:
    """Whether a method of this module object runs."""
    return module is not None and any(one.local.get("self") is module for one in passed)


def _in(passed: Sequence[_Passed], package: str) -> bool:
    """Whether a function of a package runs, other than a module's forward."""
    return any(one.module.startswith(package) and one.function != "forward" for one in passed)
