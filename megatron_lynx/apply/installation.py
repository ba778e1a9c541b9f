"""Installs a plan in three passes; a refusal in any of them leaves Megatron unchanged.

resolve   the live run, the release's table, the plan's stage, every claim
verify    fingerprints; `refusals`; the plan against the run (`match`); claims against each other and against Megatron
change    all hooks, or none

with install(model, plan) as installation:      # or installation.remove(), between steps
    train()
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from megatron_lynx.anatomy import HALVES
from megatron_lynx.apply import hook as holding
from megatron_lynx.apply.assignment import chunk_policies, host_limit_of, offloader_of, order_of, passing_over, policies
from megatron_lynx.apply.hook import Claim, Hook
from megatron_lynx.apply.hooks import (
    collectives,
    gathered_input,
    halves,
    head_in_pieces,
    receives,
    sites,
    steps,
    weight_gradients,
)
from megatron_lynx.apply.hooks.head_in_pieces import head_chunk
from megatron_lynx.apply.hooks.random_state import MegatronRandom, left_as_they_were
from megatron_lynx.apply.kinds import kinds_of, layers_by_kind
from megatron_lynx.apply.live_run import LiveRun, is_hybrid, live_run, recipe_of
from megatron_lynx.apply.match import mismatches
from megatron_lynx.apply.refusals import refusals
from megatron_lynx.apply.releases import Release, present_release, present_te
from megatron_lynx.apply.transformer_engine import Fp8Autocast
from megatron_lynx.errors import HookRefused, PlanMismatch, Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.runtime.device import device_for
from megatron_lynx.runtime.engine import Engine, Overlapping
from megatron_lynx.runtime.surroundings import Autocast
from megatron_lynx.timetable import Timetable

log = logging.getLogger(__name__)


class Installation:
    """An installed plan. Removable between steps; usable as a context manager."""

    def __init__(self, engine: Engine, hooks: list[Hook], overlapping: Overlapping | None = None) -> None:
        self.engine = engine
        """Counts and trace: `installation.engine.take_counts()`, `.trace`."""
        self._hooks = hooks
        self._overlapping = overlapping
        if overlapping is not None:
            overlapping.under(engine)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        return tuple(self._hooks)

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
        claims = [hook.claim for hook in self._hooks]
        self._give_back()
        try:
            yield
        finally:
            self._hooks = holding.put_in_place(claims)

    def _give_back(self) -> None:
        if self._hooks and self.engine.busy:
            raise HookRefused(
                "cannot remove the plan now",
                [Problem("installation", "a step under way", "the end of a step", "call remove() between steps (rule R7)")],
            )
        holding.give_back(self._hooks)
        self._hooks = []

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            self.engine.abandon()
        self.remove()


def install(model: Any, plan: Plan, without_flushes: Overlapping | None = None) -> Installation:
    """Install `plan` on `model`: a GPTModel of megatron-core, as built and wrapped, or Megatron's list of a rank's chunks.

    Call it on every rank, after `parallel_state` and the model exist and before the first step.

    Args:
        model: the model, or the list of chunks.
        plan: made for this model, layout and schedule.
        without_flushes: runs the batches instead of Megatron's schedules (`double_buffered.pipeline.DoubleBuffered`).

    Raises:
        PlanMismatch: the plan was made for another model, layout or stage (every difference is listed).
        HookRefused: this release or a setting of the run is not supported; or micro-batches are in flight.
        OffloadError: the host has too little memory for the plan.
    """
    run = live_run(model)
    limit = host_limit_of(plan, run)
    if not isinstance(run, LiveRun):
        raise HookRefused("this model cannot carry a plan", run)
    for code, stale in _recorded(present_release(), plan, run):
        if stale:
            raise HookRefused(f"{code} not read as recorded", stale)
    overlapping = without_flushes is not None
    if refused := refusals(plan, run):
        raise HookRefused("this run cannot carry a plan", refused)
    if differing := mismatches(plan, run, overlapping):
        raise PlanMismatch("the plan does not fit this run", differing)
    device = device_for(next(parameter for chunk in run.chunks for parameter in chunk.parameters()).device)
    order = order_of(run.pipeline, run.stage, len(run.chunks), run.group_size, int(run.combined))
    extra: dict[str, Any] = {}
    if run.fp8:
        extra["surroundings"] = (Autocast(), Fp8Autocast())
    if without_flushes is not None:
        without_flushes.check_drained("a plan is installed")
        order, extra["as_recorded"] = without_flushes.few_batches, without_flushes.as_recorded
    timetable = timetable_of(plan, run.stage)
    engine = Engine(
        timetable,
        chunk_policies(plan, timetable, run.stage),
        order=order,
        random=MegatronRandom(device),
        guard=left_as_they_were,
        device=device,
        offloader=offloader_of(plan, run, order, device, limit),
        reduced_in_backward=lambda: run.reduces_in_backward,
        **extra,
    )
    claims = list(_claims(engine, plan, run, timetable))
    if conflicts := holding.verify(claims, around_others=without_flushes is None):
        raise HookRefused("the plan cannot be installed", conflicts)
    engine.offloader.lock_ahead()  # last, because it takes long; it may still be refused
    hooks = holding.put_in_place(claims)
    for hook in hooks:
        log.info("megatron-lynx holds %s: %s", hook.claim.where, hook.claim.reason)
    return Installation(engine, hooks, without_flushes)


def _recorded(release: Release, plan: Plan, run: LiveRun) -> Iterator[tuple[str, list[Problem]]]:
    """The code that this run relies on, in words, with the functions that differ from the recorded ones."""
    yield "megatron-core does", release.stale()
    if run.uses_te:
        yield "Transformer Engine, or megatron-core beside it, does", _stale_te(release, run)
    for face in (face for face in kinds_of(run) if face.recorded):
        yield f"megatron-core's {face.recorded_as}", release.stale(face.recorded)
    if any(map(is_hybrid, run.chunks)):
        yield "megatron-core's hybrid stack does", release.stale("hybrid")
    if plan.head is not None:
        yield "megatron-core's head does", release.stale("head")
    if run.combined:
        yield "megatron-core's overlapped exchanges do", release.stale("overlapped")


def _stale_te(release: Release, run: LiveRun) -> list[Problem]:
    te = present_te()
    has = {"fp8": run.fp8, "fp4": run.fp8 and recipe_of(run.config) == "nvfp4", "grouped": run.groups_experts}
    return [*release.stale("te"), *te.stale(), *(problem for what in has if has[what] for problem in te.stale(what))]


def _claims(engine: Engine, plan: Plan, run: LiveRun, timetable: Timetable) -> Iterator[Claim]:
    shards = run.shards_of(plan.parallel.sequence_parallel)
    capacity = halves.Capacity(-(-plan.model.seq // shards) * plan.batch.micro, shards)
    gather = gathered_input.start_gather(run.tensor_group)
    chunks = plan.chunks_of(run.stage)
    of_layer = {number: of for entry in chunks for number, of in policies(plan, entry, timetable, gather, run.layers).items()}
    of_layer = passing_over(of_layer, timetable, engine.offloader.chunks)
    attention = (policy for of in of_layer.values() for policy in of.values() if policy.section.half == HALVES[0])
    telling = next((policy for policy in attention if not policy.section.kept_whole), None)  # of the stage's first chunk
    for number, layer in run.layers.items():
        yield from halves.claims(engine, layer, of_layer[number], capacity, telling)  # type: ignore[arg-type]
        offloading = engine.offloader.chunks
        met = [of.section for of in of_layer[number].values() if of.may_recompute or of.midway or of.goes_out(offloading)]
        yield from sites.claims(engine, layer, number, met, te=run.uses_te, fp8=run.fp8)
    yield from steps.claims(engine, frozenset(map(id, run.chunks)), combined=run.combined)
    for face, layers in layers_by_kind(run):
        yield from face.claims(engine, plan, run, layers)
    linears = weight_gradients.deferring_linears(plan, run)
    if run.pipeline > 1:
        apart = run.overlaps_exchanges and _recomputes_in_receives(plan)
        yield from receives.claims(engine, waited_for_later=run.overlaps_exchanges, gradients_apart=apart)
    if run.tensor > 1:
        yield from collectives.claims(engine, run.tensor_group)
        if run.uses_te:
            yield from collectives.te_claims(engine, run.tensor_group)
        gathers = any(policy.gather_site or policy.keeps_gathered for halves_ in of_layer.values() for policy in halves_.values())
        if gathers or (linears and plan.parallel.sequence_parallel and not run.uses_te):
            yield from gathered_input.claims(engine, linears)
    if plan.head is not None and (chunk := head_chunk(run)) is not None:
        yield from head_in_pieces.claims(chunk, plan.head.pieces)
    if linears:
        yield from (weight_gradients.te_claims if run.uses_te else weight_gradients.claims)(engine, linears)


def _recomputes_in_receives(plan: Plan) -> bool:
    """Whether any stage recomputes while it receives a gradient in the steady phase."""
    timetables = (timetable_of(plan, stage) for stage in range(plan.parallel.pipeline))
    return any(timetable.receive(chunk, "steady").hides for timetable in timetables for chunk in range(len(timetable.chunks)))
