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
