"""What a launch takes today, what a plan would change, and what the memory that is left would buy.

today ───────────────────────────────┐
plan at the device's budget ─────────┤
plan within today's bytes ───────────┼──> verdict
neighbours, each under a plan ───────┤
nothing fits: what would, nearest ───┘

Where no plan fits the budget: what would make one fit, nearest first.

[1] activations on the host          [2] a part of the optimizer on the host, with what its update then takes
[3] another layout of as many GPUs   [4] more GPUs, in the same layout or else in another: twice, four, eight times as many
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from megatron_lynx.advise import flags
from megatron_lynx.advise.neighbours import Neighbour, neighbours
from megatron_lynx.advise.today import Launch, Row, launch_today, row_of
from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import OnHost
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, LynxError, Problem
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.launch_arguments.optimizer_facts import CHUNK, CHUNKED
from megatron_lynx.planner import Decision, decide
from megatron_lynx.planner.decision import plannable
from megatron_lynx.planner.left_open import QUARTERS
from megatron_lynx.planner.nearest import Changes, fewest_changes, in_words, with_changes
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.search.best_first import no_collections
from megatron_lynx.units import GIB, format_seconds

PLAN_FILE = "plan.yaml"
CHUNK_MIB = 256
"""Of the optimizer's moments in one copy, as Megatron's own example has it."""


@dataclass(frozen=True)
class Answer:
    """`job`: with the policy `planned`, or where no plan can be made of the launch, as it is."""

    job: Job
    reading: Reading | None
    launch: Launch
    plan: Row | None = None
    """At the device's budget; None where no plan fits, or none can be made."""
    in_todays_bytes: Row | None = None
    """The plan within what the launch holds today, where that is another one."""
    near: tuple[Neighbour, ...] = ()
    asked_near: bool = False
    """Whether neighbours were looked for."""
    error: LynxError | None = None
    """What the planner raised, where it made no plan."""
    would_fit: tuple[str, ...] = ()
    """What would make one fit, nearest first."""
    refused: tuple[Problem, ...] = ()
    """What no plan goes with, whatever the budget."""
    decision: Decision | None = field(default=None, repr=False)
    on_host: OnHost | None = None
    """What of the optimizer is on the host under the plan; None where nothing is."""

    @property
    def none_in_todays_bytes(self) -> bool:
        """Whether there is a plan, and none that holds as little as the launch."""
        plan, launch = self.plan, self.launch.row
        more = plan is not None and launch is not None and plan.memory_bytes > launch.memory_bytes
        return more and self.launch.written and self.in_todays_bytes is None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why there is no plan; none where there is one."""
        return self.refused or (self.error.problems if self.error is not None else ())

    def changed(self, neighbour: Neighbour) -> str:
        """The flags of the launch that a neighbour changes."""
        return flags.in_words(flags.changes(self.job, neighbour.job, neighbour.plan, self.reading), self.reading)

    def command(self, neighbour: Neighbour) -> str | None:
        """A neighbour's launch line; None for a job without a launch."""
        if self.reading is None:
            return None
        return flags.command(self.reading, self.job, neighbour.job, neighbour.plan, PLAN_FILE)


@no_collections()
def answered(
    job: Job,
    costs: Profile,
    reading: Reading | None,
    *,
    refused: Sequence[Problem] = (),
    near: bool = True,
) -> Answer:
    """`refused`: why no plan can be made of the launch. `near`: whether neighbours are looked for; for that the cluster has to be
    described."""
    launch = launch_today(job, costs, reading)
    if refused:
        return Answer(job, reading, launch, refused=tuple(refused))
    found = tuple(neighbours(job)) if near and job.cluster.matmul is not None else ()
    try:
        made = decide(job, costs)
    except Infeasible as error:
        return _without_plan(job, costs, reading, launch, found, near, error)
    except ConfigError as error:
        return Answer(job, reading, launch, error=error, refused=error.problems)
    if reading is not None:
        launch = launch.kept_beside(reading.with_graphs_of(made.plan.model.captured).today)
    plan = row_of(made, costs, "plan")
    within = _within_today(job, costs, launch, plan)
    on_host = OnHost.of(made.job, costs.host_adam, priced=True)
    return Answer(job, reading, launch, plan, within, found, near, decision=made, on_host=on_host)


def _without_plan(
    job: Job,
    costs: Profile,
    reading: Reading | None,
    launch: Launch,
    near: tuple[Neighbour, ...],
    asked_near: bool,
    error: Infeasible,
) -> Answer:
    within = _within_today(job, costs, launch, None)
    fitting = tuple(would_fit(job, costs, reading))
    return Answer(job, reading, launch, None, within, near, asked_near, error, fitting)


def _within_today(job: Job, costs: Profile, launch: Launch, plan: Row | None) -> Row | None:
    """The plan that holds no more than the launch does today; None where the plan already does, or none does."""
    if launch.row is None or not launch.written or (plan is not None and plan.memory_bytes <= launch.row.memory_bytes):
        return None
    budget = job.budget.model_copy(update={"memory_gib": launch.row.memory_bytes / GIB, "activation_mib": None})
    return _or_none(lambda: row_of(decide(job.model_copy(update={"budget": budget}), costs), costs, "plan"))


def _or_none(made: Callable[[], Row]) -> Row | None:
    try:
        return made()
    except Infeasible:
        return None


TIMES_AS_MANY = (2, 4, 8)

OF_THE_HOST = ("offload_ratio",)


def would_fit(job: Job, costs: Profile, reading: Reading | None = None) -> Iterator[str]:
    """A sentence for each. `reading`: in the words of its launch."""
    if job.offload_ratio != "auto" and plannable(job.model_copy(update={"offload_ratio": "auto"}), costs):
        yield "activations on the host: --offload-ratio auto"
    yield from (said for _, said in sorted([*_optimizer(job, costs, reading), *_states(job, costs, reading)]))
    if job.cluster.matmul is None:
        return
    if (changes := fewest_changes(job, costs, plannable, OF_THE_HOST)) is not None:
        yield f"another layout: {in_words(changes)}"
    yield from _more_gpus(job)


def _optimizer(job: Job, costs: Profile, reading: Reading | None) -> Iterator[tuple[float, str]]:
    """Seconds of its update, and the least quarter of the optimizer's state with which a plan fits when that is on the host.
    Megatron steps a part of the parameters there only with a precision-aware optimizer, which has to be distributed."""
    if job.optimizer.offload != 0:
        return
    aware: Changes = () if job.optimizer.precision_aware else (("optimizer.precision_aware", True),)
    for share in QUARTERS[1:]:
        asked = with_changes(job, [*aware, ("optimizer.offload", share)])
        if asked is not None and plannable(asked, costs):
            on_host = OnHost.of(asked, costs.host_adam, priced=costs.host_adam is not None)
            assert on_host is not None, "a share of the optimizer is there"
            words = ["--use-precision-aware-optimizer", "--optimizer-cpu-offload", f"--optimizer-offload-fraction {share:g}"]
            seconds = inf if on_host.seconds is None else on_host.seconds.total_s
            yield seconds, f"{on_host.in_words}: {' '.join(words) if reading is None else reading.said(words)}"
            return


def _states(job: Job, costs: Profile, reading: Reading | None) -> Iterator[tuple[float, str]]:
    """The same with states on the host between updates, which run on the device."""
    if job.optimizer.on_host or job.optimizer.offload != 0:
        return
    asked = with_changes(job, [("optimizer.states_on_host", 1.0), ("optimizer.chunk_mib", CHUNK_MIB)])
    if asked is None or not plannable(asked, costs):
        return
    on_host, more_s = OnHost.of(asked, None, priced=False), update_s(asked, costs) - update_s(job, costs)
    assert on_host is not None, "all of the states are there"
    words = [CHUNKED, f"{CHUNK} {CHUNK_MIB}", "--ckpt-format torch_dist"]
    flags = " ".join(words) if reading is None else reading.said(words)
    yield more_s, f"{on_host.in_words}; {format_seconds(more_s)} a step: {flags} (newer than Megatron 0.19)"


def _more_gpus(job: Job) -> Iterator[str]:
    tried = (with_changes(job, [("gpus", times * job.gpus)]) for times in TIMES_AS_MANY)
    larger = [(more, analytic_profile(more)) for more in tried if more is not None]
    for more, costs in larger:
        if plannable(more, costs):
            yield f"more GPUs in this layout: {more.gpus} in place of {job.gpus}, with the same batch"
            return
    for more, costs in larger:
        if (changes := fewest_changes(more, costs, plannable, OF_THE_HOST)) is not None:
            yield f"more GPUs in another layout: {more.gpus} in place of {job.gpus}, {in_words(changes)}"
            return
