"""Cases of the fuzzer: a seed says the release, the job, how it is trained, and the plans under which it is trained.

seed ──> release, job, trial ──┬──> plans drawn by tests/plan/strategies.py, with loads and copies to the host drawn beside
                               └──> plans of the real planner, for the same job on a GPU cluster at drawn budgets
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.features import may_fall_back
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from tests.plan.strategies import plans_for, samples
from tests.test_plans_within_budget import BUDGETS, budget_of
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.test_experts import STATEFUL
from tests.transparency.test_latent import DIRECT, SIZES
from tests.transparency.test_weight_gradients import FUSED
from tests.transparency.trials import Trial

INSTALLED = "0.16"
RELEASES = {INSTALLED: "2.9", "0.17": "2.14", "0.18": "2.20", "0.19": "2.17"}
"""Of megatron-core, each with the release of Transformer Engine beside which it is tried."""
KINDS = ("gpt", "llama", "experts", "grouped experts", "latent attention", "latent attention, experts")
CLUSTERS = ("h800-80g", "h100-80g", "a100-80g")
MOST_RANKS = 4


@dataclass(frozen=True)
class Asked:
    """For what a plan is asked of the planner: `share` lies between the least bytes and those of keeping everything."""

    cluster: str
    of: str
    share: float
    offload: Any


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    release: str
    kind: str
    job: Job
    trial: Trial
    drawn: tuple[Plan, ...]
    asked: tuple[Asked, ...]

    @property
    def te(self) -> bool:
        """Whether Transformer Engine has to be importable."""
        return self.job.model.uses_te

    def plans(self) -> Iterator[tuple[str, Plan]]:
        """Each with where it comes from. Budgets at which no plan fits yield none."""
        yield from (("drawn", plan) for plan in self.drawn)
        for asked in self.asked:
            if (plan := planned(self.job, asked)) is not None:
                yield f"planned for {asked}", plan

    def __str__(self) -> str:
        layout = self.job.parallel.model_dump(exclude_defaults=True)
        facts = {"microbatches": self.job.microbatches, "replicas": self.job.replicas, **layout}
        model = self.job.model
        facts |= {name: getattr(model, name) for name in ("attention_dropout", "hidden_dropout", "dtype", "implementation")}
        facts |= {} if model.experts is None else model.experts.model_dump(exclude_defaults=True)
        trial = {name: value for name, value in vars(self.trial).items() if value != getattr(Trial(), name)}
        said = ", ".join(f"{name} {value}" for name, value in (facts | trial).items())
        return f"seed {self.seed}: megatron-core {self.release}, {self.kind}: {said}"


def case_of(seed: int, releases: tuple[str, ...] = tuple(RELEASES), kinds: tuple[str, ...] = KINDS) -> Case:
    """Always the same case for a seed, and for these releases and kinds."""
    [parts] = samples(_parts(releases, kinds), 1, seed)
    return Case(seed, **parts)


def planned(job: Job, asked: Asked) -> Plan | None:
    """The plan of the job on GPUs; None where none fits."""
    cluster = cluster_data(bundled_configs() / "clusters" / f"{asked.cluster}.yaml")
    data = job.model_dump(by_alias=True, exclude_unset=True)
    on_gpus = Job.model_validate({**data, "cluster": cluster, "policy": "planned", "offload_ratio": asked.offload})
    profile = analytic_profile(on_gpus)
    try:
        budget = budget_of(on_gpus, profile, asked.of, asked.share)
        return decide(on_gpus.model_copy(update={"budget": budget}), profile).plan
    except Infeasible:
        return None


@st.composite
def _parts(draw: st.DrawFn, releases: tuple[str, ...], kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = draw(st.sampled_from(kinds))
    fused = draw(st.booleans())
    job = draw(_jobs(kind, fused))
    trial = draw(_trials(job, kind, fused))
    plans = _drawn_plans(job, fused)
    return {
        "release": draw(st.sampled_from(releases)),
        "kind": kind,
        "job": job,
        "trial": trial,
        "drawn": tuple(draw(st.lists(plans, min_size=3, max_size=3))),
        "asked": tuple(draw(st.lists(_ASKED, min_size=2, max_size=2))),
    }


_ASKED = st.builds(
    lambda cluster, budget, offload: Asked(cluster, *budget, offload),
    st.sampled_from(CLUSTERS),
    BUDGETS,
    st.sampled_from([0.0, 0.0, "auto"]),
)


@st.composite
def _jobs(draw: st.DrawFn, kind: str, fused: bool) -> Job:
    tensor, pipeline = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2, 2]))
    experts = "experts" in kind
    fields: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline}
    fields["sequence_parallel"] = tensor > 1 and (experts or draw(st.booleans()))
    schedule = draw(st.sampled_from(["1F1B", "interleaved", "uneven"])) if pipeline > 1 else "1F1B"
    fields |= {"1F1B": {}, "interleaved": {"layers_per_chunk": 1}, "uneven": {"partition": (1, 2, 2, 1), "layers": 6}}[schedule]
    fields["microbatches"] = draw(st.sampled_from([2, 4, 6])) if pipeline > 1 else draw(st.integers(1, 3))
    fields |= {name: draw(st.sampled_from([0.0, 0.1])) for name in ("attention_dropout", "hidden_dropout")}
    fields["dtype"] = draw(st.sampled_from(["fp32", "bf16"]))
    spare = MOST_RANKS // (tensor * pipeline)
    if experts:
        fields |= draw(_experts(tensor, spare))
    elif spare > 1 and draw(st.booleans()):
        fields["replicas"] = 2
    if kind == "grouped experts" or ("latent" not in kind and kind != "experts" and draw(st.booleans())):
        fields["implementation"] = "transformer_engine"
    if "latent" in kind:
        fields |= {"latent": draw(st.sampled_from([SIZES, DIRECT])), "qk_norm": draw(st.booleans())}
    job = tiny_job("llama" if kind == "llama" else "gpt", **fields)
    return job.model_copy(update={"overlap": job.overlap.model_copy(update={"weight_gradients": "auto" if fused else "none"})})


@st.composite
def _experts(draw: st.DrawFn, tensor: int, spare: int) -> dict[str, Any]:
    """Fields of a job whose layers, or some of them, have experts. `spare`: ranks that may be replicas."""
    experts = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": draw(st.sampled_from([0, 32]))}
    experts |= {"layers": draw(st.sampled_from(["all", 2, ("2-4",)])), "dispatcher": draw(_DISPATCHERS)}
    fields: dict[str, Any] = {"experts": experts, "bias": False}
    if spare > 1:
        fields |= {"replicas": 2, "expert": draw(st.sampled_from([2, 2, 1]))}
    if tensor > 1 and spare > 1 and fields["expert"] > 1:
        fields["expert_tensor"] = 1  # gloo gathers no parts of different sizes, which experts that are cut ask for
    elif tensor > 1 and spare == 1:
        fields |= draw(st.sampled_from([{}, {"expert": 2, "expert_tensor": 1}]))
    return fields


_DISPATCHERS = st.sampled_from(["alltoall", "alltoall", "allgather"])


@st.composite
def _trials(draw: st.DrawFn, job: Job, kind: str, fused: bool) -> Trial:
    experts = job.model.experts is not None
    training: dict[str, Any] = {"ddp": True} if fused or experts or job.replicas > 1 or draw(st.booleans()) else {}
    if training and (experts or draw(st.booleans())):
        training["optimizer"] = "megatron"
    if training and draw(st.booleans()):
        training["overlap_grad_reduce"] = True
    model = dict(FUSED) if fused else {}
    counting = experts and draw(st.booleans())
    model |= STATEFUL if counting else {}
    model |= {"moe_grouped_gemm": True} if kind == "grouped experts" else {}
    return Trial(
        steps=2,
        training=training,
        model=model,
        canaries=draw(st.booleans()),
        backward_thread=draw(st.booleans()),
        starved=counting and draw(st.sampled_from([False, False, True])),
    )


@st.composite
def _drawn_plans(draw: st.DrawFn, job: Job, fused: bool) -> Plan:
    plan = draw(plans_for(job, whole=True, defers=fused, checkpoints=draw(st.booleans())))
    if draw(st.sampled_from([False, False, True])):
        plan = offloading(plan, draw(st.integers(1, 40_000)), experts=draw(st.booleans()))
    return draw(_holding(plan)) if job.model.experts is not None and draw(st.sampled_from([True, True, False])) else plan


_LOADS = st.floats(1.0, 1.1) | st.floats(1.0, 2.0)
"""Beyond the smaller ones halves fall back in most trials."""


@st.composite
def _holding(draw: st.DrawFn, plan: Plan) -> Plan:
    """The same plan, whose stages say which load of experts their bytes hold for, where they may."""
    loads = [draw(_LOADS) if may_fall_back(plan, stage) else None for stage in plan.stages]
    stages = tuple(stage.model_copy(update={"experts_hold": load}) for stage, load in zip(plan.stages, loads, strict=True))
    return Plan.model_validate(plan.model_copy(update={"stages": stages}).model_dump())
