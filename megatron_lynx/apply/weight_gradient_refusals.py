"""Refuses runs whose weight gradients cannot be deferred as a plan asks, with the place, what was found and what is needed."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import Module

from megatron_lynx.apply.linears import LinearOf, deferring_linears
from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.errors import Problem
from megatron_lynx.plan.plan import Plan


def refused_deferrals(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """Every reason why weight gradients cannot be deferred here; none where the plan defers none."""
    if not any(entry.defers for entry in plan.stages):
        return
    if not run.config.gradient_accumulation_fusion:
        needed = "True: where weight gradients are deferred they are added to main_grad where it lies"
        todo = "drop --no-gradient-accumulation-fusion (local layers need APEX for it), or plan without weight_gradients"
        yield Problem("config.gradient_accumulation_fusion", "False", needed, todo)
    if getattr(run.config, "defer_embedding_wgrad_compute", False):
        todo = "drop --defer-embedding-wgrad-compute: the plan decides which weight gradients are deferred"
        yield Problem("config.defer_embedding_wgrad_compute", "True", "off where a plan defers weight gradients", todo)
    if any(list(entry.layers) != _layers_of(run, entry.chunk) for entry in plan.chunks_of(run.stage)):
        return  # the plan was made for another model, which is said elsewhere
    linears = deferring_linears(plan, run)
    yield from _ungraded(linears)
    yield from _storeless(linears, run)
    yield from _too_small(plan, run, linears)


def _layers_of(run: LiveRun, chunk: int) -> list[int]:
    if chunk >= len(run.chunks):
        return []
    return [layer.layer_number for layer in run.chunks[chunk].decoder.layers]  # type: ignore[union-attr]


def _ungraded(linears: dict[LinearOf, Module]) -> Iterator[Problem]:
    for linear, module in linears.items():
        if not hasattr(module.weight, "main_grad"):
            todo = "wrap the model in Megatron's DistributedDataParallel before the plan is installed"
            yield Problem(f"{linear.place}.weight", "no main_grad", "main_grad, to which weight gradients are added", todo)
            return  # one stands for all


def _storeless(linears: dict[LinearOf, Module], run: LiveRun) -> Iterator[Problem]:
    for linear, module in linears.items() if run.uses_te else ():
        if getattr(module, "wgrad_store", None) is None:
            todo = "install a Transformer Engine that has delay_wgrad_compute, or plan without weight_gradients"
            yield Problem(f"{linear.place}.wgrad_store", "none", "Transformer Engine's WeightGradStore", todo)
            return


def _too_small(plan: Plan, run: LiveRun, linears: dict[LinearOf, Module]) -> Iterator[Problem]:
    """A bound that not even one entry fits into: nothing would ever be deferred."""
    for entry in plan.chunks_of(run.stage):
        sizes = {linear: _least_bytes(plan, run, module) for linear, module in linears.items() if linear.layer in entry.layers}
        largest = max(sizes, key=lambda linear: sizes[linear], default=None)
        if largest is None or entry.weight_gradients is None or entry.weight_gradients.bytes >= sizes[largest]:
            continue
        place = f"plan: {plan.place_of(entry)}.weight_gradients.bytes"
        needed = f"at least {sizes[largest]}, what one micro-batch of {largest.item} holds"
        yield Problem(place, str(entry.weight_gradients.bytes), needed, "raise it, or plan without weight_gradients")


def _least_bytes(plan: Plan, run: LiveRun, module: Module) -> int:
    """What one entry of a linear holds at least: its input and the gradient of its output, for all tokens of a micro-batch."""
    outputs, inputs = module.weight.shape  # type: ignore[misc]
    element_bytes = 1 if run.fp8 else module.weight.element_size()  # type: ignore[operator]
    return int(plan.model.seq * plan.batch.micro * (inputs + outputs) * element_bytes)
