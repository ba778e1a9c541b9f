"""Recomputation of one layer half: the items that run, the bytes that it makes, and the bytes that stay for it; and the
bytes and FLOPs of one layer under the policies of stock Megatron and of Yuan et al.

    item        norm ─────> linear_qkv ─────> rotary ─────> core_attention ─────> linear_proj ─────> bda
    block            norm_out          qkv_out        q, k                probs, context        mask

    recompute = {norm, core}:  norm runs, linear_qkv returns its memo, rotary and core run, linear_proj is reached: stop.

These are the rules of `runtime.record`, for sizes instead of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations
from typing import NamedTuple

from megatron_lynx.anatomy import ATTENTION, HALVES, MLP, LayerKind, Section, filling
from megatron_lynx.config.job import Policy
from megatron_lynx.kinds.dense.section import ACTIVATION, CORE_ATTENTION
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape


class Checkpoint(NamedTuple):
    """A half that saves at most its input and is recomputed whole, communication included."""

    feeds: bool = False
    """Recomputed to its end, because the next half saves no input."""
    fed: bool = False
    """Saves no input, and gets it from the previous half."""
    ahead_to: str | None = None
    """Item to which it is recomputed during the backward of the layer above (`timetable.PlannedHalf`)."""
    gathers_ahead: bool = False
    """Whether its input is gathered before that."""
    rest_in_wait: bool = False
    """Whether the items after its last communication are recomputed in the first wait of its backward."""

    @property
    def joined(self) -> bool:
        return self.feeds or self.fed

    def items(self, section: Section) -> tuple[str, ...]:
        return section.run_again(whole=self.feeds)


INSIDE = Checkpoint(feeds=True, fed=True)
"""A half inside a group of layers that keeps one input, neither first nor last."""


@dataclass(frozen=True)
class Recomputation:
    """Consequences of recomputing some items of a half. Bytes exclude its input."""

    runs: tuple[str, ...]
    """Items that the recomputation runs, in order: code on the way included, kept sites not."""
    stays: tuple[SavedTensor, ...]
    regenerated_bytes: int
    there_bytes: Mapping[str, int]
    """By item before which it may stop: bytes made by then, memos of the sites that it ran included."""

    @property
    def stays_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.stays)


def recomputation_of(
    section: Section,
    tensors: Sequence[SavedTensor],
    recompute: Collection[str],
    *,
    whole: bool = False,
    stops: Collection[str] | None = None,
) -> Recomputation:
    """Return the consequences of recomputing exactly these items. `whole`: run to the half's end. `stops`: items before which it
    may stop; default: the section's."""
    order, code, ends = section.names, section.code, section.ends
    if any(item.role == "dispatch" and item.name in recompute for item in section.items):
        # A recomputed dispatch reads the router's output.
        ends = tuple(item for item in ends if section.of_name[item].role != "router")
    let_go = [(tensor, [item for item in tensor.saved_by if _lets_go(section, tensor, item, recompute)]) for tensor in tensors]
    reached = [order.index(item) for _, items in let_go for item in items]
    last = max((_last_run(section, tensor, item) for tensor, items in let_go for item in items), default=-1)
    last = len(order) - 1 if whole else last
    passed = max((index for index in reached if index <= order.index(ends[-1])), default=-1)
    # A norm fused into a linear has no memo: the linear recomputes it.
    made = {tensor.made_by for tensor, items in let_go if items and not tensor.output}
    runs = tuple(item for item in order[: last + 1] if item in code or item in recompute or item in made)
    stays, regenerated = [], 0
    held_bytes = dict.fromkeys(section.stops if stops is None else stops, 0)
    for tensor, items in let_go:
        # The memo of a kept site that recomputation passes stays.
        remembered = tensor.output and tensor.made_by not in (*recompute, *ends) and order.index(tensor.made_by) < passed
        if remembered or set(tensor.saved_by) - set(items):
            stays.append(tensor)
            continue
        if items:
            regenerated += tensor.bytes
        first = min((_last_run(section, tensor, item) for item in items), default=len(order))
        if tensor.output and tensor.made_by in runs:  # a stopped recomputation holds the outputs of the sites that it ran
            first = min(first, order.index(tensor.made_by))
        for stop in held_bytes:
            held_bytes[stop] += tensor.bytes * (first < order.index(stop))
    return Recomputation(runs, tuple(stays), regenerated, held_bytes)


@lru_cache(maxsize=256)
def sensible_choices(
    section: Section,
    tensors: tuple[SavedTensor, ...],
    context: int = 1,
    *,
    sequence_parallel: bool = False,
    te: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """Return each set of recomputed items that equals the items its recomputation runs: at most 2^5. Other sets are equivalent to
    one of these. `context`: number of context-parallel ranks; with several the core attention is kept. `sequence_parallel`, `te`:
    restrict latent attention, too. It has hundreds of sets: those are dropped that another one beats in both bytes and items, and
    of sets that hold equal bytes all but the first with fewest items."""
    recomputable = section.recomputable_among(context, sequence_parallel=sequence_parallel)
    held_bytes: dict[tuple[str, ...], int] = {}
    for chosen in chain.from_iterable(combinations(recomputable, size) for size in range(len(recomputable) + 1)):
        if section.torn(chosen) or (te and section.norms_apart(chosen)):
            continue
        recomputed = recomputation_of(section, tensors, chosen)
        if recomputed.runs == chosen:
            held_bytes[chosen] = recomputed.stays_bytes
    if not section.two_paths:
        return tuple(held_bytes)
    fewest: dict[int, tuple[str, ...]] = {}
    for chosen, held in held_bytes.items():
        fewest.setdefault(held, chosen)
    kept: list[tuple[str, ...]] = []
    for _, chosen in sorted(fewest.items()):  # by rising bytes
        if not any(set(again) <= set(chosen) for again in kept):
            kept.append(chosen)
    return tuple(chosen for chosen in held_bytes if chosen in kept)


def _lets_go(section: Section, tensor: SavedTensor, item: str, recompute: Collection[str]) -> bool:
    if item in recompute:
        return True  # it frees all that its backward reads
    if item in section.code or not _is_argument(section, tensor, item) or tensor.made_by == "input":
        return False
    from_kept_site = tensor.output and tensor.made_by not in recompute
    if not section.two_paths:
        # A kept site frees its argument if recomputation makes that anyway; a kept site's output stays as its memo.
        return section.before(item) in recompute and not from_kept_site
    before = section.names[section.index(item) - 1]
    return tensor.made_by in recompute and not from_kept_site and (before in recompute or before not in section.code)


def _is_argument(section: Section, tensor: SavedTensor, item: str) -> bool:
    return tensor.made_by == "input" or section.index(tensor.made_by) < section.index(item)


def _last_run(section: Section, tensor: SavedTensor, item: str) -> int:
    """Return the last item to run before the tensor is available: a linear's argument exists when it is reached."""
    index = section.index(item)
    runs_item = item in section.code or not _is_argument(section, tensor, item)
    return index if runs_item else index - 1


BALANCED = (ATTENTION.norm, MLP.norm, ACTIVATION)


def recomputed_items(policy: Policy) -> tuple[str, ...]:
    """Return the items recomputed in backward. Raises `KeyError` for `planned`.

    selective   the core attention (stock: `--recompute-granularity selective`)
    balanced    norms and the activation: no GEMM or attention is recomputed (Yuan et al., ATC '24)
    full        all but the layer's input (stock: `--recompute-granularity full`)
    """
    usual = (name for half in HALVES for section in filling(half) if not section.in_some_layers for name in section.names)
    return {"none": (), "selective": (CORE_ATTENTION,), "balanced": BALANCED, "full": tuple(dict.fromkeys(usual))}[policy]


@lru_cache(maxsize=1024)
def kept_bytes(shape: LayerShape, kind: LayerKind | None = None) -> int:
    """Return the bytes one layer saves of one micro-batch without recomputation, its input included. `kind`: default a layer
    without experts."""
    return sum(half_kept_bytes(shape, section) for section in kind or shape.model.kind_sections(experts=False))


def half_kept_bytes(shape: LayerShape, section: Section) -> int:
    if section.opaque and shape.model.opaque_in(section).nothing:
        return 0
    return shape.input_bytes + sum(tensor.bytes for tensor in planning_of(section).tensors(shape) if tensor.saved_by)


def beyond_fp8_bytes(shape: LayerShape, layers: range) -> int:
    """Return how much more these layers save in bf16 than in FP8, with nothing recomputed."""
    plain = replace(shape, model=shape.model.model_copy(update={"fp8": None})) if layers else shape
    kinds = map(shape.model.sections, layers)
    return sum(max(0, kept_bytes(plain, kind) - kept_bytes(shape, kind)) for kind in kinds)


def recomputed_flops(shape: LayerShape, recompute: Collection[str], kind: LayerKind | None = None) -> int:
    """Return the FLOPs one layer recomputes for one micro-batch on one rank. `kind`: default a layer without experts."""
    total = 0
    for section in kind or shape.model.kind_sections(experts=False):
        if section.opaque:
            continue
        face = planning_of(section)
        flops, runs = face.flops(shape), recomputation_of(section, face.tensors(shape), recompute).runs
        total += sum(flops[item] for item in runs if item in recompute)
    return total
