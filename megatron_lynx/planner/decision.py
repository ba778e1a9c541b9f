"""Makes a plan: the whole planning pipeline.

job, profile ──partitioned──> layers of each stage ──Stages──> what each keeps, replays, offloads ──write, rehearse──┬──> Plan
                                                       ├── again without shares that hold more in the rehearsal than fits ┤
                                                       └── once more with layers that differ, if that is much faster ─────┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_report import HostReport
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.errors import Infeasible, LynxError, Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.checks import check_plannable, check_profile
from megatron_lynx.planner.nearest import nearest_change
from megatron_lynx.planner.partitioning import partitioned
from megatron_lynx.planner.writing import device_memory, with_rehearsed, written
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.answer import NOTHING_FITS, LayerChoice
from megatron_lynx.solver.stage_answer import StageAnswer
from megatron_lynx.solver.stage_budget import bounded_by_device, layers_budget_bytes
from megatron_lynx.solver.stages import Stages

WORTH_READING = 1e-3
"""The part of a step that must be gained for a plan with layers that differ, which is harder to read."""


@dataclass(frozen=True)
class Decision:
    """A plan with everything that led to it."""

    job: Job
    """The job, with the layers of every stage if it left them open."""
    stages: tuple[StageAnswer, ...]
    plan: Plan
    simulation: Simulation
    """One step under the plan."""
    host: HostReport
    """Which stages wait for Python."""

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """What a device of every stage holds, by name."""
        return tuple(device_memory(self.job, answer, self.simulation.memory(answer.stage).peak_bytes) for answer in self.stages)


def make_plan(job: Job, profile: Profile) -> Plan:
    """The plan for a job: what `job.policy` asks for, with its windows, its copies and, if left open, its partition.

    The budget is `solver.stage_budget`'s: what the job states, else on a GPU its memory less the cluster's reserve, and the
    fastest plan that fits is wanted; on the testbed, where no budget is stated, the least memory. Raises `ConfigError` where the
    profile is of another shape than the job or no plan can do what the job asks, and `Infeasible` (for every stage what binds
    and by how much, and the nearest change that fits) where no choice fits the budget.
    """
    return decide(job, profile).plan


def decide(job: Job, profile: Profile) -> Decision:
    """Makes a plan as `make_plan` does, and returns what led to it, too."""
    check_plannable(job)
    check_profile(job, profile)
    try:
        decisions = [_fitting(job, parted, profile) for parted in partitioned(job, profile)]
    except Infeasible as error:
        raise Infeasible(error.headline, [*error.problems, *nearest_change(job, profile, _plannable)]) from None
    return _refined(min(decisions, key=lambda decision: decision.simulation.step_s), job, profile)


def _plannable(job: Job, profile: Profile) -> bool:
    try:
        check_plannable(job)
        _fitting(job, partitioned(job, profile)[0], profile)
    except LynxError:
        return False
    return True


def least_memory(job: Job, profile: Profile) -> tuple[StageMemory, ...]:
    """What every stage holds with everything replayed and offloaded that can be, whether it fits or not."""
    stages = Stages(job, profile)
    return tuple(device_memory(job, stages.least(stage)) for stage in range(job.parallel.pipeline))


def _fitting(job: Job, parted: Job, profile: Profile) -> Decision:
    """The decision for a job whose partition is known.

    Copies may lag behind what the solver counts on. Shares that then hold too much in the rehearsal are excluded,
    and all stages are solved again.
    """
    stages = Stages(parted, profile)
    while True:
        answers = _answers(stages)
        plan = written(parted, answers, job=job.digest, profile=profile.digest, note=profile.source.caution)
        simulation = rehearse(plan, profile)
        over = {
            (answer.stage, answer.offload_ratio)
            for answer in answers
            if answer.offload_ratio and _over_budget(parted, answer, simulation)
        }
        if not over:
            rehearsed, host = with_rehearsed(plan, parted, answers, simulation), HostReport.of(profile, simulation.host_bound)
            return Decision(parted, answers, rehearsed, simulation, host)
        stages = Stages(parted, profile, stages.excluded | over)


def _refined(decision: Decision, job: Job, profile: Profile) -> Decision:
    """The decision with the exact solver's answers, if they shorten the step by `WORTH_READING`."""
    if job.policy != "planned" or layers_budget_bytes(decision.job, 0) is None:
        return decision
    stages = Stages(decision.job, profile)
    passes = job.microbatches + job.parallel.pipeline - 1
    enough_s = WORTH_READING * decision.simulation.step_s / passes
    answers = tuple(stages.refined(answer, enough_s) for answer in decision.stages)
    if _layers_of(answers) == _layers_of(decision.stages):
        return decision
    plan = written(decision.job, answers, job=job.digest, profile=profile.digest, note=profile.source.caution)
    simulation = rehearse(plan, profile)
    slower = simulation.step_s > (1 - WORTH_READING) * decision.simulation.step_s
    if slower or any(_over_budget(decision.job, answer, simulation) for answer in answers):
        return decision
    rehearsed, host = with_rehearsed(plan, decision.job, answers, simulation), HostReport.of(profile, simulation.host_bound)
    return Decision(decision.job, answers, rehearsed, simulation, host)


def _layers_of(answers: Iterable[StageAnswer]) -> list[tuple[LayerChoice, ...]]:
    """What becomes of every layer, chunk by chunk."""
    return [chunk.layers for answer in answers for chunk in answer.chunks]


def _answers(stages: Stages) -> tuple[StageAnswer, ...]:
    """The answers of all stages. Raises `Infeasible` with the problems of all of them together."""
    answers: list[StageAnswer] = []
    problems: list[Problem] = []
    for stage in range(stages.job.parallel.pipeline):
        try:
            answers.append(stages.answer(stage))
        except Infeasible as error:
            problems += error.problems
    if problems:
        raise Infeasible(NOTHING_FITS, problems)
    return tuple(answers)


def _over_budget(job: Job, answer: StageAnswer, simulation: Simulation) -> bool:
    """Whether layers hold more than they may in the rehearsal, or with them the device does at some other moment."""
    budget_bytes, held_bytes = layers_budget_bytes(job, answer.stage), simulation.memory(answer.stage).peak_bytes
    if budget_bytes is None:
        return False
    if bounded_by_device(job) and device_memory(job, answer, held_bytes).total > job.memory_budget_bytes:
        return True
    return held_bytes > budget_bytes
