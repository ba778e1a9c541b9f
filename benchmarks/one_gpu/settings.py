"""The settings that take turns: stock Megatron's, and ours, each with what is predicted of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.one_gpu.predicted import Predicted, of_plan, of_stock
from benchmarks.one_gpu.subjects import Subject
from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost.step import avoid_messages
from megatron_lynx.errors import LynxError
from megatron_lynx.kinds.dense.section import ACTIVATION, CORE_ATTENTION
from megatron_lynx.plan.plan import Offload, Plan
from megatron_lynx.planner import decide, uniform_plan
from megatron_lynx.profiler.analytic import analytic_profile, on_cluster
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.solver.offload import Leaver
from megatron_lynx.stock import FULL, NONE, SELECTIVE, StockSetting
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.testbed.candidates import Candidate, changed, stock, without_windows
from megatron_lynx.units import GIB, MIB

NORMS_AND_ACTIVATION = (*(section.norm for section in DENSE.values()), ACTIVATION)
RECOMPUTED = {True: (("mlp",),), False: (("layernorm",), ("core_attn", "layernorm"))}
"""Modules that make a difference, by whether layers are Transformer Engine's."""
OFFLOADED = (
    StockSetting(offload=("core_attn",)),
    StockSetting(offload=("qkv_linear", "core_attn", "attn_proj")),
    StockSetting(recompute=("mlp",), offload=("qkv_linear",)),
)
BUDGETS = {"about stock full's bytes": 0.0, "between": 0.5, "a tenth below none": 0.9}
"""Of planner's plans: the share of what layers hold more if all is kept than under stock full, or where all is recomputed if that
is more."""


HIDDEN = "everything kept, what copies hide to the host"


@dataclass(frozen=True)
class Setting:
    """One setting and what is predicted of it."""

    candidate: Candidate
    predicted: Predicted

    @property
    def name(self) -> str:
        return self.candidate.name


def settings_of(subject: Subject, measured: Profile | None = None) -> tuple[list[Setting], dict[str, str]]:
    """All settings of a subject in the order of their turns, and the names of those that cannot be, with the reason.

    `measured`: a profile of its layers from which seconds and bytes are predicted, instead of prices for the cluster. Plans are
    the same: those that are made from prices.
    """
    job = subject.job
    plans, refused = _plans(job, analytic_profile(job))
    if subject.alone:  # nothing is waited for: what would be hidden in a wait runs on demand, and is predicted so
        plans = {name: without_windows(plan) for name, plan in plans.items()}
    profile = analytic_profile(job) if measured is None else on_cluster(measured, job)
    found = [_stock(job, profile, setting) for setting in _stocks(job)]
    ours = [Setting(Candidate(f"ours, {name}", plan=plan), of_plan(job, profile, plan)) for name, plan in plans.items()]
    copied = [_stock(job, profile, each) for each in OFFLOADED if offered(each, Facts.of(job)) and job.model.uses_te]
    return [*found[:2], *ours, *found[2:], *copied], refused


def _stocks(job: Job) -> Iterator[StockSetting]:
    yield from (NONE, FULL, SELECTIVE)
    for modules in RECOMPUTED[job.model.uses_te]:
        setting = StockSetting(recompute=modules)
        if offered(setting, Facts.of(job)):
            yield setting


def _stock(job: Job, profile: Profile, setting: StockSetting) -> Setting:
    return Setting(stock(setting), of_stock(job, profile, setting))


def _plans(job: Job, profile: Profile) -> tuple[dict[str, Plan], dict[str, str]]:
    kept, recomputed = uniform_plan(job, "none"), uniform_plan(job)
    plans = {"everything kept": kept, "everything recomputed": recomputed}
    refused = {}
    budget = _Budgets(job, profile, kept, recomputed)
    asked = {f"planned, {name}": budget.job(share) for name, share in BUDGETS.items()}
    if job.parallel.pipeline == 1:  # a micro-batch's backward follows its forward: what leaves does so within it
        asked |= {
            f"offloaded and planned, {name}": budget.job(share).model_copy(update={"offload_ratio": "auto"})
            for name, share in BUDGETS.items()
        }
        asked[HIDDEN] = job.model_copy(update={"policy": "none", "offload_ratio": _hidden_share(job, profile, kept)})
    for name, wanted in asked.items():
        try:
            plans[name] = decide(wanted, profile).plan
        except LynxError as error:
            refused[f"ours, {name}"] = " ".join(str(error).split())
    plans["norms and activation recomputed"] = some = uniform_plan(job, NORMS_AND_ACTIVATION)
    if job.model.attention == "unfused":
        plans["core attention recomputed"] = uniform_plan(job, (CORE_ATTENTION,))
    if job.parallel.pipeline > 1:  # copies between passes
        plans["everything kept, 1 GiB of each micro-batch to the host"] = offloading(job, kept, GIB)
        plans["norms and activation recomputed, the rest to the host"] = offloading(job, some, _resident_bytes(some, profile))
    return plans, refused


def _hidden_share(job: Job, profile: Profile, kept: Plan) -> float:
    """How much of what the only stage's layers keep is copied to the host behind their forward."""
    return min(1.0, Leaver(job, profile, 0).hidden_bytes() / _resident_bytes(kept, profile))


def offloading(job: Job, plan: Plan, size_bytes: int) -> Plan:
    """The same plan; a micro-batch that waits for its backward sends so much to the host, if it has as much."""
    return changed(plan, offload=Offload(bytes=size_bytes, beside_messages="avoid" if avoid_messages(job) else "allow"))


def _resident_bytes(plan: Plan, profile: Profile) -> int:
    """What the first stage's layers keep of one micro-batch."""
    return sum(change for _, change in rehearse(plan, profile).executed[0][0].content.memory)


class _Budgets:
    """Bytes for layers, between the least and what they hold if all is kept."""

    def __init__(self, job: Job, profile: Profile, kept: Plan, recomputed: Plan) -> None:
        none, full = (of_stock(job, profile, setting).moments["backward"] for setting in (NONE, FULL))
        self._job = job
        self._most_bytes, least_bytes = (rehearse(plan, profile).memory(0).peak_bytes for plan in (kept, recomputed))
        self._least_bytes = max(least_bytes, self._most_bytes - (none - full))

    def job(self, share: float) -> Job:
        """The job with the least, and this share of the difference."""
        budget = Budget(activation_mib=(self._least_bytes + share * (self._most_bytes - self._least_bytes)) / MIB)
        return self._job.model_copy(update={"budget": budget})
