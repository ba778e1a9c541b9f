"""Section of the MLP half of a layer with experts.

    pre_mlp_layernorm ─┬> shared_fc1 ─> shared_activation ─> shared_fc2 ──────────────────────────────────────────────────┐
                       └> router ─> dispatch ══> experts_fc1 ─> experts_activation ─> experts_fc2 ─> combine ══> (+) ─> mlp_bda

    ══>  tokens are exchanged between ranks

`experts_fc1`, `experts_activation` and `experts_fc2` stand for all experts of a rank; run one by one, each expert has its own
call, the same number in every micro-batch.

Its windows are token exchanges under expert parallelism; tensor-parallel collectives inside are none.

    alltoall    fwd.0  tokens to their experts   fwd.1  their probabilities           fwd.2  rows back
                bwd.0  gradients of fwd.2        bwd.1, bwd.2  gradients of fwd.1 and fwd.0
    deepep      fwd.0  tokens and probabilities  fwd.1  rows back                     bwd.0, bwd.1  their gradients
    hybridep    none: its kernels run on the compute stream (flex with either backend)
    allgather   none: its gathers and reductions are synchronous

With overlapped exchanges (`--overlap-moe-expert-parallel-comm`) Megatron does not call the half's method: it interleaves four
nodes with those of another micro-batch. Plans recompute in one method of them, and nothing waits for an exchange:

    norm, shared experts, router │ dispatch │ routed_experts_compute: rows sorted, experts, rows sorted back │ combine, residual
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

from megatron_lynx.kinds.dense.section import MLP
from megatron_lynx.kinds.section import Exchange, Item, Pass, Role, Section

MIXTURE = "mlp"

_SHARED = (
    Item("shared_fc1", "column_parallel", path=f"{MIXTURE}.shared_experts.linear_fc1"),
    Item("shared_activation", "code"),
    Item("shared_fc2", "row_parallel", path=f"{MIXTURE}.shared_experts.linear_fc2"),
)
_ROUTED = (
    Item("router", "router", path=f"{MIXTURE}.router"),
    Item(
        "dispatch",
        "dispatch",
        path=f"{MIXTURE}.token_dispatcher",
        methods=("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    ),
    Item("experts_fc1", "experts_in", path=f"{MIXTURE}.experts.*.linear_fc1"),
    Item("experts_activation", "code"),
    Item("experts_fc2", "experts_out", path=f"{MIXTURE}.experts.*.linear_fc2"),
    Item(
        "combine",
        "combine",
        path=f"{MIXTURE}.token_dispatcher",
        methods=("combine_preprocess", "token_combine", "combine_postprocess"),
    ),
)


Dispatcher = Literal["alltoall", "deepep", "hybridep", "allgather"]
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
FUSED: tuple[Dispatcher, ...] = ("deepep", "hybridep")

_TO_EXPERTS = (Exchange("tokens", "dispatch"), Exchange("probabilities", "dispatch"))
_BACK = (Exchange("tokens", "combine"),)
EXCHANGES: Mapping[Dispatcher, Mapping[Pass, tuple[Exchange, ...]]] = {
    "alltoall": {"fwd": _TO_EXPERTS + _BACK, "bwd": _BACK + _TO_EXPERTS[::-1]},
    "deepep": {"fwd": _TO_EXPERTS[:1] + _BACK, "bwd": _BACK + _TO_EXPERTS[:1]},
    "hybridep": {"fwd": (), "bwd": ()},
    "allgather": {"fwd": (), "bwd": ()},
}


def _section(inside: tuple[Item, ...], dispatcher: Dispatcher) -> Section:
    norm, residual = Item(MLP.norm, "norm", path=MLP.norm), Item(MLP.residual, "residual")
    return Section(
        name="experts",
        half=MLP.half,
        method=MLP.method,
        items=(norm, *inside, residual),
        exchanges_of=EXCHANGES[dispatcher],
        fuses_norm=False,
        in_some_layers=True,
    )


def _in_nodes(section: Section) -> Section:
    apart = tuple(item.name for item in section.items if item not in _ROUTED or item.role == "router")
    exchanges = EXCHANGES["hybridep"]  # tokens are exchanged in other nodes
    return replace(section, exchanges_of=exchanges, method="routed_experts_compute", owner=MIXTURE, apart=apart)


MIXTURES: Mapping[tuple[Dispatcher, bool], Section] = {
    (dispatcher, shared): _section(_SHARED + _ROUTED if shared else _ROUTED, dispatcher)
    for dispatcher, shared in product(DISPATCHERS, (False, True))
}
IN_NODES: Mapping[tuple[Dispatcher, bool], Section] = {key: _in_nodes(section) for key, section in MIXTURES.items()}
EXPERTS, EXPERTS_WITH_SHARED = MIXTURES["alltoall", False], MIXTURES["alltoall", True]
SHARED_EXPERTS = tuple(item.name for item in _SHARED)

SHARED_FC1, SHARED_ACTIVATION, SHARED_FC2 = SHARED_EXPERTS
BESIDE: Mapping[Role, tuple[str, ...]] = {"dispatch": (SHARED_FC1, SHARED_ACTIVATION), "combine": (SHARED_FC2,)}
"""Shared items that overlap each exchange, in either pass, on their own stream (`--moe-shared-expert-overlap`):
`MoEAlltoAllTokenDispatcher`, and from 0.18 on `MoEFlexTokenDispatcher`."""
SHARED_LINEARS = (SHARED_FC1, SHARED_FC2)
ROUTER, DISPATCH, EXPERTS_FC1, EXPERTS_ACTIVATION, EXPERTS_FC2, COMBINE = EXPERTS.names[1:7]
