"""The two halves of a layer.

Replaces              `_forward_attention` and `_forward_mlp` on each layer *instance* of the stage.
Why                   a half is what a frame records and a window replays; subclasses override these methods, so never on
                      the class.
Calls the original    once per call, with the arguments as they came; again, without this hook, in every replay.
Holds                 the policy of the half; nothing per call.
Passes through when   gradients are off (evaluation, forward_only).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.site import LAYOUTS
from megatron_lynx.errors import HookRefused, Problem
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import HalfPolicy


def claims(engine: Engine, layer: Module, policies: Mapping[str, HalfPolicy]) -> Iterator[Claim]:
    for half, layout in LAYOUTS.items():
        policy = policies[half]

        def hooked(original: Any, policy: HalfPolicy = policy) -> Any:
            def run_half(*args: Any, **kwargs: Any) -> Any:
                _refuse_packed(policy, kwargs)
                return engine.half(policy, original, args, kwargs)

            return run_half

        yield Claim(layer, layout.method, hooked, "runs one half of a layer", f"layer {policy.layer}")


def _refuse_packed(policy: HalfPolicy, kwargs: Mapping[str, Any]) -> None:
    for name in ("packed_seq_params", "inference_context", "inference_params"):
        if policy.replay and kwargs.get(name) is not None:
            raise HookRefused(
                "this call of a layer cannot be replayed",
                [Problem(f"layer {policy.layer}", name, "none", "train without it, or keep the layer's items in the plan")],
            )
