"""The mixture of experts of a launch, and its parallel groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.config.experts import BALANCED, Experts, as_spans
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.experts.section import DISPATCHERS
from megatron_lynx.launch_arguments.given import Fact, Given, facts_in
from megatron_lynx.launch_arguments.layers import layer_pattern, written
from megatron_lynx.launch_arguments.model_facts import ffn_of
from megatron_lynx.launch_arguments.today import stays_overlapped
from megatron_lynx.stock.setting import DELAYED, OVERLAP

FREQ, DISPATCHER = "moe_layer_freq", "moe_token_dispatcher_type"
CAPACITY, PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
RANK_CAPACITY = "moe_expert_rank_capacity_factor"
EXPERT, EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
BESIDE, WEIGHTED = "moe_shared_expert_overlap", "use_fused_weighted_squared_relu"
AUXILIARY = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
SCORES, PRE_SOFTMAX, Z_LOSS = "moe_router_score_function", "moe_router_pre_softmax", "moe_z_loss_coeff"
GROUPS = "moe_router_num_groups"
SCORE_BYTES, INDEX_BYTES = 4, 8
LATENT = "moe_latent_size"
KEPT_WHOLE = (BESIDE, LATENT, "moe_use_legacy_grouped_gemm")
"""With one of these, or with local layers and any grouped GEMM, experts can neither be recomputed nor offloaded in parts."""
MULTIPROCESSORS = {
    "deepep": ("moe_flex_dispatcher_num_sms", "moe_deepep_num_sms"),
    "hybridep": ("moe_flex_dispatcher_num_sms", "moe_hybridep_num_sms"),
}
FILLED = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
EXPERTS = "model.experts."


def has_experts(given: Given) -> bool:
    return bool(given["num_experts"])


def without_experts(changes: Mapping[str, Any], needed: str) -> Iterator[Problem]:
    options = {f"{EXPERTS}load": "--experts-load", f"{EXPERTS}holds": "--experts-hold"}
    for place, option in options.items():
        if changes.get(place) is not None:
            yield Problem(option, f"{changes[place]:g}, and no experts", needed, "leave it out")


def natural_routing(given: Given, experts: Experts) -> Iterator[str]:
    """Yield a warning, with the load at which published steps of a trained Qwen3 235B are met (Megatron-MoE-ModelZoo)."""
    if given["moe_router_force_load_balancing"] or given[PADDED]:
        return
    if experts.drops and experts.holds is not None:
        yield f"warning: tokens beyond {experts.holds:g} times a balanced share are dropped; bytes are the most that can be left."
        yield "  An uneven router drops more: --experts-load 0.8 states what the fullest rank gets."
    elif experts.load == experts.held_load == BALANCED:
        yield "warning: no --moe-router-force-load-balancing: a rank may get more tokens than a balanced share."
        trained = "a trained Qwen3 235B, whose loss balances them, took as long."
        yield f"  --experts-load 1.45 prices that, --experts-hold 1.45 its bytes alone: {trained}"
        if not given["moe_router_enable_expert_bias"] and given[AUXILIARY[0]] in (None, "none", ["none"]):
            yield "  No loss and no bias balances them here: it may be more."


def expert_facts(given: Given, problems: list[Problem], *, planning: bool) -> Iterator[Fact]:
    if not has_experts(given):
        return
    yield from facts_in(given, {"model.experts.count": "num_experts", "model.experts.per_token": "moe_router_topk"})
    yield from _widths(given)
    if given[WEIGHTED] and given["squared_relu"] and given["moe_grouped_gemm"] and given["transformer_impl"] != "local":
        yield Fact("model.experts.weighted_relu", True, given.origin(WEIGHTED))
    yield from _scores(given)
    yield from _layers(given, problems)
    kept_whole = (*KEPT_WHOLE, *(("moe_grouped_gemm",) if given["transformer_impl"] == "local" else ()))
    if (flag := next((name for name in kept_whole if given[name]), None)) is not None:
        yield Fact("model.experts.whole", True, f"{given.origin(flag)}: nothing inside is recomputed or offloaded")
    yield from _beside(given, problems)
    yield from _capacity(given)
    yield from facts_in(given, {"parallel.expert": EXPERT, "parallel.expert_tensor": EXPERT_TENSOR})
    if given[DISPATCHER] == "flex":
        yield from _fused(given, problems)
    if planning and stays_overlapped(given):
        yield Fact("model.experts.overlapped", True, f"{given.origin(OVERLAP)}: the plan is for the combined schedule")
        if given[DELAYED]:
            yield Fact("model.experts.delayed", True, f"{given.origin(DELAYED)}: stays, in the combined schedule")
    if (flag := next((name for name in FILLED if given[name]), None)) is not None:
        yield Fact("model.experts.filled", True, given.origin(flag))
    tensor = given[EXPERT_TENSOR] or given["tensor_model_parallel_size"] or 1
    if given[DISPATCHER] == "allgather" and (given[EXPERT] or 1) * tensor > 1:
        why = "as given" if DISPATCHER in given.values else "Megatron's default"
        yield Fact("model.experts.dispatcher", "allgather", f"{given.origin(DISPATCHER)}: {why}")


def _scores(given: Given) -> Iterator[Fact]:
    """Tensors of scores that `TopKRouter` saves. Group-limited routing also saves a mask and indices."""
    kinds, coefficients = ([value] if not isinstance(value, list) else value for value in map(given.__getitem__, AUXILIARY))
    kept = {
        AUXILIARY[1]: any(
            str(kind).endswith("aux_loss") and coefficient for kind, coefficient in zip(kinds, coefficients, strict=False)
        ),
        Z_LOSS: bool(given[Z_LOSS]),
        SCORES: given[SCORES] != "softmax",
        PRE_SOFTMAX: bool(given[PRE_SOFTMAX]) and given[SCORES] == "softmax",
    }
    numbers, said = float(sum(kept.values())), [name for name, counts in kept.items() if counts]
    count, chosen = given["num_experts"], given["moe_router_topk"] or 1
    groups, best = given[GROUPS], given["moe_router_group_topk"]
    if groups and best:
        numbers += (count + INDEX_BYTES * (groups * (chosen // best) + best)) / (SCORE_BYTES * count)
        said.append(GROUPS)
    if numbers != 1:
        origins = [given.origin(name) for name in said] or ["no auxiliary loss"]
        yield Fact("model.experts.scores", round(numbers, 3), ", ".join(dict.fromkeys(origins)))


def _beside(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    if not given[BESIDE] or given["moe_shared_expert_intermediate_size"] is None or given[OVERLAP]:
        return
    if given[DISPATCHER] == "allgather":
        needed = "--moe-token-dispatcher-type alltoall (or flex) beside it"
        problems.append(Problem(given.origin(BESIDE), "given", needed, "Megatron stops here"))
    yield Fact("model.experts.shared_beside", True, f"{given.origin(BESIDE)}: they compute while tokens travel")


def _capacity(given: Given) -> Iterator[Fact]:
    """The bound of a capacity factor: rows of an expert from each rank, over a balanced share (`apply_router_token_dropping`).
    Padded, every expert gets that many; otherwise at most that many, and a factor below 1 drops tokens of a balanced router."""
    factor, count, ranks = given[CAPACITY], given["num_experts"], given[EXPERT] or 1
    padded = given[PADDED]
    if factor is None or factor < 0:
        return
    largest_bound = ranks * min(1.0, max(1, count // ranks) / (given["moe_router_topk"] or 1))
    bound, origin = min(factor, largest_bound), given.origin(CAPACITY)
    yield Fact("model.experts.drops", True, f"{origin}: tokens beyond are dropped")
    if padded:
        yield Fact("model.experts.load", bound, f"{origin}, {given.origin(PADDED)}: as many rows for every expert")
        return
    yield Fact("model.experts.holds", bound, f"{origin}: tokens beyond are dropped")
    if bound < BALANCED:
        yield Fact("model.experts.load", bound, f"{origin}: a balanced router drops the rest")


def _fused(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    backend = "deepep" if given["moe_enable_deepep"] else given["moe_flex_dispatcher_backend"] or "deepep"
    origin = given.origin(DISPATCHER if backend == "deepep" else "moe_flex_dispatcher_backend")
    known = backend if backend in DISPATCHERS else "deepep"
    yield from _rank_capacity(given, problems, str(backend))
    yield Fact("model.experts.dispatcher", known, f"{origin}: flex, priced as {known}")
    flag = next((name for name in MULTIPROCESSORS[known] if given[name] is not None and name in given.values), None)
    if flag is not None:
        yield Fact("model.experts.multiprocessors", given[flag], given.origin(flag))


def _rank_capacity(given: Given, problems: list[Problem], backend: str) -> Iterator[Fact]:
    """A rank's capacity of rows, over a balanced share. NCCL EP allocates a block of that size, which the first linears save.
    HybridEP needs fused experts with it (`TransformerConfig.__post_init__` of 0.18 and 0.19), which are not modelled."""
    factor, origin = given[RANK_CAPACITY], given.origin(RANK_CAPACITY)
    if factor is not None and backend == "ncclep":
        yield Fact("model.experts.holds", max(1.0, factor), f"{origin}: rows of a rank lie in a block of that size")
    elif factor is not None:
        needed = (
            "none: with HybridEP Megatron takes it beside --use-transformer-engine-op-fuser alone, whose experts are one call"
        )
        problems.append(Problem(origin, f"{factor:g}", needed, "drop it: then no token is dropped, and rows are as many as come"))


def _widths(given: Given) -> Iterator[Fact]:
    if given["moe_ffn_hidden_size"] is not None:
        yield Fact("model.experts.ffn", given["moe_ffn_hidden_size"], given.origin("moe_ffn_hidden_size"))
    elif (ffn := ffn_of(given)) is not None:
        yield Fact("model.experts.ffn", ffn[0], f"{ffn[1]}: no --moe-ffn-hidden-size")
    yield from facts_in(given, {"model.experts.latent": LATENT}, on=True)
    yield from facts_in(given, {"model.experts.shared_ffn": "moe_shared_expert_intermediate_size"})
    if given["moe_shared_expert_intermediate_size"] is not None:
        yield from facts_in(given, {"model.experts.shared_gate": "moe_shared_expert_gate"}, on=True)


def _layers(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    pattern, origin = layer_pattern(given, FREQ, problems, "([0]+[1]*26)"), given.origin(FREQ)
    if isinstance(pattern, int) and pattern > 1:
        yield Fact("model.experts.layers", pattern, f"{origin}: the first of every {pattern}")
    elif isinstance(pattern, list):
        spans = as_spans(number for number, one in enumerate(pattern, start=1) if one)
        yield Fact("model.experts.layers", list(spans), f"{origin} {written(given, FREQ)}")
