"""The stock Megatron that a plan is compared with: without recomputation, or with full recomputation.

    fitting (default)   without recomputation, where every rank has room for it; else with full recomputation
    none, full          as asked for

Both give the same bits. Whether there is room is measured, in a pass under the plan before the first check: what that pass
needed, and what it let go of or sent to the host, times the passes in flight. Of what is let go, tensors that several operations
save count several times, so near the edge the answer is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Module

from megatron_lynx.units import format_bytes

ReferenceSetting = Literal["none", "full"]

IN_WORDS = {"none": "stock without recomputation", "full": "stock with full recomputation"}

USABLE = 0.95
"""Share of the free memory that is counted on: the allocator's blocks do not always fit, so not all of it can be used."""


@contextmanager
def stock(setting: ReferenceSetting, chunks: Sequence[Module]) -> Iterator[None]:
    """Megatron's own settings are in force inside: its layers read them at each call. Its timers do not count what runs here."""
    settings: dict[str, Any] = {"timers": None}
    if setting == "full":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "distribute_saved_activations": False,
        }
    configs = {id(module.config): module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")}
    before = [
        (config, {name: getattr(config, name) for name in settings if hasattr(config, name)}) for config in configs.values()
    ]
    try:
        for config, present in before:
            for name in present:
                setattr(config, name, settings[name])
        yield
    finally:
        for config, present in before:
            for name, value in present.items():
                setattr(config, name, value)


def room_bytes(device: torch.device) -> int | None:
    """Memory that is not in use of the device that a model is on; None for a CPU, where nobody counts it."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@dataclass(frozen=True)
class Need:
    """Device memory of a pass on one rank, beside what is there before and after it."""

    planned_bytes: int
    let_go_bytes: int
    """What the plan does not hold, of all passes that are in flight at the fullest."""

    @property
    def of_none_bytes(self) -> int:
        return self.planned_bytes + self.let_go_bytes

    def lacking(self, room: int) -> str | None:
        """How much is missing, in words and with both numbers; None where it fits."""
        if self.of_none_bytes <= USABLE * room:
            return None
        return f"may need {format_bytes(self.of_none_bytes)} and has {format_bytes(USABLE * room)} to give"
