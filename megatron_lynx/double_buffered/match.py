"""Checks before training that a run uses nothing which does not work without flushes; refuses everything at once.

Either it cannot work (a second model chunk, memory that weights share with something else), or nobody has proven that it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_lynx.apply.hook import MARK
from megatron_lynx.double_buffered import releases
from megatron_lynx.errors import ConfigError, HookRefused, Problem
from megatron_lynx.limits import refused
from megatron_lynx.schedule import double_buffered

OPTIMIZERS = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, torch.optim.Optimizer)
"""Optimizers of which it is known which tensors share memory with the weights (`double_buffered.buffers`)."""


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
        problems += _refusals_of_deferral(model[0])
    if problems:
        raise HookRefused("this run cannot keep two versions of its weights", problems)


def _refusals(chunk: torch.nn.Module, optimizer: Any) -> Iterator[Problem]:
    yield from releases.stale()
    yield from _unproven("model", get_model_config(chunk))
    yield from _unproven("ddp", getattr(chunk, "ddp_config", None))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from _unproven("optimizer", getattr(part, "config", None))
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


def _refusals_of_deferral(chunk: torch.nn.Module) -> Iterator[Problem]:
    if not hasattr(chunk, "ddp_config"):
        yield Problem("model", type(chunk).__name__, "Megatron's DistributedDataParallel", "wrap it, or do not defer updates")
    yield from _unproven("ddp", getattr(chunk, "ddp_config", None), "deferred updates")


def _unproven(of: str, config: Any, under: str = "two versions") -> Iterator[Problem]:
    yield from refused(config, [under], lambda limit: f"{of.replace('ddp', 'DDP')} config: {limit.setting}", of=[of])
