"""On the ranks of a test: models with low-rank adapters around their linears, of the structure of Megatron-Bridge's
`LoRALinear` and `ParallelLinearAdapter`; all other parameters are frozen.

    input ──> [norm ─>] frozen linear ───────────────────────────────> + ──> output
                  └──> dropout ─> linear_in ─> linear_out ─> scale ────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import Outcome, Trial, compare_with_stock

ALPHA = 2.0


def adapted(linear: Any, rank: int, dropout: float) -> torch.nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    config, tensor = linear.config, linear.config.tensor_model_parallel_size
    te = hasattr(linear, "parallel_mode")
    row = linear.parallel_mode == "row" if te else isinstance(linear, RowParallelLinear)
    taken = linear.in_features * (tensor if row else 1) if te else linear.input_size
    made = linear.out_features * (1 if row else tensor) if te else linear.output_size
    sequence_parallel = config.sequence_parallel
    gathers = sequence_parallel and not hasattr(linear, "layer_norm_weight")
    if hasattr(linear, "layer_norm_weight"):
        linear.return_layernorm_output = True
        linear.return_layernorm_output_gathered = sequence_parallel

    class Adapter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config.sequence_parallel = False
            options: dict[str, Any] = {"config": config, "bias": False, "init_method": config.init_method}
            if row:
                self.linear_in = RowParallelLinear(taken, rank, input_is_parallel=True, skip_bias_add=True, **options)
            else:
                self.linear_in = ColumnParallelLinear(
                    taken, rank, gather_output=True, disable_grad_reduce=sequence_parallel, **options
                )
            self.linear_out = ColumnParallelLinear(rank, made, gather_output=row, **options)
            config.sequence_parallel = sequence_parallel
            self.dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.dropout(x)
            if gathers and not row:
                x = gather_from_sequence_parallel_region(x)
            x = self.linear_out(self.linear_in(x)[0])[0]
            if sequence_parallel and row:
                x = scatter_to_sequence_parallel_region(x)
            return x * (ALPHA / rank)

    class LoRALinear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_wrap, self.adapter = linear, Adapter()

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
            outputs, bias = self.to_wrap(x, *args, **kwargs)
            normed = x
            if isinstance(outputs, tuple):
                outputs, normed = outputs
            return outputs + self.adapter(normed.contiguous()).reshape(outputs.shape), bias

    LoRALinear.__module__, LoRALinear.__qualname__ = "megatron.bridge.peft.lora_layers", "LoRALinear"
    return LoRALinear()


@contextmanager
def adapters(job: Job) -> Iterator[None]:
    """The testbed's models have those of the job."""
    from megatron_lynx.testbed import tiny_models

    given, usual = job.model.adapters, tiny_models.GPTModel
    assert given is not None

    def built(*args: Any, **kwargs: Any) -> Any:
        model = usual(*args, **kwargs)
        for parameter in model.parameters():
            parameter.requires_grad = False
        for module in list(model.decoder.modules()):
            for name, child in list(module.named_children()):
                if name in given.targets:
                    setattr(module, name, adapted(child, given.rank, given.dropout))
        return model

    with patch.object(tiny_models, "GPTModel", built):
        yield


def compare(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    """As `trials.compare_with_stock`, with the job's adapters."""
    with adapters(job):
        return compare_with_stock(rank, job, plans, trial)


def parameters_of(job: Job) -> tuple[int, int]:
    """Numbers of this rank's parameters that are trained, and of the others."""
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    with adapters(job):
        parameters = [parameter for chunk in build_model(job) for parameter in chunk.parameters()]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return trained, sum(parameter.numel() for parameter in parameters) - trained


def refused(rank: int, job: Job, plan: Plan, name: str = "LoRALinear") -> str:
    """Why this plan is refused by a run of the job, whose adapters are of a class with this name."""
    from megatron_lynx.apply.installation import install
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    with adapters(job):
        chunks = build_model(job)
    for module in (module for chunk in chunks for module in chunk.modules() if type(module).__name__ == "LoRALinear"):
        type(module).__qualname__ = name
    with pytest.raises(LynxError) as caught:
        install(chunks, plan)
    return str(caught.value)
