"""The two halves of a layer, the rows of a rank's experts, and the logged loss of an indexer.

Replaces              `_forward_attention` and `_forward_mlp` on each layer *instance* of the stage, except opaque halves. With
                      overlapped exchanges of experts, `routed_experts_compute` of their mixtures instead of the latter. With
                      experts also `forward` on each layer's `mlp.experts`, whatever their kind. With sparse attention
                      `DSAIndexerLossLoggingHelper.save_loss_to_tracker`.
Why                   a frame records one half, and a window recomputes it. Subclasses override these methods, so never on the
                      class. A run reports its load of experts, by which a half may fall back. A recomputed indexer would log
                      its loss twice.
Calls the original    once per call, with the arguments as they came; again, without this hook, in every recomputation.
Holds                 the policy of the half, the plan's capacity in tokens, a rank's rows under balanced routing; nothing per
                      call. One attention half of a rank reports lengths to `Engine.met`.
Passes through when   gradients are off (evaluation, forward_only). A call with more tokens than the plan's capacity keeps all
                      activations, with one warning. Only shapes of experts' rows are read, so that nothing waits for the device.
                      An indexer's loss is not logged in a recomputation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_lynx.apply.hook import Claim, instead
from megatron_lynx.apply.live_run import LiveRun, module_at, owner_of
from megatron_lynx.errors import HookRefused, Problem
from megatron_lynx.kinds.experts.section import MIXTURE
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import HalfPolicy

log = logging.getLogger(__name__)


class Capacity:
    """A plan's largest micro-batch in tokens on one rank; shared by all halves. `shards`: ranks among which a sequence is cut."""

    def __init__(self, tokens: int, shards: int) -> None:
        self.tokens, self.shards = tokens, shards
        self._said = False

    def holds(self, tokens: int) -> bool:
        if tokens > self.tokens and not self._said:
            self._said = True
            log.warning(
                "a micro-batch has %d tokens on this rank, and the plan holds for at most %d: such micro-batches keep all "
                "activations, which is right and takes more memory; make a plan for as many tokens",
                *(tokens, self.tokens),
            )
        return tokens <= self.tokens


def claim(engine: Engine, layer: Module, policy: HalfPolicy, capacity: Capacity, *, tells: bool) -> Claim:
    """`tells`: whether this half reports lengths."""

    def run_half(original: Any, *args: Any, **kwargs: Any) -> Any:
        of_call = policy
        if tells and engine.met is not None and torch.is_grad_enabled():
            engine.met.add(*_lengths(args, kwargs, capacity.shards))
        if policy.may_recompute and torch.is_grad_enabled():
            _check_call(policy, kwargs)
            if not policy.section.owner and not capacity.holds(prod(_sizes(args, kwargs))):
                of_call = policy.keeping
        return engine.half(of_call, original, args, kwargs)

    owner = owner_of(layer, policy.section.half, policy.section.owner)
    return Claim(owner, policy.section.method, instead(run_half), "runs one half of a layer", f"layer {policy.layer}")


def _sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    s, b, _ = (args[0] if args else kwargs["hidden_states"]).shape
    return s, b


def _lengths(args: tuple[Any, ...], kwargs: Mapping[str, Any], shards: int) -> tuple[int, int | Tensor]:
    """Rows of a micro-batch, and the sum of its squared lengths: on the device if sequences are packed, so that the host does not
    wait."""
    s, b = _sizes(args, kwargs)
    ends = getattr(kwargs.get("packed_seq_params"), "cu_seqlens_q", None)
    return s * b, b * (shards * s) ** 2 if ends is None else ends.detach().diff().to(torch.float64).square().sum()


def _check_call(policy: HalfPolicy, kwargs: Mapping[str, Any]) -> None:
    for name in ("inference_context", "inference_params"):
        if kwargs.get(name) is not None:
            problem = Problem(f"layer {policy.layer}", name, "none", "train without it, or keep the layer's items in the plan")
            raise HookRefused("this call of a layer cannot be recomputed", [problem])


def load_claims(engine: Engine, plan: Plan, run: LiveRun, layers: Mapping[int, Module]) -> Iterator[Claim]:
    from megatron.core.parallel_state import get_expert_tensor_parallel_world_size

    tokens = plan.model.seq // run.shards_of(plan.parallel.sequence_parallel) * plan.batch.micro
    balanced = tokens * run.config.moe_router_topk * int(get_expert_tensor_parallel_world_size())

    def counting(original: Any, permuted_local_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            engine.experts_got(permuted_local_hidden_states.shape[0], balanced)
        return original(permuted_local_hidden_states, *args, **kwargs)

    for number, layer in layers.items():
        experts = module_at(layer, f"{MIXTURE}.experts")
        yield Claim(experts, "forward", instead(counting), "counts the rows of experts", f"layer {number}.{MIXTURE}.experts")


def indexer_claim(engine: Engine) -> Claim:
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    def once(original: Any, *args: Any, **kwargs: Any) -> None:
        if engine.scope is None or not engine.scope.recomputes:
            original(*args, **kwargs)

    return Claim(DSAIndexerLossLoggingHelper, "save_loss_to_tracker", instead(once), "logs an indexer's loss")
