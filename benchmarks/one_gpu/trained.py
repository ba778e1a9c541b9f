"""A subject being trained, under one setting after the other: Megatron's DistributedDataParallel, its Adam, one set of weights.

The learning rate is 0: an update takes as long as ever and changes no weight, so that all settings train the same model.
Weight gradients are added up in place, and softmax is in the model's type, as launches have it by default. For linears that are
not Transformer Engine's (the output projection never is) a product and a sum stand in where Apex is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_model_config

from benchmarks.one_gpu.subjects import Subject
from megatron_lynx.config.job import Job
from megatron_lynx.testbed.candidates import Candidate
from megatron_lynx.testbed.fusions import NAME, stand_in_for_fused_gradient
from megatron_lynx.testbed.groups import seed_random_numbers
from megatron_lynx.testbed.training import ForwardStep, MicroBatch, forward_step, run_schedule, synthetic_batches
from tests.instruments.replacing import replace
from tests.instruments.stock_offloading import forget_offloaded, stock_offloads
from tests.instruments.tiny_models import build_model
from tests.instruments.training import Training, unwrapped

SEED = 1234


class Trained:
    """The weights, gradients and optimizer of a subject, and the chunks that are trained now."""

    def __init__(self, subject: Subject) -> None:
        self.job: Job = subject.job
        self._fields: dict[str, Any] = {
            "gradient_accumulation_fusion": True,
            "attention_softmax_in_fp32": False,
            "perform_initialization": False,
        }
        seed_random_numbers(SEED)
        self._base = Training(self.job, build_model(self.job, **self._fields), optimizer="megatron", ddp=True, learning_rate=0.0)
        self.forward_step: ForwardStep = _WithGradient(self.job) if subject.alone else forward_step
        self._now = self._base
        self.batches: list[MicroBatch] = synthetic_batches(self.job)

    @contextmanager
    def under(self, candidate: Candidate) -> Iterator[Any]:
        """The setting is in force; its plan's installation, None for stock."""
        from megatron_lynx.apply.installation import install

        with ExitStack() as undo:
            if candidate.plan is not None:
                yield undo.enter_context(install(self._base.chunks, candidate.plan))
                return
            if candidate.fields:
                self._now = self._built(candidate)
                undo.callback(setattr, self, "_now", self._base)
            if "offload_modules" in candidate.fields:
                undo.callback(forget_offloaded)
                undo.enter_context(stock_offloads())
            yield None

    def _built(self, candidate: Candidate) -> Training:
        """The same weights in chunks that are configured otherwise."""
        of_base = unwrapped(self._base.chunks)
        fields = {**self._fields, **candidate.fields}
        chunks = build_model(self.job, weights_of=of_base, **fields)
        training = Training(self.job, chunks, optimizer=None, ddp=True, buffers_of=self._base)
        get_model_config(training.chunks[0]).grad_scale_func = self._base.optimizer.scale_loss
        return training

    @property
    def device(self) -> torch.device:
        return next(iter(self._base.parameters().values())).device

    @property
    def chunks(self) -> Sequence[torch.nn.Module]:
        return self._now.chunks

    def clear(self) -> None:
        for chunk in self._base.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
            chunk.zero_grad(set_to_none=True)

    def passes(self, forward_step: ForwardStep | None = None) -> list[torch.Tensor]:
        """All forwards and backwards of a step, and the reduction of gradients (over one rank); the losses."""
        return run_schedule(self.chunks, self.job, self.batches, forward_step_func=forward_step or self.forward_step)

    def update(self) -> None:
        self._base.optimizer.step()

    def step(self) -> list[torch.Tensor]:
        self.clear()
        losses = self.passes()
        self.update()
        return losses

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Where they lie, by name; not copied."""
        for name, parameter in self._base.parameters().items():
            yield name, parameter.main_grad  # type: ignore[attr-defined]


class _WithGradient:
    """`forward_step` of a stage that is alone: its outputs get a gradient of its own, whatever lies where messages arrive."""

    def __init__(self, job: Job) -> None:
        self._gradient = torch.randn((job.model.seq, job.batch.micro, job.model.hidden), device=torch.cuda.current_device())

    def __call__(self, batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        output, loss = forward_step(batches, model)
        self._gradient = self._gradient.to(output.dtype)
        output.register_hook(lambda _: self._gradient)
        return output, loss


@contextmanager
def sums_in_place() -> Iterator[None]:
    """Weight gradients of linears that are not Transformer Engine's can be added up in place, too, with Apex or without."""
    missing = not layers._grad_accum_fusion_available
    with stand_in_for_fused_gradient(), ExitStack() as undo:
        if missing:
            replace(undo, getattr(layers, NAME), "wgrad_gemm_accum_fp32", _add_product)
        yield


def _add_product(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """In the operands' own type, which GEMMs are fast in; the product is rounded to it."""
    main_grad.add_(grad_output.t().matmul(total_input))
