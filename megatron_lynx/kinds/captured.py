"""Captured CUDA graphs of parts of a layer (`--cuda-graph-impl transformer_engine`).

    --cuda-graph-modules      layer with an MLP                 layer with experts
    attn                      the attention half                the attention half
    mlp                       the MLP half                      -
    moe_router                -                                 norm, router, and shared experts
    moe_preprocess            -                                 also the sorting of rows before dispatch
    mamba                     a Mamba layer of a hybrid stack

A graph runs no Python, so a captured half is kept whole, gets no hook, and its collectives are no windows. With a captured router
one method of the half still runs in Python, from dispatch to combine (`kinds.experts.section.IN_NODES`).

`local` captures whole layers of a GPT model, or nothing: `TransformerLayer.create_mcore_cudagraph_manager` makes one manager per
layer if no module is named, or `attn` or `mlp` is (0.16 to 0.19). Only `MoETransformerLayer` of hybrid stacks has managers for
parts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

from megatron_lynx.kinds.section import Section

CapturedModule = Literal["attn", "mlp", "moe_router", "moe_preprocess", "mamba"]
CAPTURED_MODULES: tuple[CapturedModule, ...] = get_args(CapturedModule)
"""Names in Megatron's `cuda_graph_modules` (until 0.17 `cuda_graph_scope`), without `moe`, whose half contains windows."""
ROUTER: CapturedModule = "moe_router"


def in_graph(section: Section, modules: Collection[str]) -> Section:
    whole = section.name if section.name in CAPTURED_MODULES else "attn" if section.half == "attention" else "mlp"
    return _captured(section) if whole in modules and not (section.exchanges or section.opaque) else section


@cache
def _captured(section: Section) -> Section:
    return replace(section, captured=True)


BESIDE = "transformer_engine with --cuda-graph-modules (--cuda-graph-scope until 0.17): attn, mlp, moe_router, moe_preprocess"
NOTHING_LEFT = {
    "local": "it captures layers whole, if only attn or mlp is named, and nothing is left to recompute, to offload or to fill",
    "full_iteration": "forward and backward are one graph, in which nothing can be recomputed, offloaded or put into a wait",
    "whole layers": "without modules whole layers are captured, and nothing is left to recompute, to offload or to fill",
    "moe": "exchanges of experts are in its graph",
}


def captures_nothing(implementation: str, modules: Collection[str], *, hybrid: bool) -> bool:
    only_hybrid = bool(modules) and {"moe_router", "moe_preprocess", "mamba"}.issuperset(modules)
    return implementation == "none" or (implementation == "local" and only_hybrid and not hybrid)


def refused_capture(implementation: str, modules: tuple[str, ...], *, hybrid: bool) -> tuple[str, str] | None:
    """Return (capture, reason) if a plan is refused, else None. `modules`: Megatron's names."""
    if captures_nothing(implementation, modules, hybrid=hybrid):
        return None
    unknown = next((module for module in modules if module not in CAPTURED_MODULES), None)
    if "full_iteration" in (implementation, unknown):
        return f"{implementation}, full_iteration", NOTHING_LEFT["full_iteration"]
    if implementation != "transformer_engine":
        return implementation, NOTHING_LEFT["local"]
    if not modules:
        return implementation, NOTHING_LEFT["whole layers"]
    if unknown is not None:
        return f"{implementation} with {unknown}", NOTHING_LEFT.get(unknown, "what it captures is not known")
    return None
