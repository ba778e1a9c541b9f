"""What a run may not use while it trains without flushes: refused before training, all of it at once.

Either it cannot work (a second model chunk, memory that weights share with something else), or nobody has proven that it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_lynx.apply.hook import MARK
from megatron_lynx.double_buffered import releases
from megatron_lynx.errors import ConfigError, HookRefused, Problem
from megatron_lynx.schedule import double_buffered

OPTIMIZERS = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, torch.optim.Optimizer)
"""Whose hold on the weights' memory is known (`double_buffered.owners`)."""

UNPROVEN: dict[str, tuple[object, str]] = {
    "overlap_p2p_comm": (False, "it belongs to interleaved schedules"),
    "variable_seq_lengths": (False, "stages would exchange shapes first"),
    "num_microbatches_with_partial_activation_checkpoints": (None, "the micro-batches of two batches are in flight together"),
    "defer_embedding_wgrad_compute": (False, "gradients of two batches would share its buffer"),
    "delay_wgrad_compute": (False, "gradients of two batches would share its buffer"),
    "overlap_moe_expert_parallel_comm": (False, "it has a schedule of its own"),
    "hybrid_context_parallel": (False, "it has a schedule of its own"),
    "num_moe_experts": (None, "routers keep state from batch to batch"),
    "mtp_num_layers": (None, "it was not tried"),
    "calculate_per_token_loss": (False, "it was not tried"),
    "fine_grained_activation_offloading": (False, "it is reset at the end of each batch"),
    "cpu_offloading": (False, "it may hold weights"),
    "fp8": (None, "weights have copies of their own"),
    "fp4": (None, "weights have copies of their own"),
    "cuda_graph_impl": ("none", "graphs hold on to addresses of weights"),
    "enable_cuda_graph": (False, "graphs hold on to addresses of weights"),
    "external_cuda_graph": (False, "graphs hold on to addresses of weights"),
    "qk_clip": (False, "it rescales weights behind the update, by what forwards of two versions saw"),
    "log_max_attention_logit": (False, "it would mix micro-batches of two batches"),
    "gtp_weight_remat_size": (1, "weights are gathered by collectives of their own"),
}
"""Fields of Megatron's model configuration: what they must be, and why."""

UNPROVEN_WITH_DDP: dict[str, tuple[object, str]] = {
    "overlap_param_gather": (False, "weights would arrive during the forward of another version"),
    "num_distributed_optimizer_instances": (1, "it was not tried"),
    "use_megatron_fsdp": (False, "it moves weights itself"),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, "weights and gradients would share memory"),
    "nccl_ub": (False, "its weights live in memory registered with NCCL"),
    "fp8_param_gather": (False, "weights have copies of their own"),
    "fp4_param_gather": (False, "weights have copies of their own"),
    "param_name_patterns_for_fp32_local_accumulation": (None, "it was not tried"),
}
UNPROVEN_WITH_DEFERRAL: dict[str, tuple[object, str]] = {
    "reduce_scatter_with_fp32_accumulation": (False, "it may be waited for only once; or do not defer updates"),
}
UNPROVEN_WITH_OPTIMIZER: dict[str, tuple[object, str]] = {
    "overlap_param_gather_with_optimizer_step": (False, "weights would arrive during the forward of another version"),
    "use_precision_aware_optimizer": (False, "it was not tried"),
    "optimizer_cpu_offload": (False, "it was not tried"),
    "optimizer_cuda_graph": (False, "graphs hold on to addresses of weights"),
    "use_layer_wise_distributed_optimizer": (False, "it was not tried"),
}


def check(
    model: Sequence[torch.nn.Module], optimizer: Any, pipeline: int, microbatches: int, defer_updates: bool = False
) -> None:
    """Raise if this rank's run cannot be trained without flushes.

    Raises:
        ConfigError: fewer micro-batches than stages, or several model chunks (interleaving).
        HookRefused: the run uses something else that does not go together with two versions.
    """
    double_buffered.check(pipeline, microbatches)
    if len(model) != 1:
        problem = Problem("model chunks of a stage", str(len(model)), "1", "train without interleaving")
        raise ConfigError("only plain 1F1B can run without flushes", [problem])
    problems = list(_refusals(model[0], optimizer))
    if defer_updates:
        problems += _refusals_of_deferral(model[0], optimizer)
    if problems:
        raise HookRefused("this run cannot keep two versions of its weights", problems)


def _refusals(chunk: torch.nn.Module, optimizer: Any) -> Iterator[Problem]:
    yield from releases.stale()
    yield from _unproven("model config", get_model_config(chunk), UNPROVEN)
    yield from _unproven("DDP config", getattr(chunk, "ddp_config", None), UNPROVEN_WITH_DDP)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from _unproven("optimizer config", getattr(part, "config", None), UNPROVEN_WITH_OPTIMIZER)
        if not isinstance(part, OPTIMIZERS):
            names = ", ".join(known.__name__ for known in OPTIMIZERS)
            yield Problem("optimizer", type(part).__name__, f"one of {names}", "what it keeps of the weights is not known")
    for name, parameter in chunk.named_parameters():
        if type(parameter.data) is not torch.Tensor:
            yield Problem(f"parameter {name}", type(parameter.data).__name__, "a plain tensor")
    yield from _of_a_plan()


def check_no_plan() -> None:
    """Raises `HookRefused` where a plan was installed since that knows of no two versions: it would replay with the wrong one."""
    if problems := list(_of_a_plan()):
        raise HookRefused("a plan was installed into a run without flushes", problems)


def _of_a_plan() -> Iterator[Problem]:
    if getattr(schedules.forward_step, MARK, False):
        found, todo = "a plan that is installed", "install it behind the pipeline: install(model, plan, without_flushes=pipeline)"
        yield Problem("schedules.forward_step", found, "none", todo)


def _refusals_of_deferral(chunk: torch.nn.Module, optimizer: Any) -> Iterator[Problem]:
    if not hasattr(chunk, "ddp_config"):
        yield Problem("model", type(chunk).__name__, "Megatron's DistributedDataParallel", "wrap it, or do not defer updates")
    yield from _unproven("DDP config", getattr(chunk, "ddp_config", None), UNPROVEN_WITH_DEFERRAL)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(getattr(part, "grad_scaler", None), DynamicGradScaler):
            found = "dynamic, and the next batch has begun with the scale of this one"
            yield Problem("loss scale", found, "a constant one, or none", "do not defer updates")


def _unproven(where: str, config: Any, needed: dict[str, tuple[object, str]]) -> Iterator[Problem]:
    """What is set otherwise; a field that this release does not have is as it must be."""
    for name, (value, reason) in needed.items():
        found = getattr(config, name, value)
        if found != value and not (value is None and not found):
            yield Problem(f"{where}: {name}", str(found), str(value), reason)
