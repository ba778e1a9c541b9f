"""Settings that stock Megatron accepts, release by release, and those that it accepts but cannot train with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from megatron_lynx.config.job import Job
from megatron_lynx.stock.setting import OFFLOADED, RECOMPUTED, WHOLE, Fact, Module, StockSetting

NEWEST = "0.19"

FRACTION_SINCE = "0.19"
"""Release that added `activation_offload_fraction`; it also refuses to offload inside a recomputed `moe`."""

FLAGS: dict[Fact, str] = {
    "experts": "--num-experts",
    "grouped_gemm": "--moe-grouped-gemm",
    "shared_experts": "--moe-shared-expert-intermediate-size",
    "latent": "--multi-latent-attention",
    "gated_delta": "--experimental-attention-variant gated_delta_net",
    "op_fuser": "--use-transformer-engine-op-fuser",
}

NOT_IN_DELAYED_FP8 = ("moe_act", "layernorm")
"""Modules whose outputs are discarded outside of `CheckpointWithoutOutput`'s FP8 context."""

WITH_USERBUFFERS = (None, "delayed", "tensorwise", "mxfp8")
"""FP8 recipes (None: 16 bits) with userbuffers in Transformer Engine's linears. NVFP4 has none."""

IN_EXPERTS = ("expert_fc1", "moe_act", "fused_group_mlp")


@dataclass(frozen=True)
class Facts:
    """A job on a release of megatron-core. `has`: what modules need, or do not go with."""

    job: Job
    release: str
    has: frozenset[Fact]

    @classmethod
    def of(cls, job: Job, release: str = NEWEST) -> Facts:
        """Transformer Engine's experts are assumed to have grouped GEMMs, which all published recipes enable."""
        model, experts = job.model, job.model.experts
        known: dict[Fact, bool] = {
            "experts": experts is not None,
            "grouped_gemm": experts is not None and model.uses_te,
            "shared_experts": experts is not None and bool(experts.shared_ffn),
            "shared_overlap": experts is not None and experts.shared_beside,
            "latent": model.latent is not None,
            "gated_delta": any(half.kind == "gated_delta_net" for half in model.opaque),
        }
        return cls(job, release, frozenset(fact for fact, there in known.items() if there))


By = Literal["config", "launch", "training", "us"]
"""Sources of objections to a setting.

config     TransformerConfig's own validation refuses it (tests run it for every release)
launch     `validate_args` refuses it, or the launch's training loop has no code for it
training   it is accepted, and ends in an error, seen on CPU ranks; trying some of these exhausts the machine's memory
us         it is legal, and not recommended to a launch without it
"""

Rules = Iterator[tuple[By, object, str]]
"""(source, whether the rule is broken, objection)."""


def objections(setting: StockSetting, facts: Facts, *by: By) -> Iterator[str]:
    """Yield the objections to a setting; `by`: of these alone."""
    rules = chain.from_iterable(rules(setting, facts) for rules in (_recomputation, _offloading, _overlap, _userbuffers))
    return (why for who, broken, why in rules if broken and (not by or who in by))


def offered(setting: StockSetting, facts: Facts) -> bool:
    return next(objections(setting, facts), None) is None


def _modules(does: str, names: tuple[str, ...], modules: Mapping[str, Module], facts: Facts) -> Rules:
    unknown = [name for name in names if name not in modules or modules[name].since > facts.release]
    yield "config", unknown, f"{facts.release} does not {does} {', '.join(unknown)}"
    for name in (name for name in names if name not in unknown):
        if (needs := modules[name].needs) is not None:
            yield "config", needs not in facts.has, f"{name} is {does.removesuffix('e')}ed with {FLAGS[needs]} alone"


def _recomputation(setting: StockSetting, facts: Facts) -> Rules:
    whole, model = setting.method is not None, facts.job.model
    yield "config", whole and setting.recompute, "whole layers and single modules are not recomputed together"
    yield "config", whole and setting.layers is None, f"{setting.method} needs a number of layers"
    yield from _modules("recompute", setting.recompute, RECOMPUTED, facts)
    beside = "shared_experts" in setting.recompute and facts.has.issuperset(("shared_experts", "shared_overlap"))
    yield "config", beside, "shared experts that run beside the dispatch are not recomputed"
    for name in NOT_IN_DELAYED_FP8:
        discarded = name in setting.recompute and model.fp8_recipe == "delayed"
        yield "config", discarded, f"{name} is not recomputed with delayed scaling"
    endless = "mlp" in setting.recompute and model.bias
    yield "training", endless, "stock Megatron recomputes an MLP with linear biases without end, until memory is gone"


def _offloading(setting: StockSetting, facts: Facts) -> Rules:
    offload, model, since_fraction = setting.offload, facts.job.model, facts.release >= FRACTION_SINCE
    if not offload:
        return
    yield from _modules("offload", offload, OFFLOADED, facts)
    yield "config", "attn_proj" in offload and "core_attn" not in offload, "attn_proj is offloaded with core_attn alone"
    parted = setting.fraction != WHOLE and not (since_fraction and 0 <= setting.fraction <= 1)
    yield "config", parted, f"a part ({setting.fraction:g}) is offloaded from {FRACTION_SINCE} on, between 0 and 1"
    inside = [name for name in offload if name in IN_EXPERTS]
    twice = since_fraction and inside and "moe" in setting.recompute
    yield "config", twice, f"{', '.join(inside)} is inside the moe that is recomputed"
    delayed = "expert_fc1" in offload and model.fp8_recipe == "delayed"
    yield "config", delayed, "expert_fc1 is not offloaded with delayed scaling, whose linears cannot save their original input"
    fused = "fused_group_mlp" in offload and len(inside) > 1
    yield "config", fused, "fused_group_mlp is offloaded without expert_fc1 and moe_act"
    yield "launch", "offload" in facts.job.unavailable, "the launch's training loop does not take it (offload)"
    yield "launch", not model.uses_te, "stock Megatron offloads from Transformer Engine's layers alone"
    lost = setting.method is not None and facts.job.parallel.pipeline > 1
    why = "stock Megatron loses its place among offloaded chunks when whole layers are recomputed (Chunk mismatch)"
    yield "training", lost, why


def _overlap(setting: StockSetting, facts: Facts) -> Rules:
    job, layout, mtp = facts.job, facts.job.parallel, facts.job.model.mtp
    if not setting.overlap:
        why = "weight gradients are delayed with overlapped exchanges alone (--overlap-moe-expert-parallel-comm)"
        yield "config", setting.delayed, why
        return
    yield "config", layout.expert == 1, "without --expert-model-parallel-size there is no exchange to overlap"
    why = "exchanges are overlapped in a pipeline of several chunks alone (--num-virtual-stages-per-pipeline-rank)"
    yield "config", layout.pipeline > 1 and job.chunks == 1, why
    again = setting.method is not None or ("moe" in setting.recompute and facts.release >= "0.17")
    yield "config", again, "neither whole layers nor moe are recomputed beside overlapped exchanges"
    gathers = job.model.moe_dispatcher == "allgather"
    yield "config", gathers, "exchanges are overlapped with the all-to-all or the flex dispatcher alone"
    beside = "shared_overlap" in facts.has
    yield "config", beside, "shared experts that run beside the dispatch leave no exchange to overlap"
    yield "config", job.model.dtype == "fp32", "exchanges are overlapped in 16 bits alone"
    predicted = mtp > 1 or (mtp and layout.pipeline == 1)
    yield "config", predicted, "exchanges are overlapped beside one layer of multi-token prediction at most, in a pipeline"
    yield "launch", "overlap" in job.unavailable, "the launch's training loop does not take it (overlap)"
    early = "gated_delta" in facts.has and facts.release < "0.17"
    why = "gated delta nets have no backward_dw before 0.17, which overlapped exchanges ask every attention for"
    yield "training", early, why


def _userbuffers(setting: StockSetting, facts: Facts) -> Rules:
    job, recipe = facts.job, facts.job.model.fp8_recipe
    if not setting.userbuffers:
        return
    alone = job.parallel.tensor == 1
    yield "config", alone, "userbuffers are for several tensor-parallel ranks"
    yield "config", not alone and not job.parallel.sequence_parallel, "userbuffers need --sequence-parallel"
    yield "launch", "userbuffers" in job.unavailable, "the launch's training loop does not take it (userbuffers)"
    yield "launch", not job.model.uses_te, "linears of Transformer Engine alone have userbuffers"
    yield "us", recipe not in WITH_USERBUFFERS, f"userbuffers are not shown with the recipe {recipe}"
    yield "us", "latent" in facts.has, "userbuffers are not shown with latent attention"
    yield "us", setting.overlap, "userbuffers are not shown with overlapped exchanges"
