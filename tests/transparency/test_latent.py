"""Latent attention under plans equals stock in every bit: two paths of items, gathers between sites, inputs kept gathered.

Megatron has no other layers for it than Transformer Engine's, whose compiled part is stood in for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lynx.anatomy import HALVES, MLP
from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.apply.refusals import refused_settings
from megatron_lynx.config.job import Job
from megatron_lynx.cost.section import weight_gradient
from megatron_lynx.errors import PlanMismatch
from megatron_lynx.kinds.latent.section import LatentSizes
from megatron_lynx.plan.plan import Plan
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.report.drawing import kind_of
from megatron_lynx.testbed.ranks import RankPool
from tests.apply import on_ranks
from tests.deferring import deferring
from tests.launch import frames_on_ranks
from tests.long import long
from tests.profiler.made_up import made_up_profile
from tests.te_releases import pool_with, pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for
from tests.transparency.test_every_bit import checked
from tests.transparency.test_weight_gradients import counts_of
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]

SIZES = {"q_rank": 12, "kv_rank": 8, "head_size": 8, "rope_size": 4, "value_head_size": 6}
DIRECT = {name: size for name, size in SIZES.items() if name != "q_rank"}
FUSED = SIZES | {"fused_rotary": True}
TP2 = {"tensor": 2}
SP2 = {"tensor": 2, "sequence_parallel": True}
PP2 = {"pipeline": 2, "microbatches": 4, "layers": 4}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
TE = {"implementation": "transformer_engine"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"latent": SIZES, "qk_norm": True, **TE},
    "one rank, queries as they are": {"latent": DIRECT, "norm": "rmsnorm", "bias": False, **TE},
    "TP2": {"latent": SIZES, **TP2, **TE},
    "TP2, queries as they are": {"latent": DIRECT, "qk_norm": True, **TP2, **TE},
    "TP2+SP": {"latent": SIZES, "qk_norm": True, **SP2, **TE},
    "TP2+SP, queries as they are": {"latent": DIRECT, **SP2, **TE},
    "PP2": {"latent": SIZES, **PP2, **TE},
    "PP2xVPP2": {"latent": DIRECT, "qk_norm": True, "layers_per_chunk": 1, **PP2, **TE},
    "CP2, a ring": {"latent": SIZES, "qk_norm": True, "context": 2, "norm": "rmsnorm", "bias": False, **NO_DROPOUT, **TE},
    "one rank, fused": {"latent": FUSED, "qk_norm": True, **TE},
    "TP2+SP, fused": {"latent": FUSED, "qk_norm": True, **SP2, **TE},
    "TP2+SP, queries as they are, fused": {"latent": DIRECT | {"fused_rotary": True}, **SP2, **TE},
    "PP2xVPP2, fused": {"latent": FUSED, "layers_per_chunk": 1, **PP2, **TE},
    "CP2, a ring, fused": {"latent": FUSED, "qk_norm": True, "context": 2, "norm": "rmsnorm", "bias": False, **NO_DROPOUT, **TE},
    "CP2, traded": {"latent": SIZES, "qk_norm": True, "context": 2, "context_exchange": "a2a", **TE},
    "CP2xTP2+SP, gathered": {"latent": DIRECT, "context": 2, "context_exchange": "all_gather", **SP2, **TE},
}
HEADS = ("kv_layernorm", "linear_kv_up_proj", "rotary")
"""What makes keys and values of all heads from what was compressed."""
INNER_NORMS = ("q_layernorm", "kv_layernorm")
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Pools]:
    yield from pools_with("2.9")


def job_of(layout: str) -> Job:
    return tiny_job("gpt", **{"layers": 2, **LAYOUTS[layout]})


def all_of(job: Job) -> tuple[str, ...]:
    """Everything that may be recomputed in this layout, of the attention half."""
    section = job.model.halves["attention"]
    assert section is not None
    return section.recomputable_among(job.parallel.context, sequence_parallel=job.parallel.sequence_parallel)


def latent_plan(job: Job, recompute: Collection[str], window: Any = "on_demand") -> Plan:
    """Every layer recomputes those of these items that it has; its attention half, if it recomputes anything, in `window`."""
    section = job.model.halves["attention"]
    usual = job.model_copy(update={"model": job.model.model_copy(update={"latent": None})})
    data = plan_for(usual, lambda _: [item for item in MLP.names if item in recompute], windows=False).model_dump()
    assert section is not None
    assert job.model.latent is not None
    data["model"]["latent_attention"] = job.model.latent.model_dump()
    for stage in data["stages"]:
        stage["ahead_depth"] = int(window != "on_demand")
        for rule in stage["rules"]:
            for key, chosen in (("keep", [item for item in section.names if item not in recompute]), ("recompute", recompute)):
                rule[key] = [*(item for item in section.names if item in chosen), *(i for i in rule[key] if i in MLP.names)]
            if window != "on_demand" and set(recompute) & set(section.names):
                rule["windows"] = {**(rule["windows"] or {}), HALVES[0]: window}
    return Plan.model_validate(data)


def together(job: Job, items: Collection[str]) -> list[str]:
    """Those of these items that may be recomputed in this layout, with what has to be recomputed beside them: a linear whose
    output is turned in place, its norm, and the code that turns it. The MLP's are left as they are."""
    section, everything = job.model.halves["attention"], all_of(job)
    torn = section.torn([item for item in items if item in everything])
    beside = {*items, *torn, *(INNER_NORMS[:1] if "linear_q_up_proj" in torn else ())}
    return [*(item for item in everything if item in beside), *(item for item in items if item in MLP.names)]


def candidates(job: Job) -> list[Plan]:
    everything, heads = all_of(job), together(job, HEADS)
    if job.parallel.tensor > 1:
        return [latent_plan(job, heads), *hidden(job, everything, heads)]
    return [
        latent_plan(job, everything),
        latent_plan(job, heads),
        latent_plan(job, together(job, ["input_layernorm", "core_attention", *MLP.recomputable[:1]])),
        latent_plan(job, [*INNER_NORMS, "linear_kv_up_proj"] if job.model.qk_norm else ["input_layernorm"]),
        latent_plan(job, INNER_NORMS if job.model.qk_norm else together(job, ["input_layernorm", "rotary"])),
    ]


def hidden(job: Job, everything: Collection[str], heads: Collection[str]) -> list[Plan]:
    """What runs in windows of tensor-parallel ranks."""
    last = len(MLP.collectives("bwd", job.parallel.sequence_parallel)) - 1
    plans = [latent_plan(job, items, f"bwd.mlp.{last}") for items in (everything, heads)]
    stop = "rotary" if "rotary" in everything else "linear_q_proj"
    plans += [latent_plan(job, everything, f"bwd.mlp.0 until {stop} then bwd.mlp.{last}")] if last else []
    return [*plans, uniform_plan(job, gather="once")]  # MLP halves run again behind the last wait of the attention above


CUT = ("CP2, traded", "CP2xTP2+SP, gathered")
TURNED = ("one rank, fused", "TP2+SP, queries as they are, fused", "PP2xVPP2, fused", "CP2, a ring, fused")
LONG = (
    *CUT,
    *TURNED,
    "one rank",
    "TP2+SP",
    "PP2xVPP2",
    "one rank, queries as they are",
    "TP2",
    "TP2, queries as they are",
    "TP2+SP, queries as they are",
    "PP2",
)
"""Layouts of which the others show, one by one, what each combines."""


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in LAYOUTS])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    """Exchanges of a step are stock's, and each runs once."""
    job = job_of(layout)
    for outcomes in checked(pool_of, job, candidates(job), Trial(counted=True, canaries=True)):
        for outcome in outcomes:
            assert sorted(outcome.planned.collectives) == sorted(outcome.stock.collectives)


def test_yarn(pool_of: Pools) -> None:
    """Queries and keys are turned otherwise, by the same code."""
    job = job_of("one rank")
    checked(pool_of, job, [latent_plan(job, all_of(job))], Trial(model=YARN, backward_thread=True))


def test_checked_frames_keep_the_latents_that_were_gathered(pool_of: Pools) -> None:
    """`--lynx-check frames` kept none, and refused the recomputation: it would have gathered them again."""
    job = job_of("TP2+SP")
    ((checked,), _) = pool_of(job.gpus).run(
        frames_on_ranks.check_frames, job, [frames_on_ranks.Trial(latent_plan(job, together(job, HEADS)))]
    )
    assert (checked.status, checked.said) == (None, "")
    assert "are in every bit what their forward had saved" in (checked.summary or "")


DEFERRING = {"TP2+SP": None, "TP2": "linear_kv_down_proj", "PP2xVPP2": None}
"""Where weight gradients are deferred, and what else may be the only one that is."""


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2", *long("TP2")])
def test_weight_gradients_in_waits(pool_of: Pools, layout: str) -> None:
    """All of both halves' linears, of kept and of recomputed halves, into whatever comes; each is computed once."""
    job = job_of(layout)
    profile = made_up_profile(job, link_s=1.0)
    linears = [linear for section in job.model.kind_sections(experts=False) for linear in section.linears]
    later = is_forward if job.parallel.tensor > 1 else None
    plans = [
        deferring(latent_plan(job, ()), **({"chosen": later} if later else {})),
        deferring(latent_plan(job, all_of(job))),
        deferring(latent_plan(job, HEADS), linears=[DEFERRING[layout] or linears[0]]),
    ]
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True}, canaries=True)
    for rank, (kept, recomputed, one) in enumerate(counts_of(pool_of, job, plans, trial)):
        assert kept.deferred == recomputed.deferred == one.deferred * len(linears) > 0 or job.parallel.tensor == 1
        assert kept.filled > 0 or rank == 1
        assert recomputed.filled >= kept.filled
        if later:  # all of a micro-batch's wait for the next forward: at the end of its backward all of them are pending
            apart = sum(
                weight_gradient(profile, section, linear).bytes
                for section in job.model.kind_sections(experts=False)
                for linear in section.linears
            )
            shared = profile.attention.input_bytes if job.model.uses_te else 0  # both down-projections read it
            assert kept.deferred_bytes == job.model.layers * (apart - shared)
            spans = [span for span in rehearse(plans[0], profile).timeline().ranks[0] if span.kind == "weight_gradient"]
            filled = {span.end_s for span in spans if kind_of(span) == "weight_gradient"}
            assert (len(filled), len(spans) - len(filled)) == (kept.filled, kept.flushed)


LIKE_DEEPSEEK = {
    "latent": SIZES,
    "qk_norm": True,
    "norm": "rmsnorm",
    "bias": False,
    "layers": 2,
    "experts": {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32, "layers": ("2",)},
    **TE,
}
"""The first layer has an MLP, the others experts, some of which all tokens pass."""


@pytest.mark.parametrize("spread", [{"replicas": 2, "expert": 2}, *long({})], ids=["EP2", "one rank"])
def test_beside_experts(pool_of: Pools, spread: dict[str, Any]) -> None:
    job = tiny_job("gpt", **LIKE_DEEPSEEK, **spread)
    plans = [
        uniform_plan(job),
        uniform_plan(job, windows=False),
        uniform_plan(job, (*HEADS, "experts_activation")),
    ]
    trial = Trial(steps=2, training={"ddp": True, "optimizer": "megatron"}, counted=True, canaries=True)
    for outcomes in checked(pool_of, job, plans, trial):
        for outcome in outcomes:
            assert sorted(outcome.planned.collectives) == sorted(outcome.stock.collectives)


@pytest.mark.streams
@pytest.mark.parametrize(("te", "core"), [*long(("2.14", "0.17"), ("2.20", "0.18")), ("2.17", "0.19"), ("2.20", "0.20")])
def test_other_releases(te: str, core: str) -> None:
    """Each of megatron-core beside another of Transformer Engine."""
    job = job_of("TP2+SP")
    pool = pool_with(te, job.gpus, core)
    try:
        checked(lambda _: pool, job, candidates(job)[:3])
    finally:
        pool.close()


def test_a_plan_for_other_sizes_is_refused(pool_of: Pools) -> None:
    job = job_of("one rank")
    narrow = job.model_copy(update={"model": job.model.model_copy(update={"latent": LatentSizes(**SIZES | {"kv_rank": 4})})})
    [refusal] = pool_of(1).run(on_ranks.refused, job, latent_plan(narrow, ["rotary"]), None)
    assert isinstance(refusal.error, PlanMismatch)
    assert refusal.places == ["plan: model.latent_attention"]
    assert refusal.changed == []


def test_what_does_not_go_with_latent_attention_is_named() -> None:
    wrong = ("cache_mla_latents", "mla_down_proj_fusion", "tp_comm_overlap")
    config = SimpleNamespace(multi_latent_attention=True, **dict.fromkeys(wrong, True))
    assert {problem.where for problem in refused_settings(config, te=True)} == {f"config.{name}" for name in wrong}
    config.multi_latent_attention = False
    assert list(refused_settings(config, te=True)) == []
