"""The section that fills the MLP half of a layer of experts.

    pre_mlp_layernorm ─┬> shared_fc1 ─> shared_activation ─> shared_fc2 ──────────────────────────────────────────────────┐
                       └> router ─> dispatch ══> experts_fc1 ─> experts_activation ─> experts_fc2 ─> combine ══> (+) ─> mlp_bda

    ══>  tokens move to the ranks of their experts, and back

What a router decides must not be decided again, and tokens must not travel again: `router`, `dispatch` and `combine` are always
kept. What they hand to the experts is held by the graph anyway, because the experts' first linear saves its input. Experts'
linears exchange nothing themselves. `experts_fc1`, `experts_activation` and `experts_fc2` stand for all experts of a rank: each
has a call of its own where they run one by one, and a half has as many of these calls in every micro-batch, whatever the load.
Items of shared experts exist where the model has shared experts.

Its windows are the exchanges in which tokens travel, where experts are shared out over ranks. Collectives of the tensor-parallel
group inside it are none.

    alltoall    fwd.0  tokens to their experts   fwd.1  their probabilities           fwd.2  rows back
                bwd.0  gradients of fwd.2        bwd.1, bwd.2  gradients of fwd.1 and fwd.0
    deepep      fwd.0  tokens and probabilities  fwd.1  rows back                     bwd.0, bwd.1  their gradients
    hybridep    none: its kernels run on the compute stream, which therefore waits for nothing (flex with either backend)
    allgather   none: every rank gets all tokens, and sums of all, by calls that return when they are there

Where exchanges are overlapped (`--overlap-moe-expert-parallel-comm`) Megatron never calls the half's method: it runs four nodes
in turn with those of another micro-batch, each with a backward of its own. One method of them has what a plan recomputes, and
nothing waits for an exchange:

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
"""Where Megatron's layer has its mixture of experts, as an attribute path."""

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
"""Who brings tokens to experts that are shared out over ranks: Megatron's all-to-all, its flex dispatcher with one of two
backends, or gathers of all tokens."""
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
FUSED: tuple[Dispatcher, ...] = ("deepep", "hybridep")
"""Backends of the flex dispatcher."""

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
        profiled="experts",
    )


def _in_nodes(section: Section) -> Section:
    """The same half where exchanges are overlapped."""
    apart = tuple(item.name for item in section.items if item not in _ROUTED or item.role == "router")
    exchanges = EXCHANGES["hybridep"]  # tokens travel in other nodes
    return replace(section, exchanges_of=exchanges, method="routed_experts_compute", owner=MIXTURE, apart=apart)


MIXTURES: Mapping[tuple[Dispatcher, bool], Section] = {
    (dispatcher, shared): _section(_SHARED + _ROUTED if shared else _ROUTED, dispatcher)
    for dispatcher, shared in product(DISPATCHERS, (False, True))
}
"""By dispatcher, and by whether there are shared experts."""
IN_NODES: Mapping[tuple[Dispatcher, bool], Section] = {key: _in_nodes(section) for key, section in MIXTURES.items()}
"""The same where exchanges are overlapped."""
EXPERTS, EXPERTS_WITH_SHARED = MIXTURES["alltoall", False], MIXTURES["alltoall", True]
SHARED_EXPERTS = tuple(item.name for item in _SHARED)
"""The items that exist with shared experts only."""

SHARED_FC1, SHARED_ACTIVATION, SHARED_FC2 = SHARED_EXPERTS
BESIDE: Mapping[Role, tuple[str, ...]] = {"dispatch": (SHARED_FC1, SHARED_ACTIVATION), "combine": (SHARED_FC2,)}
"""What of shared experts computes beside which exchange, in either pass, where they have a stream of their own
(`--moe-shared-expert-overlap`): `MoEAlltoAllTokenDispatcher`, and from 0.18 on `MoEFlexTokenDispatcher`."""
SHARED_LINEARS = (SHARED_FC1, SHARED_FC2)
ROUTER, DISPATCH, EXPERTS_FC1, EXPERTS_ACTIVATION, EXPERTS_FC2, COMBINE = EXPERTS.names[1:7]
"""Names for formulas that hold for one item alone: seconds, saved tensors."""
