"""The linears of a live run whose weight gradients a plan delays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from torch.nn import Module, Parameter

from megatron_lynx.anatomy import EXPERTS_LINEARS, Half, Role
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.kinds import sections_in
from megatron_lynx.apply.limits import in_config
from megatron_lynx.apply.live_run import LiveRun, layers_in, recipe_of
from megatron_lynx.apply.site import modules_named
from megatron_lynx.errors import Problem
from megatron_lynx.limits import refused
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.pending import Linear


class LinearOf(NamedTuple):
    layer: int
    half: Half
    item: str
    role: Role
    expert: int | None = None
    """Index of the rank's expert, if several run one by one."""

    @property
    def frame(self) -> FrameKey:
        return self.layer, self.half

    @property
    def linear(self) -> Linear:
        """Its key in the runtime."""
        return self.layer, self.item

    @property
    def of_experts(self) -> bool:
        """Whether it is of one of several experts, or of all."""
        return self.role in EXPERTS_LINEARS

    @property
    def place(self) -> str:
        return f"layer {self.layer}.{self.item}{'' if self.expert is None else f'[{self.expert}]'}"


def weights_of(linear: Module) -> list[Parameter]:
    """Its weight, or those of all experts of a grouped linear."""
    return [parameter for name, parameter in linear.named_parameters(recurse=False) if name.startswith("weight")]


def deferring_linears(plan: Plan, run: LiveRun) -> dict[LinearOf, Module]:
    """Those of this rank, in the order of a forward."""
    found: dict[LinearOf, Module] = {}
    for entry in plan.chunks_of(run.stage):
        for layer in entry.layers:
            names = entry.rule_for(layer).weight_gradients
            for section in sections_in(run.layers[layer]) if names else ():
                for item, expert, module in modules_named(section, run.layers[layer], names):
                    found[LinearOf(layer, section.half, item.name, item.role, expert)] = module
    return found


NATIVE = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"
"""With it Transformer Engine's operands are of another type, on GPUs only; delaying these is untested."""


def refused_deferrals(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """Every reason why weight gradients cannot be delayed here. Empty if the plan delays none."""
    if not any(entry.defers for entry in plan.stages):
        return
    yield from refused(run.config, ["weight gradients"], in_config)
    if any(list(entry.layers) != _layers_of(run, entry.chunk) for entry in plan.chunks_of(run.stage)):
        return  # the plan is for another model, which `match` reports
    linears = deferring_linears(plan, run)
    yield from _ungraded(linears)
    yield from _storeless(linears, run)
    yield from _natively_grouped(linears)
    yield from _too_small(plan, run, linears)


def _layers_of(run: LiveRun, chunk: int) -> list[int]:
    if chunk >= len(run.chunks):
        return []
    return [layer.layer_number for layer in layers_in(run.chunks[chunk])]


def _ungraded(linears: dict[LinearOf, Module]) -> Iterator[Problem]:
    for linear, module in linears.items():
        if not all(hasattr(weight, "main_grad") for weight in weights_of(module)):
            todo = "wrap the model in Megatron's DistributedDataParallel before the plan is installed"
            yield Problem(f"{linear.place}.weight", "no main_grad", "main_grad, to which weight gradients are added", todo)
            return  # the first stands for all


def _storeless(linears: dict[LinearOf, Module], run: LiveRun) -> Iterator[Problem]:
    for linear, module in linears.items() if run.uses_te else ():
        if getattr(module, "wgrad_store", None) is None:
            todo = "install a Transformer Engine that has delay_wgrad_compute, or plan without weight_gradients"
            yield Problem(f"{linear.place}.wgrad_store", "none", "Transformer Engine's WeightGradStore", todo)
            return


def _natively_grouped(linears: dict[LinearOf, Module]) -> Iterator[Problem]:
    """Grouped GEMMs whose operands are no tensors of experts, or that compute bias gradients as well."""
    grouped = {linear: module for linear, module in linears.items() if linear.of_experts and len(weights_of(module)) > 1}
    for linear, module in grouped.items():
        if getattr(module, "use_grouped_tensor", False) or os.environ.get(NATIVE, "0") != "0":
            needed = "off where weight gradients of grouped experts are deferred"
            yield Problem(linear.place, NATIVE, needed, f"unset {NATIVE}, or plan without weight_gradients of experts")
            return
        if getattr(module, "apply_bias", False):
            needed = "False where weight gradients of grouped experts are deferred"
            yield Problem(f"{linear.place}.apply_bias", "True", needed, "plan without weight_gradients of experts")
            return


def _too_small(plan: Plan, run: LiveRun, linears: dict[LinearOf, Module]) -> Iterator[Problem]:
    """Limits that are too small for a single entry: nothing would ever be delayed."""
    for entry in plan.chunks_of(run.stage):
        sizes = {linear: _least_bytes(plan, run, *each) for each in linears.items() if (linear := each[0]).layer in entry.layers}
        largest = max(sizes, key=lambda linear: sizes[linear], default=None)
        if largest is None or entry.weight_gradients is None or entry.weight_gradients.bytes >= sizes[largest]:
            continue
        place = f"plan: {plan.place_of(entry)}.weight_gradients.bytes"
        needed = f"at least {sizes[largest]}, what one micro-batch of {largest.item} holds"
        yield Problem(place, str(entry.weight_gradients.bytes), needed, "raise it, or plan without weight_gradients")


def _least_bytes(plan: Plan, run: LiveRun, linear: LinearOf, module: Module) -> int:
    """Bytes of one entry of a linear: its input and the gradient of its output, for all tokens of a micro-batch; for experts
    their
    share under balanced routing. Entries that do not fit at run time are computed at once.
    """
    weights = weights_of(module)
    outputs, inputs = weights[0].shape
    in_fp8 = 4 if recipe_of(run.config) == "nvfp4" else 8
    bits = in_fp8 if run.fp8 else 8 * weights[0].element_size()
    tokens = plan.model.seq * plan.batch.micro
    if linear.of_experts:
        rows = (
            tokens
            // run.shards_of(plan.parallel.sequence_parallel)
            * run.expert
            * (run.config.expert_tensor_parallel_size or 1)
            * run.config.moe_router_topk
        )
        tokens = rows * len(weights) // run.config.num_moe_experts
    return int(tokens * (inputs + outputs) * bits // 8)
