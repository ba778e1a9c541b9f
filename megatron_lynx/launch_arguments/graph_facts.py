"""What of a launch's captured graphs a plan may be beside.

--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router     ──> model.captured attn, moe_router
--external-cuda-graph --cuda-graph-scope attn                                 ──> the same, in words of older releases
--cuda-graph-impl local --cuda-graph-modules moe_router moe_preprocess        ──> nothing: a GPT model has no such graphs
--cuda-graph-impl local with others, full_iteration, or whole layers          ──> nothing: no plan is beside them
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.kinds.captured import BESIDE, CAPTURED_MODULES, captures_nothing, refused_capture
from megatron_lynx.launch_arguments.given import Fact, Given

IMPLEMENTATION, LOCAL, EXTERNAL = "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"
MODULES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
RANDOM = ("te_rng_tracker", "inference_rng_tracker")
"""Trackers of random numbers that graphs need; plans are beside each."""
GRAPHS = (IMPLEMENTATION, LOCAL, EXTERNAL)
"""What captures layers, or whole iterations."""
OF_GRAPHS = (*GRAPHS, *MODULES, "cuda_graph_warmup_steps", *RANDOM)
"""Everything that is kept where a plan is beside graphs, and left out where it is not."""

NOT_TRIED = ("mtp_num_layers", "overlap_moe_expert_parallel_comm", "tp_comm_overlap", "hybrid_layer_pattern")
WHOLE = "full"
"""How some releases say that no module is named."""


def captures(given: Given) -> bool:
    """Whether a launch captures anything."""
    return not captures_nothing(_implementation(given), _modules(given), hybrid=_is_hybrid(given))


def why_alone(given: Given) -> str:
    """Why no plan is beside a launch's graphs; empty where one may be, and where there are none."""
    if not captures(given):
        return ""
    modules = _modules(given)
    if (refused := refused_capture(_implementation(given), modules, hybrid=_is_hybrid(given))) is not None:
        found, why = refused
        return f"{found}: {why}; nearest: --cuda-graph-impl {BESIDE}"
    if {"attn", "mlp"}.issubset(modules) and not given["num_experts"]:
        return "attn and mlp: nothing is left to recompute, to offload or to fill"
    tried = ("tp_comm_overlap",) if (given["tensor_model_parallel_size"] or 1) == 1 else ()
    beside = next((name for name in NOT_TRIED if given[name] and name not in tried), None)
    return "" if beside is None else f"{given.origin(beside)}: beside it and graphs nothing was tried"


def graph_facts(given: Given, *, planning: bool) -> Iterator[Fact]:
    """Nothing where no plan is asked for, or can be beside the graphs."""
    if planning and captures(given) and not why_alone(given):
        named = _modules(given)
        yield Fact("model.captured", [each for each in CAPTURED_MODULES if each in named], given.origin(_named_by(given)))


def _implementation(given: Given) -> str:
    if given[LOCAL]:
        return "local"
    return "transformer_engine" if given[EXTERNAL] else str(given[IMPLEMENTATION] or "none")


def _is_hybrid(given: Given) -> bool:
    return given["hybrid_layer_pattern"] is not None


def _named_by(given: Given) -> str:
    return next((name for name in MODULES if given[name]), MODULES[0])


def _modules(given: Given) -> tuple[str, ...]:
    return tuple(str(each) for each in given[_named_by(given)] or () if str(each) != WHOLE)
