"""From a job and a profile to a plan: the whole planning pipeline on one screen.

job, profile ──stage_problem──> options of each half, priced ──solve──> choices ──write, rehearse──> Plan
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from megatron_lynx.config.job import Job
from megatron_lynx.cost.layer import LayerShape, replayed_flops
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.items import COLUMN_PARALLEL, HALVES, ITEMS, ITEMS_OF, ROW_PARALLEL, Half
from megatron_lynx.plan.plan import (
    BatchFacts,
    ByPhase,
    LayerRange,
    ModelFacts,
    ParallelFacts,
    Plan,
    Predicted,
    Provenance,
    Rule,
    Stage,
)
from megatron_lynx.plan.ranges import joined
from megatron_lynx.profiler.profile import Profile, shape_of
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.schedule.windows import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.solver import baselines
from megatron_lynx.solver.answer import LayerChoice, Solved
from megatron_lynx.solver.heuristic import solve
from megatron_lynx.solver.options import stage_problem
from megatron_lynx.solver.problem import Option
from megatron_lynx.version import __version__

REPLAYABLE = tuple(item for item in ITEMS if item not in ROW_PARALLEL)


def make_plan(job: Job, profile: Profile) -> Plan:
    """The plan for a job: what `job.policy` asks for, with its windows, under `job.budget`.

    Raises `ConfigError` where the profile is of another shape than the job or the runtime cannot do what the job asks, and
    `Infeasible` (what binds, by how much) where no choice fits the budget.
    """
    check_plannable(job)
    check_profile(job, profile)
    answers = [answer_of(job, profile, stage) for stage in range(job.parallel.pipeline)]
    return plan_of(job, profile, answers)


def answer_of(job: Job, profile: Profile, stage: int) -> Solved:
    """What `job.policy` makes of one stage."""
    problem = stage_problem(job, profile, stage)
    if job.policy == "none":
        return baselines.keep_all(problem)
    if job.policy == "full":
        return baselines.on_demand(baselines.replay_all(problem))
    return solve(problem)


def plan_of(job: Job, profile: Profile, answers: Sequence[Solved]) -> Plan:
    """Answers of all stages, written as a plan with what is expected of them; its step is simulated."""
    stages = tuple(_stage(job, stage, answer) for stage, answer in enumerate(answers))
    plan = _plan(job, stages, Provenance(made_by=f"megatron-lynx {__version__}", job=job.digest, profile=profile.digest))
    return _with_step(plan, rehearse(plan, profile).step_s)


def _with_step(plan: Plan, step_s: float) -> Plan:
    stages = [
        stage.model_copy(update={"predicted": stage.predicted.model_copy(update={"step_s": step_s})}) for stage in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def uniform_plan(
    job: Job,
    replay: Literal["all", "none"] | Collection[str] = "all",
    *,
    windows: bool = True,
    gather: Literal["keep", "once"] = "keep",
    note: str | None = None,
) -> Plan:
    """The same for every layer, without a profile: to compare with, and to begin an own plan from.

    `replay` names the items. With `windows` each half runs in its usual window, else on demand. Under sequence parallelism
    `gather` says what becomes of linear_qkv and linear_fc1: they are kept, or replayed from an input that is gathered once.
    """
    check_plannable(job)
    items = REPLAYABLE if replay == "all" else () if replay == "none" else tuple(item for item in ITEMS if item in replay)
    if job.parallel.sequence_parallel and gather == "keep":
        items = tuple(item for item in items if item not in COLUMN_PARALLEL.values())
    places = ((stage, chunk) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline))
    stages = tuple(_uniform_stage(job, stage, chunk, items, windows) for stage, chunk in places)
    return _plan(job, stages, Provenance(made_by=f"megatron-lynx {__version__}", job=job.digest, note=note))


def check_plannable(job: Job) -> None:
    """Raises `ConfigError` for everything a job may state, so that it can be estimated, but the runtime cannot do yet."""
    layout = job.parallel
    asked = (
        ("parallel.context", layout.context, "1", layout.context > 1),
        ("parallel.layers_per_chunk", layout.layers_per_chunk, "none", job.chunks > 1),
        ("policy", job.policy, "none, full or planned", job.policy in ("selective", "balanced")),
        ("offload_ratio", job.offload_ratio, "0", job.offload_ratio != 0),
        ("budget.memory_gib", job.budget.memory_gib, "none", job.budget.memory_gib is not None),
    )
    instead = {"budget.memory_gib": "give budget.activation_mib"}
    todo = "the job can be estimated"
    problems = [
        Problem(f"job: {key}", str(found), needed, instead.get(key, todo)) for key, found, needed, refused in asked if refused
    ]
    if problems:
        raise ConfigError("no plan can do what this job asks for yet", problems)


def check_profile(job: Job, profile: Profile) -> None:
    """Raises `ConfigError` for every fact in which the profile is of something else than this job."""
    found, needed = profile.shape.model_dump(), shape_of(job).model_dump()
    problems = [
        Problem(f"profile: shape.{name}", str(found[name]), str(needed[name]), "measure this job: megatron-lynx profile")
        for name in needed
        if found[name] != needed[name]
    ]
    if problems:
        raise ConfigError("the profile was measured for another job", problems)


def _plan(job: Job, stages: tuple[Stage, ...], provenance: Provenance) -> Plan:
    return Plan(
        version=1,
        model=ModelFacts(**{name: getattr(job.model, name) for name in ModelFacts.model_fields}),
        parallel=ParallelFacts(
            tensor=job.parallel.tensor,
            pipeline=job.parallel.pipeline,
            chunks=job.chunks,
            sequence_parallel=job.parallel.sequence_parallel,
        ),
        batch=BatchFacts(micro=job.batch.micro, microbatches=job.microbatches),
        stages=stages,
        provenance=provenance,
    )


def _stage(job: Job, stage: int, answer: Solved) -> Stage:
    layers = job.layers_of(stage)
    rules = joined(_rule(layer, choice) for layer, choice in zip(layers, answer.layers, strict=True))
    predicted = Predicted(
        hidden_replay_s=answer.hidden_s * job.microbatches,
        exposed_replay_s=answer.exposed_s * job.microbatches,
        resident_activation_bytes=answer.resident_bytes,
        ahead_bytes=answer.ahead_bytes,
        replayed_flops=answer.flops,
    )
    return Stage(stage=stage, layers=_range(layers), ahead_depth=_depth(rules), rules=rules, predicted=predicted)


def _rule(layer: int, choice: LayerChoice) -> Rule:
    options: dict[Half, Option] = {"attention": choice.attention, "mlp": choice.mlp}
    replay = {item for option in options.values() for item in option.replay}
    windows = {half: _window(option.seat.steady, option.seat.cooldown) for half, option in options.items() if option.replay}
    gathers = {half: option.seat.gather for half, option in options.items()}
    return _whole_rule(layer, replay, windows, gathers)


def _uniform_stage(job: Job, stage: int, chunk: int, items: Collection[str], ahead: bool) -> Stage:
    layers = job.layers_of(stage, chunk)
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    rules = joined(_uniform_rule(job, (stage, chunk), layer, items, ahead) for layer in layers)
    predicted = Predicted(replayed_flops=len(layers) * replayed_flops(shape, items))
    return Stage(stage=stage, chunk=chunk, layers=_range(layers), ahead_depth=_depth(rules), rules=rules, predicted=predicted)


def _uniform_rule(job: Job, place: tuple[int, int], layer: int, items: Collection[str], ahead: bool) -> Rule:
    """`place`: stage and chunk."""
    top = layer == job.layers_of(*place)[-1]
    windows: dict[Half, str | ByPhase | None] = {}
    gathers: dict[Half, str | None] = {}
    for half in (half for half in HALVES if set(items) & set(ITEMS_OF[half])):
        first = top and half == "mlp"
        gathers_once = job.parallel.sequence_parallel and COLUMN_PARALLEL[half] in items
        own = job.parallel.sequence_parallel and not gathers_once and f"{half}_bda" not in items
        window = _usual_window(job, place, half, first, own) if ahead and not (first and gathers_once) else ON_DEMAND
        windows[half] = window
        if gathers_once:
            gathers[half] = ON_DEMAND if first or not ahead else {"attention": "bwd.mlp.0", "mlp": "bwd.attention.0+1"}[half]
    return _whole_rule(layer, items, windows, gathers)


def _usual_window(job: Job, place: tuple[int, int], half: Half, first: bool, own: bool) -> str | ByPhase:
    """Where a half is replayed when no figures say better.

    `first`: no backward of this stage comes before it. `own`: the first window of its own backward comes in time.
    """
    parallel, last_stage = job.parallel, place == (job.parallel.pipeline - 1, job.chunks - 1)
    if own:
        return f"bwd.{half}.0"
    if (first and last_stage) or (parallel.tensor == 1 and not first):
        return ON_DEMAND
    if first:
        return _window("fwd.mlp.0" if parallel.tensor > 1 and job.chunks == 1 else RECV_BACKWARD, RECV_BACKWARD)
    ordinal = 2 if parallel.sequence_parallel else 0
    return {"attention": f"bwd.mlp.{ordinal}", "mlp": f"bwd.attention.{ordinal}+1"}[half]


def _whole_rule(
    layer: int, replay: Collection[str], windows: Mapping[Half, str | ByPhase | None], gathers: Mapping[Half, str | None]
) -> Rule:
    content = {
        "layers": layer,
        "keep": tuple(item for item in ITEMS if item not in replay),
        "replay": tuple(item for item in ITEMS if item in replay),
        "windows": dict(windows),
        "gather": dict(gathers),
    }
    return Rule.model_validate(content)


def _window(steady: str, cooldown: str) -> str | ByPhase:
    return steady if steady == cooldown else ByPhase(steady=steady, cooldown=cooldown)


def _range(layers: range) -> LayerRange:
    return LayerRange(first=layers[0], last=layers[-1])


def _depth(rules: Sequence[Rule]) -> int:
    """One frame ahead, where any half has a window: a second one was no faster (DESIGN 5)."""
    phases: tuple[Literal["steady"], Literal["cooldown"]] = ("steady", "cooldown")
    return int(any(rule.windows.of(half, phase) != ON_DEMAND for rule in rules for half in HALVES for phase in phases))
