"""The two halves of a layer.

Replaces              `_forward_attention` and `_forward_mlp` on each layer *instance* of the stage.
Why                   a half is what a frame records and a window replays; subclasses override these methods, so never on
                      the class.
Calls the original    once per call, with the arguments as they came; again, without this hook, in every replay.
Holds                 the policy of the half, and the shape that the plan was made for; nothing per call.
Passes through when   gradients are off (evaluation, forward_only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hybrid import owner_of
from megatron_lynx.errors import HookRefused, PlanMismatch, Problem
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.policy import HalfPolicy


def claims(engine: Engine, layer: Module, policies: Mapping[str, HalfPolicy], shape_SB: tuple[int, int]) -> Iterator[Claim]:
    """`shape_SB`: tokens of one sequence on this rank, and sequences of one micro-batch."""
    for policy in policies.values():

        def hooked(original: Any, policy: HalfPolicy = policy) -> Any:
            code = _leaving_as_it_was(owner_of(layer, policy.section.half), original) if policy.replay else original

            def run_half(*args: Any, **kwargs: Any) -> Any:
                if policy.replay and torch.is_grad_enabled():
                    _check_call(policy, args, kwargs, shape_SB)
                return engine.half(policy, code, args, kwargs)

            return run_half

        owner = owner_of(layer, policy.section.half)
        yield Claim(owner, policy.section.method, hooked, "runs one half of a layer", f"layer {policy.layer}")


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


def _check_call(policy: HalfPolicy, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape_SB: tuple[int, int]) -> None:
    """Refuse what only a call shows. The first call comes before anything was recorded, so a refusal leaves no trace."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if tuple(hidden.shape[:2]) != shape_SB:
        found = f"{hidden.shape[0]} tokens x {hidden.shape[1]} sequences per rank"
        needed = f"{shape_SB[0]} x {shape_SB[1]}: the plan's bytes and windows are of that size"
        problem = Problem(f"input of layer {policy.layer}", found, needed, "make a plan for this sequence and micro-batch size")
        raise PlanMismatch("the plan does not fit this run", [problem])
    for name in ("packed_seq_params", "inference_context", "inference_params"):
        if kwargs.get(name) is not None:
            problem = Problem(f"layer {policy.layer}", name, "none", "train without it, or keep the layer's items in the plan")
            raise HookRefused("this call of a layer cannot be replayed", [problem])
