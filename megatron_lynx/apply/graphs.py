"""What a live run captures as CUDA graphs, by its config: under these names since 0.18, as `cuda_graph_scope` until 0.17."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.errors import Problem
from megatron_lynx.kinds.captured import BESIDE, CAPTURED_MODULES, CapturedModule, refused_capture


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


def refused_graphs(config: Any) -> Iterator[Problem]:
    """The same of a live config, as a problem."""
    hybrid = bool(getattr(config, "is_hybrid_model", False))
    refused = refused_capture(_implementation(config), modules_in_config(config), hybrid=hybrid)
    if refused is not None:
        found, why = refused
        yield Problem("config.cuda_graph_impl", found, f"none under a plan, or {BESIDE}", f"drop --cuda-graph-impl: {why}")


def _implementation(config: Any) -> str:
    return str(getattr(config, "cuda_graph_impl", None) or "none")
