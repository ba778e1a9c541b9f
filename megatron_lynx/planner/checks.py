"""Refuses jobs that no plan can express, and profiles of another job."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, PlanMismatch, Problem
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.plan.consistency import of_launch
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.writing import contents_of
from megatron_lynx.profiler.profile import Profile, shape_of

ESTIMATED = "the job can be estimated under a stock policy"


def check_plannable(job: Job) -> None:
    """Raises `ConfigError` for everything that a job may state for an estimate, but that no plan can have."""
    if problems := refusals(job):
        raise ConfigError("no plan can do what this job asks for yet", problems)


def refusals(job: Job) -> list[Problem]:
    """Return the problems of `check_plannable`: those of a plan file only if there are no others."""
    if problems := [*_limits(job)]:
        return problems
    return [Problem("job", text, "", ESTIMATED) for text in of_launch(Plan.model_construct(**contents_of(job), stages=()))]


def _limits(job: Job) -> Iterator[Problem]:
    """Yield problems beside those of a plan (`plan.features`). CPU ranks have a stand-in for the core attention."""
    model, parallel, experts = job.model, job.parallel, job.model.experts
    if parallel.context > 1:
        with_context = f"with parallel.context {parallel.context}"
        why = f"{with_context}: Megatron's own attention refuses it"
        if job.policy == "selective":
            needed = f"planned, balanced, full or none {with_context}: the core attention is kept"
            yield Problem("job: policy", job.policy, needed, ESTIMATED)
        if job.cluster.device != "cpu" and model.attention != "flash":
            yield Problem("job: model.attention", model.attention, f"flash {why}", ESTIMATED)
        if job.cluster.device != "cpu" and not model.uses_te:
            yield Problem("job: model.implementation", model.implementation, f"transformer_engine {why}", ESTIMATED)
    if 0 in job.partition and job.schedule == "double_buffered":
        empty, needed = job.partition.index(0), "at least one layer on every stage without flushes"
        yield Problem(f"job: parallel.partition.{empty}", "0", needed, ESTIMATED)
    if job.userbuffers and not model.uses_te:
        needed = "transformer_engine with overlap.userbuffers: Megatron's own layers have none"
        yield Problem("job: model.implementation", model.implementation, needed, ESTIMATED)
    if job.userbuffers and job.policy == "full":
        needed = "planned, or another one with overlap.userbuffers: what owns a userbuffer does not run again"
        yield Problem("job: policy", "full", needed, ESTIMATED)
    if model.moe_overlapped:
        if parallel.expert == 1 or (parallel.pipeline > 1 and job.chunks == 1):
            said = f"expert {parallel.expert}, pipeline {parallel.pipeline} with {job.chunks} chunk on each stage"
            needed = "experts over several ranks, and several chunks on each stage of a pipeline, as Megatron does"
            yield Problem("job: model.experts.overlapped", said, needed, "leave it out")
        if model.fp8 and experts is not None and experts.count == parallel.expert:
            beside = "beside overlapped exchanges of experts: Megatron frees a single one's rows"
            needed = f"several experts on each rank, or no FP8, {beside}"
            yield Problem("job: model.experts.count", str(experts.count), needed, "leave one of the two out")
        if model.mtp > 1 or (model.mtp and parallel.pipeline == 1):
            needed = "1 in a pipeline, or none, beside overlapped exchanges of experts, as Megatron does"
            yield Problem("job: model.mtp", f"{model.mtp} with pipeline {parallel.pipeline}", needed, "leave one of the two out")
    for setting, needed in job.fused_dispatch.limits():
        yield Problem("job: model.experts.dispatcher", setting, needed, ESTIMATED)
    for section in model.every_section:
        yield from planning_of(section).refusals(job)


def check_plan(job: Job, plan: Plan) -> None:
    """Raises `PlanMismatch` with every fact in which the plan is for another job. `job`: as planned (`planner.as_planned`) if a
    plan may choose launch flags."""
    needed, of_planner = contents_of(job), {"fp8_copies_kept", "microbatch_group", "packed"}
    facts: list[tuple[str, object, object]] = []
    for part in ("model", "parallel", "batch"):
        stated = getattr(plan, part).model_dump()
        facts += [(f"{part}.{name}", stated[name], fact) for name, fact in needed[part].model_dump(exclude=of_planner).items()]
    if job.chunks > 1 and plan.parallel.pipeline == job.parallel.pipeline:  # otherwise the plan states no group
        facts.append(("parallel.microbatch_group", plan.parallel.group, job.microbatch_group))
    facts += [(name, getattr(plan, name), needed[name]) for name in ("schedule", "defer_updates")]
    differing = [(f"plan: {name}", str(fact), f"{wanted}, as in the job") for name, fact, wanted in facts if fact != wanted]
    if differing:
        raise PlanMismatch("the plan does not fit the job", [Problem(*each, "make a plan for this job") for each in differing])


def check_profile(job: Job, profile: Profile) -> None:
    """Raises `ConfigError` for every fact in which the profile is of another job."""
    profiled, needed = profile.shape.model_dump(), shape_of(job).model_dump()
    ranks = job.parallel.tensor * job.parallel.context
    todo = f"measure this job, or its layers alone (pipeline 1 on {ranks} devices): megatron-lynx profile"
    problems = [
        Problem(f"profile: shape.{name}", str(profiled[name]), str(needed[name]), todo)
        for name in needed
        if profiled[name] != needed[name]
    ]
    if problems:
        raise ConfigError("the profile was measured for another job", problems)


def why_none_deferred(job: Job) -> str | None:
    asked = job.overlap.weight_gradients
    if job.model.adapters is not None:
        return "beside adapters (model.adapters) all other weights are frozen, and an adapter's are small"
    if job.policy != "planned":
        return f"policy {job.policy} is stock's: it waits where stock waits"
    if asked == "none":
        return "overlap.weight_gradients is none (--no-gradient-accumulation-fusion): nothing adds them up where they lie"
    if job.model.moe_overlapped:
        return "beside overlapped exchanges of experts nothing is waited for: --delay-wgrad-compute is Megatron's own way"
    if job.userbuffers:
        return "with userbuffers it exchanges in its GEMM, or reads a buffer that the next layer fills"
    if job.schedule == "double_buffered":
        return "without flushes a forward may hide those of another version of the weights: that is not planned yet"
    if asked == "auto" and job.cluster.device == "cpu":
        return "on the testbed only where the job asks for it (overlap.weight_gradients: deferred)"
    return None
