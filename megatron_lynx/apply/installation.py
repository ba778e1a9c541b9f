"""Installs a plan: resolves every claim, verifies all, then changes all or none. A refusal leaves Megatron unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from megatron_lynx.anatomy import HALVES, Section
from megatron_lynx.apply import hook as holding
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks import collectives, halves, head_in_pieces, sites, steps, weight_gradients
from megatron_lynx.apply.hooks.head_in_pieces import head_chunk
from megatron_lynx.apply.hooks.random_state import MegatronRandom, left_as_they_were
from megatron_lynx.apply.hooks.sites import marked_in, may_draw_in
from megatron_lynx.apply.kinds import claims as claims_of_kinds
from megatron_lynx.apply.kinds import layers_by_kind, sections_in
from megatron_lynx.apply.live_run import LiveRun, is_hybrid, live_run, of_all_ranks, overlapped, owner_of, recipe_of
from megatron_lynx.apply.refusals import mismatches, refusals
from megatron_lynx.apply.releases import present_release, present_te
from megatron_lynx.apply.transformer_engine import Fp8Autocast
from megatron_lynx.errors import HookRefused, PlanMismatch, Problem
from megatron_lynx.free_memory import free_memory
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.runtime.device import Device, device_for
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import ChunkPolicy, Gather, HalfPolicy
from megatron_lynx.runtime.host_memory import HostFacts, HostLimit, limit_of
from megatron_lynx.runtime.offload import Offloader, OffloadPolicy
from megatron_lynx.runtime.order import OrderOfStep, StageOrder
from megatron_lynx.runtime.record import GATHERED
from megatron_lynx.runtime.saved import memory_of
from megatron_lynx.runtime.surroundings import NO_HOOKS, Autocast, ForwardHooks
from megatron_lynx.schedule.flushes import most_in_flight, most_on_host, passes_of
from megatron_lynx.timetable import PlannedHalf, Timetable

if TYPE_CHECKING:
    from megatron_lynx.double_buffered.pipeline import DoubleBuffered

log = logging.getLogger(__name__)


class Installation:
    def __init__(self, engine: Engine, hooks: Sequence[Claim], overlapping: DoubleBuffered | None = None) -> None:
        self.engine = engine
        self.hooks = tuple(hooks)
        self._overlapping = overlapping
        if overlapping is not None:
            overlapping.under(engine)

    def remove(self) -> None:
        """Restore the identical objects. Raises `HookRefused` during a step; a second call does nothing."""
        self._give_back()
        if self._overlapping is not None:
            self._overlapping.under(None)
        self.engine.offloader.close()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Run the block without the plan (Megatron has its identical objects), then install it again with the same engine. Raises
        `HookRefused` during a step."""
        hooks = self.hooks
        self._give_back()
        try:
            yield
        finally:
            self.hooks = tuple(holding.put_in_place(hooks))

    def _give_back(self) -> None:
        if self.hooks and self.engine.busy:
            raise HookRefused(
                "cannot remove the plan now",
                [Problem("installation", "a step under way", "the end of a step", "call remove() between steps (rule R7)")],
            )
        holding.give_back(self.hooks)
        self.hooks = ()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            self.engine.abandon()
        self.remove()


def install(model: Any, plan: Plan, without_flushes: DoubleBuffered | None = None) -> Installation:
    """Install `plan` on `model`: a GPTModel of megatron-core, as built and wrapped, or Megatron's list of a rank's chunks.

    Call it on every rank, after `parallel_state` and the model exist and before the first step. `without_flushes`: runs the
    batches instead of Megatron's schedules.

    Raises:
        PlanMismatch: the plan was made for another model, layout or stage (every difference is listed).
        HookRefused: this release or a setting of the run is not supported; or micro-batches are in flight.
        OffloadError: the host has too little memory for the plan.
    """
    run = live_run(model)
    limit = host_limit_of(plan, run)
    if not isinstance(run, LiveRun):
        raise HookRefused("this model cannot carry a plan", run)
    if stale := stale_code(plan, run):
        raise HookRefused("code that hooks rely on does not read as recorded", stale)
    if refused := refusals(plan, run):
        raise HookRefused("this run cannot carry a plan", refused)
    if differing := mismatches(plan, run, without_flushes is not None):
        raise PlanMismatch("the plan does not fit this run", differing)
    device = device_for(next(parameter for chunk in run.chunks for parameter in chunk.parameters()).device)
    order = order_of(run.pipeline, run.stage, len(run.chunks), run.group_size, int(overlapped(run.config)))
    if without_flushes is not None:
        without_flushes.check_drained("a plan is installed")
    timetable = timetable_of(plan, run.stage)
    engine = Engine(
        timetable,
        chunk_policies(plan, run.stage),
        order=order,
        random=MegatronRandom(device),
        guard=left_as_they_were,
        device=device,
        offloader=offloader_of(plan, run, order, device, limit),
        surroundings=(Autocast(), Fp8Autocast()) if run.fp8 else (Autocast(),),
        reduced_in_backward=lambda: run.reduces_in_backward,
        **({} if without_flushes is None else {"as_recorded": without_flushes.as_recorded}),
    )
    claims = list(_claims(engine, plan, run, timetable))
    if conflicts := holding.verify(claims, around_others=without_flushes is None):
        raise HookRefused("the plan cannot be installed", conflicts)
    engine.offloader.lock_ahead()  # last, because it takes long; it may still be refused
    hooks = holding.put_in_place(claims)
    for hook in hooks:
        log.info("megatron-lynx holds %s: %s", hook.where, hook.reason)
    return Installation(engine, hooks, without_flushes)


def stale_code(plan: Plan, run: LiveRun) -> list[Problem]:
    """Functions of Megatron and Transformer Engine that matter in this run, and differ from the recorded ones."""
    matters = {
        "": True,
        "te": run.uses_te,
        "fp8": run.fp8,
        "fp4": run.fp8 and recipe_of(run.config) == "nvfp4",
        "grouped": run.groups_experts,
        "hybrid": any(map(is_hybrid, run.chunks)),
        "head": plan.head is not None,
        "overlapped": overlapped(run.config),
        **dict.fromkeys(layers_by_kind(run), True),
    }
    releases = [present_release(), *([present_te()] if run.uses_te else [])]
    return [problem for release in releases for what, does in matters.items() if does for problem in release.stale(what)]


def _claims(engine: Engine, plan: Plan, run: LiveRun, timetable: Timetable) -> Iterator[Claim]:
    shards, layers = run.shards_of(plan.parallel.sequence_parallel), run.layers
    capacity = halves.Capacity(-(-plan.model.seq // shards) * plan.batch.micro, shards)
    gather, offloading = collectives.start_gather(run.tensor_group), engine.offloader.policies
    planned = list(policies(plan, run.stage, timetable, gather, layers, offloading))
    telling = next((policy for policy in planned if policy.half == HALVES[0] and not policy.section.kept_whole), None)
    for policy in planned:
        if not policy.section.kept_whole:
            yield halves.claim(engine, layers[policy.layer], policy, capacity, tells=policy is telling)
        if policy.may_recompute or policy.midway or policy.goes_out(offloading):
            yield from sites.claims(engine, layers[policy.layer], policy.section, policy.layer, te=run.uses_te, fp8=run.fp8)
    yield from steps.claims(engine, frozenset(map(id, run.chunks)), combined=overlapped(run.config))
    yield from claims_of_kinds(engine, plan, run)
    linears = weight_gradients.deferring_linears(plan, run)
    if run.pipeline > 1:
        timetables = [timetable_of(plan, stage) for stage in range(run.pipeline)] if run.overlaps_exchanges else []
        apart = any(of_stage.receive(chunk).hides for of_stage in timetables for chunk in range(len(of_stage.chunks)))
        yield from steps.receive_claims(engine, waited_for_later=run.overlaps_exchanges, gradients_apart=apart)
    if run.tensor > 1:
        yield from collectives.claims(engine, run.tensor_group)
        if run.uses_te:
            yield from collectives.te_claims(engine, run.tensor_group)
        gathers = any(policy.gather_site or policy.keeps_gathered for policy in planned)
        if gathers or (linears and plan.parallel.sequence_parallel and not run.uses_te):
            yield collectives.buffer_claim(engine)
    if plan.head is not None and (chunk := head_chunk(run)) is not None:
        yield from head_in_pieces.claims(chunk, plan.head.pieces)
    if linears:
        yield from weight_gradients.claims(engine, plan, run, linears)


def policies(
    plan: Plan, stage: int, timetable: Timetable, gather: Gather, modules: Mapping[int, Module], offloading: Container[int]
) -> Iterator[HalfPolicy]:
    """The policy of every half of a stage. `modules`: its layers by number. `offloading`: chunks that offload."""
    for entry, halves_of_chunk, busy_halves in zip(plan.chunks_of(stage), timetable.chunks, timetable.busy_halves, strict=True):
        below: HalfPolicy | None = None
        for planned in halves_of_chunk:
            module = modules[planned.layer]
            section = next(section for section in sections_in(module) if section.half == planned.half)
            policy = _policy(plan, entry, planned, section, gather, module)
            busy = policy.goes_out(offloading) or policy.deferred or policy.may_recompute or policy.key in busy_halves
            below = replace(
                policy,
                fed_by=below.key if below is not None and below.feeds else None,
                midway=section.core if policy.key in timetable.core_halves else None,
                passed_over=not busy,
                below_passed_over=below is not None and below.passed_over,
            )
            yield below


def _policy(plan: Plan, stage: Stage, planned: PlannedHalf, section: Section, gather: Gather, module: Module) -> HalfPolicy:
    recomputed = frozenset(planned.recompute)
    if planned.checkpoint:
        recomputed |= {GATHERED.name}
    falls_back = stage.experts_hold is not None and section.on_rows - recomputed and not planned.checkpoint
    hooks, marked = NO_HOOKS, tuple[object, ...]()
    if recomputed or falls_back:
        hooks = ForwardHooks(module.modules(), _waits_for_weights)
        marked = (owner_of(module, planned.half, section.owner), *(marked_in(section, module) if planned.checkpoint else ()))
    rest_in_wait = planned.rest_after is not None and not section.exchanges
    gathers = plan.parallel.sequence_parallel and (planned.gathers or planned.gathers_ahead or rest_in_wait)
    kept = plan.parallel.sequence_parallel and not planned.checkpoint
    stays = stage.offload is None or stage.offload.stays(planned)
    stays |= section.kept_whole or (section.exchanges and not (stage.offload and stage.offload.experts))
    as_planned = {one.name: getattr(planned, one.name) for one in fields(planned)}
    return HalfPolicy(
        **as_planned | {"section": section, "recompute": recomputed},
        gather_site=section.gathered if gathers else None,
        gather=gather if gathers else None,
        keeps_gathered=recomputed.intersection(section.gathering_latents if kept else ()),
        chunk=stage.chunk,
        may_draw=may_draw_in(section, module, recomputed),
        stays=stays,
        marked=marked,
        allowed_load=stage.experts_hold if falls_back else None,
        hooks=hooks,
    )


def _waits_for_weights(hook: Callable[..., Any]) -> bool:
    """Megatron's own hook on every module, with --overlap-param-gather. In a recomputation the weights are already gathered."""
    return getattr(hook, "__module__", "") == "megatron.core.distributed.distributed_data_parallel"


def chunk_policies(plan: Plan, stage: int) -> list[ChunkPolicy]:
    return [
        ChunkPolicy(
            entry.whole or (),
            0 if entry.weight_gradients is None else entry.weight_gradients.bytes,
            read_after_send=stage > 0 and plan.schedule == "flush",
        )
        for entry in plan.chunks_of(stage)
    ]


def order_of(pipeline: int, stage: int, chunks: int, group_size: int, more: int = 0) -> OrderOfStep:
    """`group_size`: Megatron's `microbatch_group_size_per_vp_stage`. `more`: additional warm-up forwards."""

    @lru_cache(maxsize=8)
    def order(microbatches: int) -> StageOrder:
        passes = passes_of(pipeline, stage, microbatches, chunks, group_size, more)
        return StageOrder(list(passes), in_turns=more > 0 and chunks == 1)

    return order


def offloader_of(plan: Plan, run: LiveRun, order: OrderOfStep, device: Device, limit: HostLimit | None) -> Offloader | None:
    """Return None if this stage offloads nothing: the plan has no offload for it, or every backward directly follows its forward
    and no pace is given. Raises `OffloadError` with both numbers if the host has too little memory."""
    step = order(plan.batch.microbatches)
    policies = {}
    for entry in plan.chunks_of(run.stage):
        if entry.offload is None:
            continue
        every = entry.offload.half_by_half == "all"
        within = {every or one.virtual in step.at_once for one, _ in step.all if one.chunk == entry.chunk}
        sets = most_on_host(step.all)[entry.chunk] if False in within else 0
        pace_bytes = entry.offload.pace_bytes if True in within else None
        if pace_bytes is not None:
            sets += most_in_flight(step.all)[entry.chunk] if every else 1 + step.in_turns
        if not sets:
            continue
        policies[entry.chunk] = OffloadPolicy(
            bytes=entry.offload.bytes,
            smallest_tensor_bytes=entry.offload.smallest_tensor_bytes,
            sets=sets,
            ragged=entry.offload.experts,
            avoids_messages=entry.offload.beside_messages == "avoid",
            pace_bytes=pace_bytes,
            all_half_by_half=every,
            layers=(entry.layers.first, len(entry.layers)),
        )
    if not policies or limit is None:
        return None
    return Offloader(
        policies,
        device=device,
        limit=limit,
        where=f"stage {run.stage}",
        lasting=lambda chunk: memory_of((*run.chunks[chunk].parameters(), *run.chunks[chunk].buffers())),
    )


STATE_BYTES = 14
"""Per parameter: weight in 16 bits, master weight and Adam's two moments in 32 (arXiv 1910.02054, section 3.1)."""


def host_limit_of(plan: Plan, run: Any) -> HostLimit | None:
    """Return None if the plan does not offload. Collective: every rank must call it, also one that cannot have the plan. `run`:
    this rank's, or the problems that it has."""
    if not any(stage.offload for stage in plan.stages):
        return None
    free = free_memory()
    mine = HostFacts(free, _state_bytes(run) if isinstance(run, LiveRun) else 0)
    limit = limit_of(mine, of_all_ranks(mine))
    if free.unread:
        log.warning("no limit of host memory can be read in %s: counted on %s", ", ".join(free.unread), limit.words)
    return limit


def _state_bytes(run: LiveRun) -> int:
    """Upper bound of the rank's part of a checkpoint, or of an optimizer on the CPU."""
    parameters = sum(parameter.numel() for chunk in run.chunks for parameter in chunk.parameters() if parameter.requires_grad)
    configs = (getattr(wrapper, "ddp_config", None) for wrapper in run.wrappers)
    shared_out = next((config for config in configs if getattr(config, "use_distributed_optimizer", False)), None)
    instances = getattr(shared_out, "num_distributed_optimizer_instances", 1)
    return STATE_BYTES * parameters // (run.replicas // instances if shared_out is not None else 1)
