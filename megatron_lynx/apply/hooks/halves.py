"""The two halves of a layer.

Replaces              `_forward_attention` and `_forward_mlp` on each layer *instance* of the stage; not of opaque halves. Where
                      exchanges of experts are overlapped, `routed_experts_compute` of their mixtures instead of the latter.
Why                   a half is what a frame records and a window replays; subclasses override these methods, so never on
                      the class.
Calls the original    once per call, with the arguments as they came; again, without this hook, in every replay.
Holds                 the policy of the half, and for how many tokens the plan holds; nothing per call. One attention half of a
                      rank tells what came, where somebody asks (`Engine.met`).
Passes through when   gradients are off (evaluation, forward_only). A call with more tokens than the plan holds for keeps all that
                      it saves, and this is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.live_run import owner_of
from megatron_lynx.errors import HookRefused, Problem
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.policy import HalfPolicy

log = logging.getLogger(__name__)


class Capacity:
    """For how many tokens of a micro-batch a plan holds on one rank; shared by all halves, so that it is said once.

    `shards`: ranks among which a sequence is cut."""

    def __init__(self, tokens: int, shards: int) -> None:
        self.tokens, self.shards = tokens, shards
        self._said = False

    def holds(self, tokens: int) -> bool:
        """Whether a micro-batch of so many is one that the plan holds for."""
        if tokens > self.tokens and not self._said:
            self._said = True
            log.warning(
                "a micro-batch has %d tokens on this rank, and the plan holds for at most %d: such micro-batches keep all "
                "activations, which is right and takes more memory; make a plan for as many tokens",
                *(tokens, self.tokens),
            )
        return tokens <= self.tokens


def claims(
    engine: Engine, layer: Module, policies: Mapping[str, HalfPolicy], capacity: Capacity, telling: HalfPolicy | None = None
) -> Iterator[Claim]:
    """`telling`: the half that tells what came."""
    for policy in policies.values():
        if policy.section.kept_whole:
            continue
        owner = owner_of(layer, policy.section.half, policy.section.owner)

        def hooked(original: Any, policy: HalfPolicy = policy, owner: Module = owner) -> Any:
            code = _leaving_as_it_was(owner, original) if policy.may_replay else original

            def run_half(*args: Any, **kwargs: Any) -> Any:
                of_call = policy
                if policy is telling and engine.met is not None and torch.is_grad_enabled():
                    engine.met.add(_rows(args, kwargs), _squares(args, kwargs, capacity.shards))
                if policy.may_replay and torch.is_grad_enabled():
                    _check_call(policy, kwargs)
                    if not policy.section.owner and not capacity.holds(_rows(args, kwargs)):
                        of_call = policy.keeping
                return engine.half(of_call, code, args, kwargs)

            return run_half

        yield Claim(owner, policy.section.method, hooked, "runs one half of a layer", f"layer {policy.layer}")


def _shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Of what a half is given on this rank: s, b."""
    s, b, _ = (args[0] if args else kwargs["hidden_states"]).shape
    return s, b


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    s, b = _shape(args, kwargs)
    return s * b


def _squares(args: tuple[Any, ...], kwargs: Mapping[str, Any], shards: int) -> int | Tensor:
    """The sum of the squares of a micro-batch's lengths; of packed ones on the device, for which nothing waits."""
    ends = getattr(kwargs.get("packed_seq_params"), "cu_seqlens_q", None)
    if ends is None:
        s, b = _shape(args, kwargs)
        return b * (shards * s) ** 2
    squares: Tensor = ends.detach().diff().to(torch.float64).square().sum()
    return squares


PER_CALL = "mlp_norm_manager"
"""What a layer's MLP half keeps on the layer from its norm to its end, since 0.19: it holds the half's input."""


def _leaving_as_it_was(layer: Module, code: Callable[..., Any]) -> Callable[..., Any]:
    """A replay ends before the half does, and may run inside another call of it (rule R13)."""
    if not hasattr(layer, PER_CALL):
        return code

    def run(*args: Any, **kwargs: Any) -> Any:
        before = getattr(layer, PER_CALL)
        try:
            return code(*args, **kwargs)
        finally:
            setattr(layer, PER_CALL, before)

    return run


def _check_call(policy: HalfPolicy, kwargs: Mapping[str, Any]) -> None:
    """Refuse what only a call shows. The first call comes before anything was recorded, so a refusal leaves no trace."""
    for name in ("inference_context", "inference_params"):
        if kwargs.get(name) is not None:
            problem = Problem(f"layer {policy.layer}", name, "none", "train without it, or keep the layer's items in the plan")
            raise HookRefused("this call of a layer cannot be replayed", [problem])
