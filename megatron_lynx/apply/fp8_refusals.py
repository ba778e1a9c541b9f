"""Refuses runs in FP8 that the hooks cannot work with: recipes that no plan was run with, flags that change what is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.errors import Problem
from megatron_lynx.fp8_recipes import STORED

OFF = {
    "fp8_dot_product_attention": "--fp8-dot-product-attention: the attention's scales are not put back",
    "fp8_multi_head_attention": "--fp8-multi-head-attention: outputs of linears in FP8 are not held",
    "fp8_quantizer_factory": "--fp8-quantizer-factory: its quantizers are not known",
}
OVERRIDE = "NVTE_BACKWARD_OVERRIDE"


def refused_in_fp8(run: LiveRun) -> Iterator[Problem]:
    if not getattr(run.config, "fp8", None):
        return
    if not run.uses_te and run.layers:
        yield Problem("config.fp8", str(run.config.fp8), "off: these layers are Megatron's own", "drop --fp8-format")
        return
    recipe = recipe_of(run.config)
    made_by = {str(known): storage.made_by for known, storage in STORED.items()}.get(recipe)
    if made_by is None:
        todo = "drop --fp8-recipe, or train without a plan"
        yield Problem("config.fp8_recipe", recipe, f"{' or '.join(STORED)} under a plan", todo)
    elif not _installed(made_by):
        todo = "install a Transformer Engine that has it, or drop --fp8-recipe"
        yield Problem("config.fp8_recipe", recipe, f"one that this Transformer Engine has: it has no {made_by}", todo)
    yield from _flags(run.config)


def _installed(name: str) -> bool:
    from transformer_engine.common import recipe

    return hasattr(recipe, name)


def recipe_of(config: Any) -> str:
    return str(getattr(config.fp8_recipe, "value", config.fp8_recipe))


def _flags(config: Any) -> Iterator[Problem]:
    for name, drop in OFF.items():
        if value := getattr(config, name, None):
            yield Problem(f"config.{name}", str(value), "off under a plan", f"drop {drop}")
    if not config.fp8_wgrad:
        yield Problem("config.fp8_wgrad", "False", "True under a plan", "drop --no-fp8-wgrad: what its nodes save is not known")
    if os.environ.get(OVERRIDE):
        yield Problem(OVERRIDE, os.environ[OVERRIDE], "unset under a plan", "unset it: what nodes save then is not known")
