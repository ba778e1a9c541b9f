"""Refuses live configurations: unsupported settings (`megatron_lynx.limits`), unknown FP8 recipes, and environment variables
that change which tensors nodes save.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from megatron_lynx.apply.live_run import LiveRun, recipe_of, refused_graphs
from megatron_lynx.errors import Problem
from megatron_lynx.fp8_recipes import STORED, Recipe, lacking
from megatron_lynx.limits import Limit, refused

UNSET = {
    "NVTE_BACKWARD_OVERRIDE": "",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "0",
}
"""Environment variables that change which tensors nodes save, with their defaults."""


def in_config(limit: Limit) -> str:
    return f"config.{limit.setting}"


def refused_settings(config: Any, *, te: bool) -> Iterator[Problem]:
    """Every unsupported setting. `te`: the layers are Transformer Engine's."""
    yield from refused(config, list(_circumstances(config, te=te)), in_config)
    yield from refused_graphs(config)


def _circumstances(config: Any, *, te: bool) -> Iterator[str]:
    yield "plan"
    if te:
        yield "te"
        if recipe_of(config) is not None:
            yield "fp8"
    if getattr(config, "multi_latent_attention", False):
        yield from ("latent", "planned latent")
    if getattr(config, "num_moe_experts", None):
        yield "experts"
        if config.moe_token_dispatcher_type == "flex":
            yield "flex"


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
    for name, nothing in UNSET.items():
        if (found := os.environ.get(name, nothing)) != nothing:
            yield Problem(name, found, "unset under a plan", "unset it: what nodes save then is not known")


def _installed(known: Recipe) -> bool:
    from transformer_engine.common import recipe

    return hasattr(recipe, STORED[known].made_by)
