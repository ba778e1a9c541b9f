"""What of a layer runs as a captured graph (`--cuda-graph-impl transformer_engine`): the modules that a launch names.

    --cuda-graph-modules      of a layer with an MLP            of one with experts
    attn                      the attention half                the attention half
    mlp                       the MLP half                      -
    moe_router                -                                 norm, router, and shared experts
    moe_preprocess            -                                 what sorts rows before they travel, too
    mamba                     a Mamba layer of a hybrid stack, which is opaque anyway

A graph's replay runs no Python: a hook in it would be passed once, while it is captured, and never again. So a captured half is
kept whole and gets no hook, and its collectives are no windows. Of a half whose router is captured one method still runs as it
did, between dispatch and combine: the same as where exchanges are overlapped (`kinds.experts.section.IN_NODES`).

No plan is beside other captures:

    transformer_engine, without modules    whole layers
    local                                  layers of a GPT model whole, or nothing of them
    full_iteration                         forward and backward of whole steps

Why `local` captures layers whole: `TransformerLayer.create_mcore_cudagraph_manager` makes one manager for a layer if no module is
named, or `attn` or `mlp` is, and that manager runs all of the layer's forward (0.16 to 0.19). Only `MoETransformerLayer`, which
hybrid stacks alone are built of, has managers for parts: `local` with `moe_router` and `moe_preprocess` captures nothing of a GPT
model (`captures_nothing`), and a plan is beside it as beside a launch without graphs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

from megatron_lynx.kinds.section import Section

CapturedModule = Literal["attn", "mlp", "moe_router", "moe_preprocess", "mamba"]
CAPTURED_MODULES: tuple[CapturedModule, ...] = get_args(CapturedModule)
"""As Megatron names them in `cuda_graph_modules` (until 0.17 `cuda_graph_scope`), but for `moe`, whose half has windows in it."""
ROUTER: CapturedModule = "moe_router"


def in_graph(section: Section, modules: Collection[str]) -> Section:
    """What fills a half, as it is where these modules are captured."""
    whole = "attn" if section.half == "attention" else "mlp"
    return _captured(section) if whole in modules and not (section.exchanges or section.opaque) else section


@cache
def _captured(section: Section) -> Section:
    return replace(section, captured=True)


BESIDE = "transformer_engine with --cuda-graph-modules (--cuda-graph-scope until 0.17): attn, mlp, moe_router, moe_preprocess"
"""What a plan can be beside."""
NOTHING_LEFT = {
    "local": "it captures layers whole, if only attn or mlp is named, and nothing is left to recompute, to offload or to fill",
    "full_iteration": "forward and backward are one graph, in which nothing can be recomputed, offloaded or put into a wait",
    "whole layers": "without modules whole layers are captured, and nothing is left to recompute, to offload or to fill",
    "moe": "exchanges of experts are in its graph",
}
"""What would be lost, by what is captured."""


OF_HYBRID_LAYERS = frozenset({"moe_router", "moe_preprocess", "mamba"})
"""What `local` captures of the layers of hybrid stacks alone."""


def captures_nothing(implementation: str, modules: Collection[str], *, hybrid: bool) -> bool:
    """Whether no layer of such a model runs as a graph. `modules`: by Megatron's names."""
    only_hybrid = bool(modules) and OF_HYBRID_LAYERS.issuperset(modules)
    return implementation == "none" or (implementation == "local" and only_hybrid and not hybrid)


def refused_capture(implementation: str, modules: tuple[str, ...], *, hybrid: bool) -> tuple[str, str] | None:
    """What no plan can be beside, and what would be lost; None where a plan can be. `modules`: by Megatron's names."""
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
