"""What a live run captures as CUDA graphs, and which captures no plan can be beside.

    transformer_engine, with modules    what these name is captured, once for each micro-batch in flight, and the rest runs as ever
    transformer_engine, without         whole layers
    local                               layers of a GPT model whole, whatever modules are named
    full_iteration                      forward and backward of whole steps

Why `local` captures layers whole: `TransformerLayer.create_mcore_cudagraph_manager` makes one manager for a layer as soon as any of
its modules is named, and that manager runs all of the layer's forward (0.16 to 0.19). Only `MoETransformerLayer` has managers for
parts, which hybrid stacks alone are built of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.errors import Problem
from megatron_lynx.kinds.captured import CAPTURED_MODULES, CapturedModule

BESIDE = "transformer_engine with --cuda-graph-modules (--cuda-graph-scope until 0.17): attn, mlp, moe_router, moe_preprocess"
"""What a plan can be beside."""
NOTHING_LEFT = {
    "local": "it captures layers whole, whatever modules are named, and nothing is left to recompute, to offload or to fill",
    "full_iteration": "forward and backward are one graph, in which nothing can be recomputed, offloaded or put into a wait",
    "whole layers": "without modules whole layers are captured, and nothing is left to recompute, to offload or to fill",
    "moe": "exchanges of experts are in its graph",
}
"""What would be lost, by what is captured."""


def modules_in_config(config: Any) -> tuple[str, ...]:
    """The modules that a model's config names, by Megatron's names; none where nothing is captured."""
    if _implementation(config) == "none":
        return ()
    named = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()
    return tuple(getattr(each, "name", str(each)) for each in named)


def captured_modules(config: Any) -> tuple[CapturedModule, ...]:
    """Those of them that plans know, in the order in which plans have them."""
    named = modules_in_config(config) if _implementation(config) == "transformer_engine" else ()
    return tuple(module for module in CAPTURED_MODULES if module in named)


def refused_capture(implementation: str, modules: tuple[str, ...]) -> tuple[str, str] | None:
    """What no plan can be beside, and what would be lost; None where a plan can be. `modules`: by Megatron's names."""
    if implementation == "none":
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


def refused_graphs(config: Any) -> Iterator[Problem]:
    """The same of a live config, as a problem."""
    refused = refused_capture(_implementation(config), modules_in_config(config))
    if refused is not None:
        found, why = refused
        yield Problem("config.cuda_graph_impl", found, f"none under a plan, or {BESIDE}", f"drop --cuda-graph-impl: {why}")


def _implementation(config: Any) -> str:
    return str(getattr(config, "cuda_graph_impl", None) or "none")
