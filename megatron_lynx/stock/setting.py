"""One setting of stock Megatron against activation memory, and the modules that it names.

recompute    modules recomputed in backward                       --recompute-granularity selective --recompute-modules ...
method       whole layers: `uniform`, all, `layers` in one checkpoint; `block`, the first `layers` of each chunk
                                                                  --recompute-granularity full
offload      modules whose saved tensors are offloaded            --fine-grained-activation-offloading --offload-modules ...
fraction     part of these that is offloaded (0.19 and later): the first layers of each chunk
overlap      exchanges of experts overlapped with compute of another micro-batch
                                                                  --overlap-moe-expert-parallel-comm
delayed      weight gradients separate from the rest of a backward                  --delay-wgrad-compute
userbuffers  linears exchange with other tensor-parallel ranks inside their GEMMs; false if the launch has them anyway
                                                                  --tp-comm-overlap
head         micro-batches whose head weight gradients run at the end of the step (0: all; None: not deferred)
                                                                  --defer-embedding-wgrad-compute --wgrad-deferral-limit N

Modules recomputed:

    checkpoint         the module keeps only its arguments; its inside is recomputed at the beginning of its backward
    output discarded   (`CheckpointWithoutOutput`) its output is freed as well, although the next module reads it in backward; it
                       is recomputed when the gradient of that module's output is ready

Modules offloaded after their forward:

    attn_norm  mlp_norm          norms that are separate modules (dense layers of Transformer Engine have none)
    qkv_linear                   its input; with Transformer Engine, which fuses the norm, also the layer's input
    core_attn                    queries, keys, values, and the kernel's saved tensors
    attn_proj                    the attention output; only together with core_attn, whose backward reads it, too
    expert_fc1  moe_act          inputs of the experts' GEMMs, and of their activation
    fused_group_mlp              both, if one kernel runs the experts

A dense layer's MLP offloads nothing. Tensors below 1 Mi elements (`min_offloaded_tensor_size`) and parameters stay. Source:
`transformer_config.py`, `transformer_layer.py`, `attention.py`, `fine_grained_activation_offload.py` and `moe/` of megatron-core
0.16.1 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lynx.anatomy import EXPERTS, EXPERTS_WITH_SHARED, HALVES, SHARED_EXPERTS, Half, Role, Section
from megatron_lynx.kinds.experts.section import EXPERTS_ACTIVATION, EXPERTS_FC1
from megatron_lynx.kinds.mamba.section import DELTA_NET, GATED_NORM

Fact = Literal["experts", "grouped_gemm", "shared_experts", "shared_overlap", "latent", "gated_delta", "op_fuser"]


@dataclass(frozen=True)
class Module:
    halves: tuple[Half, ...] = ()
    """Halves in which it selects the items with one of `roles`."""
    roles: tuple[Role, ...] = ()
    discards_output: bool = False
    named: tuple[str, ...] = ()
    """Selected items in halves that only some layers have: experts and gated delta nets."""
    needs: Fact | None = None
    """Megatron refuses the module without it."""
    since: str = "0.15"

    def items(self, section: Section) -> frozenset[str]:
        """Items of a section that it recomputes, or whose saved tensors it offloads. A module of latent attention does not change
        other attention."""
        if section.in_some_layers:
            return frozenset(section.names).intersection(self.named)
        if section.half not in self.halves or (self.needs == "latent" and section.column_parallel):
            return frozenset()
        return frozenset(item.name for item in section.items if item.role in self.roles)


UP_PROJECTIONS: tuple[Role, ...] = ("up_projection", "query_projection", "code")
RECOMPUTED: Mapping[str, Module] = {
    "core_attn": Module(("attention",), ("core", "sparse_core")),
    "layernorm": Module(HALVES, ("norm",), discards_output=True, named=(EXPERTS.norm, DELTA_NET.norm)),
    "mlp": Module(("mlp",), ("column_parallel", "code", "row_parallel")),
    "moe": Module(named=EXPERTS_WITH_SHARED.names[1:-1]),
    "moe_act": Module(discards_output=True, named=(EXPERTS_ACTIVATION,), needs="grouped_gemm"),
    "shared_experts": Module(named=SHARED_EXPERTS),
    "mla_up_proj": Module(("attention",), UP_PROJECTIONS, discards_output=True, needs="latent"),
    "gdn_norm_out": Module(discards_output=True, named=(GATED_NORM,), needs="gated_delta", since="0.19"),
}
OFFLOADED: Mapping[str, Module] = {
    "attn_norm": Module(("attention",), ("norm",), since="0.16"),
    "qkv_linear": Module(("attention",), ("column_parallel",), since="0.16"),
    "core_attn": Module(("attention",), ("core",), since="0.16"),
    "attn_proj": Module(("attention",), ("row_parallel",), since="0.16"),
    "mlp_norm": Module(("mlp",), ("norm",), named=(EXPERTS.norm,), since="0.16"),
    "expert_fc1": Module(named=(EXPERTS_FC1,), since="0.16"),
    "moe_act": Module(named=(EXPERTS_ACTIVATION,), since="0.16"),
    "fused_group_mlp": Module(needs="op_fuser", since="0.19"),
}

LEAST_ELEMENTS = 1024 * 1024
"""Megatron's default of `min_offloaded_tensor_size`."""


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
    offload: tuple[str, ...] = ()
    fraction: float = WHOLE
    overlap: bool = False
    delayed: bool = False
    head: int | None = None
    userbuffers: bool = False

    @property
    def name(self) -> str:
        """Name in tables, without the word stock."""
        modules = "selective" if self.recompute == SELECTIVE.recompute else " + ".join(self.recompute)
        layers = "full" if (self.method, self.layers) == (FULL.method, FULL.layers) else f"{self.method} {self.layers}"
        share = "" if self.fraction == WHOLE else f" ({self.fraction:.2f} of the layers)"
        parts = (
            modules if self.method is None else layers,
            f"offload {' + '.join(self.offload)}{share}" if self.offload else "",
            "exchanges overlapped" if self.overlap else "",
            "weight gradients delayed" if self.delayed else "",
            "userbuffers" if self.userbuffers else "",
            "" if self.head is None else "head's weight gradients deferred",
        )
        return ", ".join(filter(None, parts)) or "none"

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of Megatron's configuration that differ from its defaults."""
        granularity = "full" if self.method is not None else "selective" if self.recompute else None
        fields = {
            "recompute_granularity": granularity,
            "recompute_method": self.method,
            "recompute_num_layers": self.layers,
            "recompute_modules": [*self.recompute] or None,
            "fine_grained_activation_offloading": True if self.offload else None,
            "offload_modules": [*self.offload] or None,
            "activation_offload_fraction": None if self.fraction == WHOLE else self.fraction,
            OVERLAP: self.overlap or None,
            DELAYED: self.delayed or None,
            USERBUFFERS: self.userbuffers or None,
            DEFERRED_HEAD: None if self.head is None else True,
            DEFERRED_AT_MOST: self.head,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(" ".join([flag, *values]) for flag, values in flags_of(self.fields))


Flags = tuple[tuple[str, tuple[str, ...]], ...]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags_of(fields: Mapping[str, Any]) -> Flags:
    listed = {name: [] if value is True else value if isinstance(value, list) else [value] for name, value in fields.items()}
    return tuple((flag_of(name), tuple(map(str, values))) for name, values in listed.items())


NONE = StockSetting()
SELECTIVE = StockSetting(recompute=("core_attn",))
FULL = StockSetting(method="uniform", layers=1)
OF_POLICY: Mapping[str, StockSetting] = {"none": NONE, "selective": SELECTIVE, "full": FULL}


def block(layers: int) -> StockSetting:
    return StockSetting(method="block", layers=layers)
