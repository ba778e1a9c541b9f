"""Refuses runs whose head cannot run in pieces, where a plan asks for it: settings that make something else of logits or of their
gradients, and heads that are not Megatron's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from megatron_lynx.apply.limits import in_config
from megatron_lynx.apply.live_run import LiveRun, name_of
from megatron_lynx.errors import Problem
from megatron_lynx.limits import refused
from megatron_lynx.plan.plan import Plan

WHOLE = "plan without a head in pieces (head)"

LOSSES = ("native", "te")
"""Megatron's fused losses, each of which treats a row by itself."""

MODEL = "megatron.core.models.gpt.gpt_model.GPTModel"
PROJECTION = "megatron.core.tensor_parallel.layers.ColumnParallelLinear"
OVERRIDDEN = {
    "forward": MODEL,
    "_postprocess": MODEL,
    "_scale_logits": "megatron.core.models.common.language_module.language_module.LanguageModule",
    "compute_language_model_loss": "megatron.core.models.common.language_module.language_module.LanguageModule",
}
"""Methods that a subclass must have left as they are, and whose they are. Releases before 0.17 scale no logits."""


def refused_head(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """Every reason why the head cannot run in pieces here; none where the plan leaves it whole."""
    if plan.head is None:
        return
    yield from refused(run.config, ["head"], in_config)
    impl = getattr(run.config, "cross_entropy_fusion_impl", "native")
    if run.config.cross_entropy_loss_fusion and impl not in LOSSES:
        yield Problem("config.cross_entropy_fusion_impl", str(impl), " or ".join(LOSSES), f"launch with one of these, or {WHOLE}")
    if (chunk := head_chunk(run)) is not None:
        yield from _another_model(chunk)
        yield from _another_projection(chunk)


def readers_of_logits(projection: Module) -> list[str]:
    """Hooks that are shown all logits, such as those of a second loss of them, by name."""
    return [getattr(hook, "__qualname__", name_of(hook)) for hook in projection._forward_hooks.values()]


def head_chunk(run: LiveRun) -> Any:
    """The chunk of this rank that has the model's head; None where another stage has it."""
    return run.chunks[-1] if getattr(run.chunks[-1], "post_process", False) else None


def _another_model(chunk: Module) -> Iterator[Problem]:
    for method, owner in OVERRIDDEN.items():
        defined = next((base for base in type(chunk).__mro__ if method in vars(base)), None)
        found = None if defined is None else f"{defined.__module__}.{defined.__qualname__}"
        if own := vars(chunk).get(method):
            found = getattr(own, "__qualname__", name_of(own))
        if found not in (None, owner):
            yield Problem(f"model.{method}", f"{found}'s", f"{owner}'s with a head in pieces", f"train Megatron's, or {WHOLE}")


def _another_projection(chunk: Any) -> Iterator[Problem]:
    projection = chunk.output_layer
    if (found := name_of(projection)) != PROJECTION:
        yield Problem("output_layer", found, f"{PROJECTION} with a head in pieces", WHOLE)
        return
    for reader in readers_of_logits(projection):
        drop = "drop what reads logits, such as --logits-load-dir, --logits-save-dir or --save-activations-interval"
        yield Problem("output_layer.forward_hooks", reader, "none with a head in pieces", f"{drop}; or {WHOLE}")
    weight = chunk.shared_embedding_or_output_weight() if chunk.share_embeddings_and_output_weights else projection.weight
    needed = {
        "bias": (projection.bias is not None, False),
        "gather_output": (projection.gather_output, False),
        "explicit_expert_comm": (projection.explicit_expert_comm, False),
        "weight.requires_grad": (weight.requires_grad, True),
    }
    for name, (found, wanted) in needed.items():
        if found != wanted:
            yield Problem(f"output_layer.{name}", str(found), f"{wanted} with a head in pieces", WHOLE)
