"""One setting of stock Megatron against activation memory.

recompute    modules recomputed in backward                       --recompute-granularity selective --recompute-modules ...
method       whole layers: `uniform`, all; `block`, the first `layers` of each chunk         --recompute-granularity full
offload      modules whose saved tensors are offloaded            --fine-grained-activation-offloading --offload-modules ...
fraction     part of these that is offloaded (0.19 and later): the first layers of each chunk
overlap      exchanges of experts overlapped with compute of another micro-batch
                                                                  --overlap-moe-expert-parallel-comm
delayed      weight gradients separate from the rest of a backward                  --delay-wgrad-compute
userbuffers  linears exchange with other tensor-parallel ranks inside their GEMMs         --tp-comm-overlap
head         micro-batches whose head weight gradients run at the end of the step (0: all)
                                                                  --defer-embedding-wgrad-compute --wgrad-deferral-limit N
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Method = Literal["uniform", "block"]

WHOLE = 1.0
OVERLAP, DELAYED, USERBUFFERS = "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "tp_comm_overlap"
DEFERRED_HEAD, DEFERRED_AT_MOST = "defer_embedding_wgrad_compute", "wgrad_deferral_limit"


@dataclass(frozen=True)
class StockSetting:
    """`recompute` and `offload` have Megatron's names, in the order of `RECOMPUTED` and `OFFLOADED`."""

    recompute: tuple[str, ...] = ()
    method: Method | None = None
    layers: int | None = None
    """With `uniform`, layers of one checkpoint; with `block`, recomputed layers of each chunk."""
    offload: tuple[str, ...] = ()
    fraction: float = WHOLE
    overlap: bool = False
    delayed: bool = False
    head: int | None = None
    """Is None if not deferred."""
    userbuffers: bool = False
    """Whether the setting enables them; false if the launch has them anyway."""

    @property
    def name(self) -> str:
        """Name in tables, without the word stock."""
        parts = [self._recomputation, self._offloading]
        parts += ["exchanges overlapped"] if self.overlap else []
        parts += ["weight gradients delayed"] if self.delayed else []
        parts += ["userbuffers"] if self.userbuffers else []
        parts += ["head's weight gradients deferred"] if self.head is not None else []
        return ", ".join(part for part in parts if part) or "none"

    @property
    def _recomputation(self) -> str:
        if self.method is not None:
            return "full" if (self.method, self.layers) == (FULL.method, FULL.layers) else f"{self.method} {self.layers}"
        return "selective" if self.recompute == SELECTIVE.recompute else " + ".join(self.recompute)

    @property
    def _offloading(self) -> str:
        share = "" if self.fraction == WHOLE else f" ({self.fraction:.2f} of the layers)"
        return f"offload {' + '.join(self.offload)}{share}" if self.offload else ""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig."""
        fields: dict[str, Any] = {}
        if self.method is not None:
            fields = {"recompute_granularity": "full", "recompute_method": self.method, "recompute_num_layers": self.layers}
        elif self.recompute:
            fields = {"recompute_granularity": "selective", "recompute_modules": list(self.recompute)}
        if self.offload:
            fields |= {"fine_grained_activation_offloading": True, "offload_modules": list(self.offload)}
        if self.fraction != WHOLE:
            fields["activation_offload_fraction"] = self.fraction
        fields |= {OVERLAP: True} if self.overlap else {}
        fields |= {DELAYED: True} if self.delayed else {}
        fields |= {USERBUFFERS: True} if self.userbuffers else {}
        fields |= {DEFERRED_HEAD: True, DEFERRED_AT_MOST: self.head} if self.head is not None else {}
        return fields

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(" ".join([flag, *values]) for flag, values in flags_of(self.fields))


Flags = tuple[tuple[str, tuple[str, ...]], ...]
"""Flags with their values."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags_of(fields: Mapping[str, Any]) -> Flags:
    """Launch flags for fields of Megatron's configuration."""
    listed = {name: [] if value is True else value if isinstance(value, list) else [value] for name, value in fields.items()}
    return tuple((flag_of(name), tuple(map(str, values))) for name, values in listed.items())


NONE = StockSetting()
SELECTIVE = StockSetting(recompute=("core_attn",))
FULL = StockSetting(method="uniform", layers=1)
OF_POLICY: Mapping[str, StockSetting] = MappingProxyType({"none": NONE, "selective": SELECTIVE, "full": FULL})
"""Policies of a job that are stock settings."""


def block(layers: int) -> StockSetting:
    """The first `layers` layers of each chunk, recomputed whole."""
    return StockSetting(method="block", layers=layers)
