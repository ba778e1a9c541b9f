"""The answer about a launch: stock Megatron's best setting and the best plan, in its layout and in layouts one step away.

If no plan fits: changes after which one does, nearest first. Activations or a part of the optimizer on the host; another layout;
2, 4 or 8 times as many GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from megatron_lynx.advise import flags
from megatron_lynx.advise.flags import Edit
from megatron_lynx.advise.neighbours import Neighbour, may_offload, nearest, neighbour
from megatron_lynx.advise.today import Launch, Row, Stock, launch_today, or_launch, row_of, stocks_best
from megatron_lynx.beside import Later, results
from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import OnHost
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, LynxError, Problem
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.launch_arguments.model_facts import CHUNK, CHUNKED
from megatron_lynx.planner import Decision
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.planner.nearest import Changes, decide, fewest_changes, first_that_fits, with_changes
from megatron_lynx.planner.variants import fastest, fastest_variant, fastest_with_copies, planned
from megatron_lynx.prediction import EVEN
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.units import GIB, format_seconds

QUARTERS = (0.25, 0.5, 0.75, 1.0)
CHUNK_MIB = 256
"""MiB of optimizer moments in one copy, as in Megatron's example."""

WORTH = 0.01
"""Relative gain from which more changes, or more memory, are recommended."""


@dataclass(frozen=True)
class Answer:
    """`job`: with the policy `planned`, or unchanged if the launch cannot be planned."""

    job: Job
    reading: Reading | None
    launch: Launch
    stock: Stock | None = None
    """Stock Megatron's best setting in the launch's layout within the device's budget, if one fits."""
    without_copies: Decision | None = None
    """The fastest plan within the device's budget that offloads no activations, unless the launch or job does."""
    in_todays_bytes: Decision | None = None
    copies: Decision | None = None
    """The plan that offloads activations, if it gains `WORTH_COPIES`, or stock beats plans without, or nothing else fits."""
    near: tuple[Neighbour, ...] = ()
    asked_near: bool = False
    error: LynxError | None = None
    asked_copies: bool = True
    """Whether offloading was tried, or the launch or job states it."""
    would_fit: tuple[str, ...] = ()
    refused: tuple[Problem, ...] = ()
    """Problems that exclude any plan at any budget."""
    on_host: OnHost | None = field(default=None, repr=False)

    @property
    def planned(self) -> Decision | None:
        """The fastest plan; within `WORTH` of it, the one with fewer bytes, unless stock's best is faster than that one."""
        if self.copies is not None or self.without_copies is None:
            return self.copies
        best, less = self.without_copies, self.in_todays_bytes
        if less is None or less.step.expected_s > (1 + WORTH) * best.step.expected_s:
            return best
        rival_s = best.step.expected_s if self.stock is None else max(self.stock.row.expected_s, best.step.expected_s)
        slower = self.stock is not None and less.step.expected_s > (1 + EVEN) * rival_s
        return best if slower else less

    @property
    def rival_s(self) -> float | None:
        return None if self.stock is None else self.stock.row.expected_s

    @property
    def plan(self) -> Row | None:
        return None if self.planned is None else row_of(self.planned)

    @property
    def none_in_todays_bytes(self) -> bool:
        plan, launch = self.plan, self.launch.row
        more = plan is not None and launch is not None and plan.memory_bytes > launch.memory_bytes
        return more and self.launch.written and self.in_todays_bytes is None

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.refused or (self.error.problems if self.error is not None else ())

    @property
    def stock_edit(self) -> Edit:
        return Edit() if self.stock is None else flags.of_setting(self.stock.setting, self.reading)

    @property
    def plan_edit(self) -> Edit:
        if self.planned is None:
            return Edit()
        switched = flags.of_variant(self.job, self.planned.asked, self.reading)
        lost = [flag for flag in self.launch.flags if flag not in {name for name, _ in switched.added}]
        return Edit(tuple(dict.fromkeys([*lost, *switched.deleted])), switched.added)

    @property
    def switched(self) -> tuple[list[str], list[str]]:
        if self.planned is None:
            return [], []
        edit = flags.of_variant(self.job, self.planned.asked, self.reading)
        return edit.flags, flags.names_lost(self.job, self.planned.asked)

    def layout(self, neighbour: Neighbour, *, stock: bool = False) -> Edit:
        return flags.of_layout(self.job, neighbour.job, neighbour.places(stock=stock), self.reading)

    def changed(self, neighbour: Neighbour, *, stock: bool = False) -> str:
        layout = self.layout(neighbour, stock=stock)
        added = " ".join(layout.flags) if self.reading is None else self.reading.said(layout.flags)
        return f"{added} without {' '.join(layout.deleted)}".strip() if layout.deleted else added

    def neighbours_edit(self, neighbour: Neighbour, *, stock: bool) -> Edit:
        if stock:
            return Edit() if neighbour.stock is None else flags.of_setting(neighbour.stock.setting, self.reading)
        return Edit() if neighbour.planned is None else flags.of_variant(self.job, neighbour.planned.asked, self.reading)

    def command(self, neighbour: Neighbour) -> str | None:
        if self.reading is None or neighbour.planned is None:
            return None
        made = neighbour.planned
        return flags.command(self.reading, self.job, made.asked, made.draft, "plan.yaml")


def answered(
    job: Job,
    costs: Profile,
    reading: Reading | None,
    *,
    refused: Sequence[Problem] = (),
    near: bool = True,
    copies: bool = False,
    later: Later = partial,
) -> Answer:
    """`refused`: problems that exclude any plan. `near`: whether neighbours are searched; needs a described cluster.
    `copies`: whether the plan may offload activations although `job.offload_ratio` is 0. `later`: see `megatron_lynx.beside`."""
    release = None if reading is None else reading.given.release
    near = near and not refused
    stocks = later(stocks_best, job, costs, release)
    near_jobs = nearest(job) if near and job.cluster.matmul is not None else []
    calls = [later(neighbour, job, near_job, release, copies=copies) for near_job in near_jobs]
    answer = _in_layout(job, costs, reading, refused, release, stocks, later, copies=copies)
    if answer.refused:
        return answer
    ranked = sorted((each for each in results(calls) if each.rows), key=lambda each: each.fastest.expected_s)
    return replace(answer, near=tuple(ranked), asked_near=near)


def _in_layout(
    job: Job,
    costs: Profile,
    reading: Reading | None,
    refused: Sequence[Problem],
    release: str | None,
    stocks: Callable[[], Stock | None],
    later: Later,
    *,
    copies: bool,
) -> Answer:
    """`stocks`: a call for stock's best, which is needed only behind the plans."""
    launch, plans = launch_today(job, costs, reading), [] if refused else planned(job, costs, release)
    stock = or_launch(stocks(), launch, reading, job)
    if refused:
        return Answer(job, reading, launch, stock, refused=tuple(refused))
    may_copy = copies and may_offload(job)
    asked_copies = may_copy or job.offload_ratio != 0 or job.cluster.pcie is None
    answer = Answer(job, reading, launch, stock, asked_copies=asked_copies)
    if (best := fastest(plans, answer.rival_s)) is None:
        try:
            check_plannable(job)
        except ConfigError as error:
            return replace(answer, error=error, refused=error.problems)
    within_today = _within_today(job, costs, release, launch, best, later)
    answer = replace(answer, without_copies=best)
    if may_copy:
        answer = replace(answer, copies=fastest_with_copies(job, costs, release, best, answer.rival_s))
    answer = replace(answer, in_todays_bytes=within_today())
    if answer.planned is None:
        return replace(answer, error=_why_none(job, costs), would_fit=tuple(would_fit(job, costs, reading)))
    made = answer.planned
    if reading is not None:
        today = reading.with_graphs_of(made.draft.model.captured).today  # without the flags that the plan replaces
        launch = replace(launch, flags=today.flags, keeps_graphs=today.keeps_graphs)
    return replace(answer, launch=launch, on_host=OnHost.of(made.job, costs.host_adam, priced=True))


def _why_none(job: Job, costs: Profile) -> Infeasible | None:
    try:
        decide(job, costs)
    except Infeasible as error:
        return error
    return None


def _within_today(
    job: Job, costs: Profile, release: str | None, launch: Launch, plan: Decision | None, later: Later
) -> Callable[[], Decision | None]:
    """Return a call for the plan within today's bytes: None if the given plan is within them, or if no plan fits."""
    if launch.row is None or not launch.written or (plan is not None and plan.memory_bytes <= launch.row.memory_bytes):
        return lambda: None
    budget = job.budget.model_copy(update={"memory_gib": launch.row.memory_bytes / GIB, "activation_mib": None})
    return later(fastest_variant, job.model_copy(update={"budget": budget}), costs, release)


OF_THE_HOST = ("offload_ratio",)


def would_fit(job: Job, costs: Profile, reading: Reading | None = None) -> Iterator[str]:
    if job.offload_ratio != "auto" and first_that_fits(job, costs, [(("offload_ratio", "auto"),)]) is not None:
        yield "activations on the host: --offload-ratio auto"
    if not job.optimizer.on_host and job.optimizer.offload == 0:
        yield from (said for _, said in sorted([*_optimizer(job, costs, reading), *_states(job, costs, reading)]))
    if job.cluster.matmul is None:
        return
    if (found := fewest_changes(job, costs, OF_THE_HOST)) is not None:
        yield f"another layout: {found.in_words}"
    yield from _more_gpus(job)


def _optimizer(job: Job, costs: Profile, reading: Reading | None) -> Iterator[tuple[float, str]]:
    """Yield the update's seconds and a sentence for the least quarter of optimizer state on the host with which a plan fits."""
    aware: Changes = () if job.optimizer.precision_aware else (("optimizer.precision_aware", True),)
    found = first_that_fits(job, costs, ((*aware, ("optimizer.offload", share)) for share in QUARTERS))
    if found is not None:
        on_host = OnHost.of(found.job, costs.host_adam, priced=costs.host_adam is not None)
        assert on_host is not None, "a share of the optimizer is there"
        share = f"--optimizer-offload-fraction {found.job.optimizer.offload:g}"
        seconds = inf if on_host.seconds is None else on_host.seconds.total_s
        flags = _said(["--use-precision-aware-optimizer", "--optimizer-cpu-offload", share], reading)
        yield seconds, f"{on_host.in_words}: {flags}"


def _states(job: Job, costs: Profile, reading: Reading | None) -> Iterator[tuple[float, str]]:
    found = first_that_fits(job, costs, [(("optimizer.states_on_host", 1.0), ("optimizer.chunk_mib", CHUNK_MIB))])
    if found is not None:
        on_host, more_s = OnHost.of(found.job, None, priced=False), update_s(found.job, costs) - update_s(job, costs)
        assert on_host is not None, "all of the states are there"
        flags = _said([CHUNKED, f"{CHUNK} {CHUNK_MIB}", "--ckpt-format torch_dist"], reading)
        yield more_s, f"{on_host.in_words}; {format_seconds(more_s)} a step: {flags} (newer than Megatron 0.19)"


def _said(flags: list[str], reading: Reading | None) -> str:
    return " ".join(flags) if reading is None else reading.said(flags)


def _more_gpus(job: Job) -> Iterator[str]:
    profile, times = analytic_profile(job), (2, 4, 8)
    if (found := first_that_fits(job, profile, ((("gpus", many * job.gpus),) for many in times))) is not None:
        yield f"more GPUs in this layout: {found.job.gpus} in place of {job.gpus}, with the same batch"
        return
    for more in filter(None, (with_changes(job, [("gpus", many * job.gpus)]) for many in times)):
        if (found := fewest_changes(more, analytic_profile(more), OF_THE_HOST)) is not None:
            yield f"more GPUs in another layout: {more.gpus} in place of {job.gpus}, {found.in_words}"
            return
