"""Gated attention of a run: layers whose attention has the linear of a gate."""

from __future__ import annotations

from torch.nn import Module

from megatron_lynx.anatomy import Section
from megatron_lynx.apply.kinds import Running
from megatron_lynx.apply.live_run import module_at

from .section import GATE, GATED


class HeldGatedAttention(Running):
    half, name = GATED.half, GATED.name

    def section_in(self, layer: Module) -> Section | None:
        return None if module_at(layer, GATE.path) is None else GATED
