"""Settings that stock Megatron accepts, release by release, and those that it accepts but cannot train with.

refused       by TransformerConfig's own validation (tests run it for every release)
not launched  by `validate_args`: only Transformer Engine's layers offload
fails         accepted, and ends in an error; seen on CPU ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_lynx.config.job import Job
from megatron_lynx.stock.setting import OF_RECOMPUTE, OFFLOADED, RECOMPUTED, WHOLE, Fact, StockSetting

RELEASES = ("0.15", "0.16", "0.17", "0.18", "0.19", "0.20")
NEWEST = "0.19"

FRACTION_SINCE = "0.19"
"""Release that added `activation_offload_fraction`; it also refuses to offload inside a recomputed `moe`."""

FLAGS: dict[Fact, str] = {
    "experts": "--num-experts",
    "grouped_gemm": "--moe-grouped-gemm",
    "shared_experts": "--moe-shared-expert-intermediate-size",
    "latent": "--multi-latent-attention",
    "gated_delta": "--experimental-attention-variant gated_delta_net",
}

NOT_IN_DELAYED_FP8 = ("moe_act", "layernorm")
"""Modules whose outputs are discarded outside of `CheckpointWithoutOutput`'s FP8 context."""

WITH_USERBUFFERS = (None, "delayed", "tensorwise", "mxfp8")
"""FP8 recipes (None: 16 bits) with userbuffers in Transformer Engine's linears. NVFP4 has none."""

IN_EXPERTS = ("expert_fc1", "moe_act", "fused_group_mlp")


@dataclass(frozen=True)
class Facts:
    release: str = NEWEST
    has: frozenset[Fact] = field(default_factory=frozenset)
    fp8_recipe: str | None = None
    shared_overlap: bool = False
    op_fuser: bool = False
    transformer_engine: bool = True
    bias: bool = False
    pipeline: int = 1
    chunks: int = 1
    expert: int = 1
    sixteen_bits: bool = True
    mtp: int = 0
    gathers: bool = False
    """`--moe-token-dispatcher-type allgather`."""
    tensor: int = 1
    sequence_parallel: bool = False
    unavailable: frozenset[str] = frozenset()
    """Settings that the launch's training loop has no code for, or refuses."""

    @classmethod
    def of(cls, job: Job, release: str = NEWEST) -> Facts:
        """Transformer Engine's experts are assumed to have grouped GEMMs, which all published recipes enable."""
        model, experts = job.model, job.model.experts
        known: dict[Fact, bool] = {
            "experts": experts is not None,
            "grouped_gemm": experts is not None and model.uses_te,
            "shared_experts": experts is not None and bool(experts.shared_ffn),
            "latent": model.latent is not None,
            "gated_delta": any(half.kind == "gated_delta_net" for half in model.opaque),
        }
        return cls(
            release,
            frozenset(fact for fact, there in known.items() if there),
            model.fp8_recipe,
            shared_overlap=experts is not None and experts.shared_beside,
            transformer_engine=model.uses_te,
            bias=model.bias,
            pipeline=job.parallel.pipeline,
            chunks=job.chunks,
            expert=job.parallel.expert,
            sixteen_bits=model.dtype != "fp32",
            mtp=model.mtp,
            gathers=model.moe_dispatcher == "allgather",
            tensor=job.parallel.tensor,
            sequence_parallel=job.parallel.sequence_parallel,
            unavailable=frozenset(job.unavailable),
        )


def refused(setting: StockSetting, facts: Facts) -> list[str]:
    return [
        *_recompute_refused(setting, facts),
        *_offload_refused(setting, facts),
        *_overlap_refused(setting, facts),
        *_userbuffers_refused(setting, facts),
    ]


def _recompute_refused(setting: StockSetting, facts: Facts) -> Iterator[str]:
    if setting.method is not None and setting.recompute:
        yield "whole layers and single modules are not recomputed together"
    if setting.method is not None and setting.layers is None:
        yield f"{setting.method} needs a number of layers"
    known = {module.name for module in RECOMPUTED if module.since <= facts.release}
    if unknown := [name for name in setting.recompute if name not in known]:
        yield f"{facts.release} does not recompute {', '.join(unknown)}"
    for module in (OF_RECOMPUTE[name] for name in setting.recompute if name in known):
        if module.needs is not None and module.needs not in facts.has:
            yield f"{module.name} is recomputed with {FLAGS[module.needs]} alone"
        if module.name == "shared_experts" and facts.shared_overlap and "shared_experts" in facts.has:
            yield "shared experts that run beside the dispatch are not recomputed"
        if module.name in NOT_IN_DELAYED_FP8 and facts.fp8_recipe == "delayed":
            yield f"{module.name} is not recomputed with delayed scaling"


def _offload_refused(setting: StockSetting, facts: Facts) -> Iterator[str]:
    if not setting.offload:
        return
    known = {module.name for module in OFFLOADED if module.since <= facts.release}
    if unknown := [name for name in setting.offload if name not in known]:
        yield f"{facts.release} does not offload {', '.join(unknown)}"
    if "attn_proj" in setting.offload and "core_attn" not in setting.offload:
        yield "attn_proj is offloaded with core_attn alone"
    if setting.fraction != WHOLE and (facts.release < FRACTION_SINCE or not 0 <= setting.fraction <= 1):
        yield f"a part ({setting.fraction:g}) is offloaded from {FRACTION_SINCE} on, between 0 and 1"
    inside = [name for name in setting.offload if name in IN_EXPERTS]
    if facts.release >= FRACTION_SINCE and inside and "moe" in setting.recompute:
        yield f"{', '.join(inside)} is inside the moe that is recomputed"
    if "expert_fc1" in setting.offload and facts.fp8_recipe == "delayed":
        yield "expert_fc1 is not offloaded with delayed scaling, whose linears cannot save their original input"
    if "fused_group_mlp" in setting.offload and "fused_group_mlp" in known:
        if not facts.op_fuser:
            yield "fused_group_mlp needs fused operations of Transformer Engine"
        if len(inside) > 1:
            yield "fused_group_mlp is offloaded without expert_fc1 and moe_act"


def _overlap_refused(setting: StockSetting, facts: Facts) -> Iterator[str]:
    if setting.delayed and not setting.overlap:
        yield "weight gradients are delayed with overlapped exchanges alone (--overlap-moe-expert-parallel-comm)"
    if not setting.overlap:
        return
    again = setting.method is not None or ("moe" in setting.recompute and facts.release >= "0.17")
    one_chunk, predicted = facts.pipeline > 1 and facts.chunks == 1, facts.mtp > 1 or (facts.mtp and facts.pipeline == 1)
    rules = (
        (facts.expert == 1, "without --expert-model-parallel-size there is no exchange to overlap"),
        (one_chunk, "exchanges are overlapped in a pipeline of several chunks alone (--num-virtual-stages-per-pipeline-rank)"),
        (again, "neither whole layers nor moe are recomputed beside overlapped exchanges"),
        (facts.gathers, "exchanges are overlapped with the all-to-all or the flex dispatcher alone"),
        (facts.shared_overlap, "shared experts that run beside the dispatch leave no exchange to overlap"),
        (not facts.sixteen_bits, "exchanges are overlapped in 16 bits alone"),
        (predicted, "exchanges are overlapped beside one layer of multi-token prediction at most, in a pipeline"),
    )
    yield from (why for broken, why in rules if broken)


def _userbuffers_refused(setting: StockSetting, facts: Facts) -> Iterator[str]:
    if setting.userbuffers and facts.tensor == 1:
        yield "userbuffers are for several tensor-parallel ranks"
    elif setting.userbuffers and not facts.sequence_parallel:
        yield "userbuffers need --sequence-parallel"


def not_launched(setting: StockSetting, facts: Facts) -> str | None:
    if lacking := next((name for name in sorted(facts.unavailable - {"head"}) if getattr(setting, name)), None):
        return f"the launch's training loop does not take it ({lacking})"
    if setting.offload and not facts.transformer_engine:
        return "stock Megatron offloads from Transformer Engine's layers alone"
    if setting.userbuffers and not facts.transformer_engine:
        return "linears of Transformer Engine alone have userbuffers"
    return None


def fails(setting: StockSetting, facts: Facts) -> str | None:
    """Return why stock Megatron cannot train with an accepted setting, or None. Trying some of these exhausts the machine's
    memory."""
    if "mlp" in setting.recompute and facts.bias:
        return "stock Megatron recomputes an MLP with linear biases without end, until memory is gone"
    if setting.offload and setting.method is not None and facts.pipeline > 1:
        return "stock Megatron loses its place among offloaded chunks when whole layers are recomputed (Chunk mismatch)"
    if setting.overlap and "gated_delta" in facts.has and facts.release < "0.17":
        return "gated delta nets have no backward_dw before 0.17, which overlapped exchanges ask every attention for"
    return None


def untried(setting: StockSetting, facts: Facts) -> str | None:
    """Return why a setting is not recommended to a launch without it although it is legal, or None."""
    if not setting.userbuffers:
        return None
    if facts.fp8_recipe not in WITH_USERBUFFERS:
        return f"userbuffers are not shown with the recipe {facts.fp8_recipe}"
    if "latent" in facts.has:
        return "userbuffers are not shown with latent attention"
    return "userbuffers are not shown with overlapped exchanges" if setting.overlap else None


def offered(setting: StockSetting, facts: Facts) -> bool:
    refusals = (not_launched, fails, untried)
    return not refused(setting, facts) and all(why(setting, facts) is None for why in refusals)
