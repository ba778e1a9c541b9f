"""What a replay of one layer half runs, what it regenerates, and what stays in memory for it.

    item        norm ─────> linear_qkv ─────> rotary ─────> core_attention ─────> linear_proj ─────> bda
    block            norm_out          qkv_out        q, k                probs, context        mask

    replay = {norm, core}:  norm runs, linear_qkv hands over its memo, rotary and core run, linear_proj is reached: stop.

 [1] a replayed item lets go of what its backward reads; it, and the code on the way, runs again
 [2] a kept site lets go of its argument, where the replay makes that anyway; the replay must only *reach* it
 [3] what a kept item hands on stays: its output is the memo, or is read by a kept neighbour
 [4] a memo with values is held of every kept site that a replay passes on its way; nothing reads those of `Section.ends`
 [5] a norm of Transformer Engine hands on nothing: the linear in which it is made runs it again
 [6] where a replay stops, what the sites that it ran returned is remembered, and so held, until it goes on
 [7] a checkpointed half runs again up to what its backward reads first, dispatch of tokens included, which reads what the router
     decided; or to its end, where the half behind it needs what it returns
These are the rules of `runtime.record`, for sizes instead of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from megatron_lynx.anatomy import Section
from megatron_lynx.profiler.profile import SavedTensor


class Checkpoint(NamedTuple):
    """A half that keeps at most its input: everything inside runs again when backward enters it, what communicates included."""

    feeds: bool = False
    """Whether it runs again to its end, because the half behind it keeps no input."""
    fed: bool = False
    """Whether it keeps no input, and gets it from the half before."""
    ahead_to: str | None = None
    """The item to which it runs again while the layer above runs backward (`timetable.PlannedHalf`)."""
    gathers_ahead: bool = False
    """Whether its input is gathered before that."""
    goes_on: bool = False
    """Whether what comes behind all that communicates runs again in the first wait of its own backward."""

    @property
    def joined(self) -> bool:
        """Whether it is a part of a layer that keeps one input."""
        return self.feeds or self.fed

    def items(self, section: Section) -> tuple[str, ...]:
        """What runs again."""
        return section.run_again(whole=self.feeds)


INSIDE = Checkpoint(feeds=True, fed=True)
"""A half inside a group of layers that keep one input, neither its first nor its last."""


@dataclass(frozen=True)
class Replay:
    """One half under one choice of replayed items. Bytes count the half's saved blocks, not its input."""

    runs: tuple[str, ...]
    """The items that a replay runs, in order; kept code on the way included, kept sites not."""
    stays: tuple[SavedTensor, ...]
    """What is held from forward to backward."""
    regenerated_bytes: int
    """What the replay makes."""
    there_bytes: Mapping[str, int]
    """By item before which it may stop: what it has made by then, memos of the sites that it ran included."""

    @property
    def stays_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.stays)


def replay_of(
    section: Section,
    tensors: Sequence[SavedTensor],
    replay: Collection[str],
    *,
    whole: bool = False,
    stops: Collection[str] | None = None,
) -> Replay:
    """What follows from replaying exactly these items of a section. `whole`: whether the replay runs to the half's end. [7]
    `stops`: the items before which it may stop, if not those of the section."""
    order, code, ends = section.names, section.code, section.ends
    if any(item.role == "dispatch" and item.name in replay for item in section.items):
        ends = tuple(item for item in ends if section.of_name[item].role != "router")  # [7]
    let_go = [(tensor, [item for item in tensor.saved_by if _lets_go(section, tensor, item, replay)]) for tensor in tensors]
    reached = [order.index(item) for _, items in let_go for item in items]
    last = max((_last_run(section, tensor, item) for tensor, items in let_go for item in items), default=-1)
    last = len(order) - 1 if whole else last
    passed = max((index for index in reached if index <= order.index(ends[-1])), default=-1)
    made = {tensor.made_by for tensor, items in let_go if items and not tensor.output}  # [5]
    runs = tuple(item for item in order[: last + 1] if item in code or item in replay or item in made)
    stays, regenerated = [], 0
    there = dict.fromkeys(section.stops if stops is None else stops, 0)
    for tensor, items in let_go:
        remembered = tensor.output and tensor.made_by not in (*replay, *ends) and order.index(tensor.made_by) < passed  # [4]
        if remembered or set(tensor.saved_by) - set(items):
            stays.append(tensor)
            continue
        if items:
            regenerated += tensor.bytes
        first = min((_last_run(section, tensor, item) for item in items), default=len(order))
        if tensor.output and tensor.made_by in runs:  # [6]
            first = min(first, order.index(tensor.made_by))
        for stop in there:
            there[stop] += tensor.bytes * (first < order.index(stop))
    return Replay(runs, tuple(stays), regenerated, there)


def sensible_choices(
    section: Section, tensors: Sequence[SavedTensor], context: int = 1, *, sequence_parallel: bool = False, te: bool = False
) -> Iterator[tuple[str, ...]]:
    """Every set of replayed items in which each is run by a replay, and each run is replayed: there are at most 2^5, and fewer
    than that of latent attention that are worth anything.

    `context`: among how many ranks a sequence is cut; among several the core attention is kept. `sequence_parallel`, `te`: what
    latent attention can replay depends on these, too.

    A set beside these says the same as one of them: an item that saves nothing is kept for nothing, and code that runs
    again anyway need not hold what it saves.
    """
    replayable = section.replayable_among(context, sequence_parallel=sequence_parallel)
    found = (
        chosen
        for size in range(len(replayable) + 1)
        for chosen in combinations(replayable, size)
        if not section.torn(chosen)
        and replay_of(section, tensors, chosen).runs == chosen
        and not (te and section.norms_apart(chosen))
    )
    yield from _worth_it(section, tensors, tuple(found)) if section.two_paths else found


def _worth_it(section: Section, tensors: Sequence[SavedTensor], choices: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Of a section with two paths, whose items can be chosen in hundreds of ways: only sets without which more would be held, or
    run again. Of two that hold as much, one runs no more than what the other runs: the first that runs fewest is taken."""
    fewest: dict[int, tuple[str, ...]] = {}
    for chosen in choices:
        held = replay_of(section, tensors, chosen).stays_bytes
        fewest.setdefault(held, chosen)
    kept: list[tuple[str, ...]] = []
    for _, chosen in sorted(fewest.items()):  # each holds more than those before it
        if not any(set(again) <= set(chosen) for again in kept):
            kept.append(chosen)
    yield from (chosen for chosen in choices if chosen in kept)


def _lets_go(section: Section, tensor: SavedTensor, item: str, replay: Collection[str]) -> bool:
    """Whether `item`'s hold on the tensor becomes a handle."""
    if item in replay:
        return True  # [1]
    if item in section.code or not _is_argument(section, tensor, item) or tensor.made_by == "input":
        return False
    from_kept_site = tensor.output and tensor.made_by not in replay
    if not section.two_paths:
        return section.before(item) in replay and not from_kept_site  # [2] [3]
    before = section.names[section.index(item) - 1]
    return tensor.made_by in replay and not from_kept_site and (before in replay or before not in section.code)


def _is_argument(section: Section, tensor: SavedTensor, item: str) -> bool:
    return tensor.made_by == "input" or section.index(tensor.made_by) < section.index(item)


def _last_run(section: Section, tensor: SavedTensor, item: str) -> int:
    """The last item that must run before this handle can be filled: a linear's argument exists when the linear is reached."""
    index = section.index(item)
    own = item in section.code or not _is_argument(section, tensor, item)
    return index if own else index - 1
