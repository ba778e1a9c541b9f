"""Exposed time of each collective of a layer half (its windows), and the userbuffers of `--tp-comm-overlap`.

In FP8 inputs are gathered as bytes, after their cast. Block-scaled gradients are gathered by rows and by columns: as many bytes
as in bf16.

Transformer Engine allocates userbuffers outside PyTorch's allocator, before the first step:

                                                                   tensors     with FP8
    gathered    qkv, fc1 forward and dgrad, proj, fc2 dgrad and wgrad    8     in bytes
    scattered   proj, fc2 forward, qkv, fc1 wgrad                        4     in 16 bits

Each holds all rows of a micro-batch and serves all layers. Source: `initialize_ub` of Transformer Engine 2.9 to 2.20 with
Megatron's default methods (a ring reduce-scatter needs almost twice as much).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_lynx.anatomy import Collective, Pass, Section
from megatron_lynx.config.job import Job
from megatron_lynx.fp8_recipes import PER_TENSOR
from megatron_lynx.kinds.experts.section import SHARED_LINEARS
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.kinds.section import Exchange
from megatron_lynx.profiler.profile import BlockProfile, LinkKind, Profile
from megatron_lynx.profiler.shape import BF16_BYTES, FP8_BYTES, LayerShape

SCATTER_AND_GATHER: tuple[LinkKind, LinkKind] = ("reduce_scatter", "all_gather")


def window_lengths_s(
    profile: Profile, passing: Pass, section: Section, message_bytes: int, deferred: Collection[str] = ()
) -> tuple[float, ...]:
    """Return the seconds of a section's windows in one pass, by ordinal. `message_bytes`: the gathered tensor (`LayerShape`).
    `deferred`: linears with delayed weight gradients, which hide no collective here."""
    lengths_s, half = list[float](), profile.experts
    for window in windows_of(profile, section, passing):
        if not isinstance(window, Exchange):
            lengths_s.append(_exposed_s(profile, section, window, message_bytes, deferred))
        elif window.carries == "tokens":
            assert half is not None, "a profile with such a section has its figures"
            lengths_s.append(half.exchange_s - half.beside_s(passing, window.behind))  # shared experts hide a part
        else:
            lengths_s.append(0.0)  # probabilities: a few bytes a row
    return tuple(lengths_s)


def windows_of(profile: Profile, section: Section, passing: Pass) -> tuple[Collective | Exchange, ...]:
    """Return the collectives and exchanges of a section in one pass; empty if one rank has all."""
    if section.exchanges:
        return section.exchanges_of[passing] if profile.shape.expert > 1 else ()
    return section.collectives(passing, profile.shape.sequence_parallel) if profile.shape.tensor > 1 else ()


def again_s(profile: Profile, section: Section, runs: Collection[str]) -> float:
    """Return the exposed communication of these items when a checkpoint recomputes them, the same as in forward."""
    total_s = sum(wait_s for item, _, wait_s in _forward_waits(profile, section) if item in runs)
    if section.exchanges and profile.experts is not None:
        of_roles = [section.of_name[item].role for item in runs]
        cut, collectives = of_roles.count("dispatch") + of_roles.count("combine"), len({*SHARED_LINEARS}.intersection(runs))
        total_s += cut * profile.experts.cut_s + collectives * profile.experts.collective_s
    return total_s


def under_way_s(profile: Profile, section: Section, item: str, *, gathers: bool = False) -> float:
    """Return the communication of one item that can overlap other compute. `gathers`: of its input, else of its output."""
    waits = _forward_waits(profile, section)
    return sum(wait_s for waiting_item, carries, wait_s in waits if waiting_item == item and (carries == "input") == gathers)


def _forward_waits(profile: Profile, section: Section) -> Iterator[tuple[str, str, float]]:
    """Yield (item, tensor, seconds) of each wait: the item whose input is gathered, or whose output is reduced or exchanged."""
    waited, seconds = windows_of(profile, section, "fwd"), window_lengths_s(profile, "fwd", section, profile.message_bytes)
    for window, wait_s in zip(waited, seconds, strict=True):
        if isinstance(window, Exchange):
            yield section.item(window.behind).name, window.carries, wait_s
        else:
            item = window.of or (section.column_parallel if window.carries == "input" else section.row_parallel)
            yield item, window.carries, wait_s


def _exposed_s(
    profile: Profile, section: Section, collective: Collective, message_bytes: int, deferred: Collection[str]
) -> float:
    seconds = profile.link_s(collective.kind, _carried_bytes(profile, section, collective, message_bytes))
    if collective.beside == "wgrad" and (collective.of or section.column_parallel) in deferred:
        return seconds
    return max(0.0, seconds - _beside_s(profile, section, collective))


def _beside_s(profile: Profile, section: Section, collective: Collective) -> float:
    """Return the time of the overlapped GEMM. Stock overlaps in the column-parallel linear's backward, userbuffers everywhere."""
    items = profile.of(section).items
    column, row = items[collective.of or section.column_parallel or section.row_parallel], items[section.row_parallel]
    if profile.hiding == "nothing":
        return 0.0
    if collective.beside is not None:
        return column.dgrad_s if collective.beside == "dgrad" else column.wgrad_s
    if profile.hiding == "stock":
        return 0.0
    beside_s = {"input": column.forward_s, "output": row.forward_s, "gradient": row.dgrad_s}
    return beside_s.get(collective.carries, 0.0)


def _carried_bytes(profile: Profile, section: Section, collective: Collective, message_bytes: int) -> int:
    if collective.of:
        carried = message_bytes * planning_of(section).carried_width(profile.shape, collective) // profile.shape.hidden
        return profile.gathered_input(carried) if collective.carries == "input" else carried
    if collective.carries not in ("input", "gradient"):
        return message_bytes
    twice = collective.carries == "gradient" and profile.shape.fp8 not in (None, *PER_TENSOR)
    return (1 + twice) * profile.gathered_input(message_bytes)


def kept_gathers_bytes(profile: Profile, section: Section, recompute: Collection[str], message_bytes: int) -> int:
    """Return the gathered inputs of recomputed up-projections, which are kept for the recomputation (sequence parallelism)."""
    if not profile.shape.sequence_parallel or profile.shape.tensor == 1:
        return 0
    inputs = (one for one in section.collectives("fwd", True) if one.carries == "input" and one.of in section.gathering_latents)
    return sum(_carried_bytes(profile, section, one, message_bytes) for one in inputs if one.of in recompute)


def embedding_of(profile: Profile, message_bytes: int) -> BlockProfile:
    """Return the embedding with its collectives: partial lookups are all-reduced, or with sequence parallelism
    reduce-scattered and the gradient gathered. (Learned positions use an all-reduce; this is ignored.)"""
    if not profile.shape.sequence_parallel:
        return profile.embedding.longer(profile.link_s("all_reduce", message_bytes), 0.0)
    forward_s, backward_s = (profile.link_s(kind, message_bytes) for kind in SCATTER_AND_GATHER)
    return profile.embedding.longer(forward_s, backward_s)


def head_of(profile: Profile, message_bytes: int, pieces: int = 1) -> BlockProfile:
    """Return the head with the collectives of its column-parallel linear. The gradient's reduction overlaps the wgrad GEMM, taken
    as a third of the head's backward. In pieces, backward recomputes logits and loss, and collectives run once, exposed."""
    again_s = profile.head.forward_s + (pieces - 1) * profile.head_summand_s if pieces > 1 else 0.0
    hidden_s = profile.head.backward_s / 3 if pieces == 1 else 0.0
    if not profile.shape.sequence_parallel:
        return profile.head.longer(0.0, again_s + max(0.0, profile.link_s("all_reduce", message_bytes) - hidden_s))
    scatter_s, gather_s = (profile.link_s(kind, message_bytes) for kind in SCATTER_AND_GATHER)
    gathered_again_s = max(0.0, gather_s - hidden_s) if pieces == 1 else 0.0
    return profile.head.longer(gather_s, again_s + (gathered_again_s + max(0.0, scatter_s - hidden_s)))


def gather_lost_and_spared_s(
    profile: Profile, section: Section, behind: Section | None, message_bytes: int, *, whole: bool = False
) -> tuple[float, float]:
    """Return (lost, saved) seconds of gathering a column-parallel linear's input once, for both recomputation and backward; one
    of the two is 0. The gather starts after the first backward collective of the section `behind`, and overlaps the backward of
    that section's row-parallel linear and of the items before it; `whole`: also the rest of it. `behind` None: exposed."""
    gather_s = profile.link_s("all_gather", profile.gathered_input(message_bytes))
    saved_s = max(0.0, gather_s - profile.of(section).items[section.column_parallel].dgrad_s)
    longer_s = max(0.0, gather_s - (behind_gather_s(profile, behind, whole) if behind else 0.0)) - saved_s
    return max(0.0, longer_s), max(0.0, -longer_s)


def behind_gather_s(profile: Profile, section: Section, whole: bool = False) -> float:
    """Return the backward seconds from a section's first collective to its column-parallel linear; `whole`: to its end."""
    items = profile.of(section).items
    rest = reversed(section.names[: section.index(section.inner[0])]) if whole else ()
    return sum(items[item].backward_s for item in (*reversed(section.inner), *rest))


def before_core_s(profile: Profile, section: Section) -> float:
    """Return the part of `behind_gather_s` before the core attention."""
    items = profile.of(section).items
    return sum(items[item].backward_s for item in section.inner if section.index(item) > section.index(section.core))


GATHERED, SCATTERED = 8, 4


def userbuffers_bytes(job: Job, shape: LayerShape) -> int:
    if not job.userbuffers:
        return 0
    gathered = GATHERED * shape.gathered_bytes
    if job.model.fp8 is not None:
        gathered = gathered * FP8_BYTES // BF16_BYTES  # there are none with FP4
    return gathered + SCATTERED * shape.gathered_bytes
