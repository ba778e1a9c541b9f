"""Refuses runs in FP8 or FP4 that hooks cannot work with: recipes that no plan was run with, flags that change what is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from megatron_lynx.apply.live_run import LiveRun, recipe_of
from megatron_lynx.errors import Problem
from megatron_lynx.fp8_recipes import STORED, Recipe, lacking

OFF = {
    "fp8_dot_product_attention": "--fp8-dot-product-attention: the attention's scales are not put back",
    "fp8_multi_head_attention": "--fp8-multi-head-attention: outputs of linears in FP8 are not held",
    "fp8_quantizer_factory": "--fp8-quantizer-factory: its quantizers are not known",
    "fp4_quantizer_factory": "--fp4-quantizer-factory: its quantizers are not known",
    "fp4_param": "--fp4-param-gather: weights that are held in FP4 were not run under a plan",
}
UNSET = {
    "NVTE_BACKWARD_OVERRIDE": "",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "0",
}
"""Variables that decide what nodes save, and the value with which they say nothing."""


def refused_in_fp8(run: LiveRun) -> Iterator[Problem]:
    recipe = recipe_of(run.config)
    if recipe is None:
        return
    bits = "fp8" if run.config.fp8 else "fp4"
    if not run.uses_te and run.layers:
        found = str(getattr(run.config, bits))
        yield Problem(f"config.{bits}", found, "off: these layers are Megatron's own", f"drop --{bits}-format")
        return
    known = next((each for each in STORED if each == recipe), None)
    if known is None:
        todo = f"drop --{bits}-recipe, or train without a plan"
        yield Problem(f"config.{bits}_recipe", recipe, f"{' or '.join(STORED)} under a plan", todo)
    elif not _installed(known):
        yield lacking(known, f"config.{bits}_recipe")
    if bits == "fp4" and run.userbuffers:
        yield Problem("config.tp_comm_overlap", "True", "off with --fp4-format", "drop --tp-comm-overlap: such linears have none")
    yield from _flags(run.config)


def _installed(known: Recipe) -> bool:
    from transformer_engine.common import recipe

    return hasattr(recipe, STORED[known].made_by)


def _flags(config: Any) -> Iterator[Problem]:
    for name, drop in OFF.items():
        if value := getattr(config, name, None):
            yield Problem(f"config.{name}", str(value), "off under a plan", f"drop {drop}")
    if not config.fp8_wgrad:
        yield Problem("config.fp8_wgrad", "False", "True under a plan", "drop --no-fp8-wgrad: what its nodes save is not known")
    for name, nothing in UNSET.items():
        if (found := os.environ.get(name, nothing)) != nothing:
            yield Problem(name, found, "unset under a plan", "unset it: what nodes save then is not known")
