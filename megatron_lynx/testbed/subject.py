"""One setting of a comparison on one rank: a model built for it, and its plan, which is in force only while it has its turn.

All subjects of a comparison share one set of weights and gradients, so that they differ in nothing but their setting, and
many of them need no more memory than one. No optimizer runs: every step starts from the same weights. Where the job defers weight
gradients, all settings add theirs up in place, within `fused_gradients`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_lynx.config.job import Job
from megatron_lynx.measure.memory import ActivationMeter, MemoryUse, count_step, marked
from megatron_lynx.testbed.candidates import Candidate

if TYPE_CHECKING:
    from megatron_lynx.testbed.step import ForwardStep


SEED = 7
"""Seed of a step whose gradients are compared: every setting must draw the same dropout masks."""


class Subject:
    """A model under one setting. It shares the weights of the subject `weights_of`; without one it draws its own."""

    def __init__(self, job: Job, candidate: Candidate, weights_of: Subject | None = None) -> None:
        from megatron_lynx.testbed.batches import synthetic_batches
        from megatron_lynx.testbed.fused_gradient import adds_up_in_place, fused_gradient_fields
        from megatron_lynx.testbed.gradients import unwrapped
        from megatron_lynx.testbed.tiny_models import build_model
        from megatron_lynx.testbed.training import Training

        like = None if weights_of is None else weights_of.training
        self._quietly: Callable[[], AbstractContextManager[None]] = nullcontext
        if candidate.offloads:
            forget_offloaded()
            self._quietly = without_its_table
        # Weights are drawn, or shared, once the model stands: Megatron need not draw its own.
        fields = fused_gradient_fields(job) | candidate.fields
        chunks = None if like is None else unwrapped(like.chunks)
        model = build_model(job, weights_of=chunks, perform_initialization=False, **fields)
        self.job = job
        self.candidate = candidate
        self._in_place = adds_up_in_place(job)
        self.training: Training = Training(job, model, optimizer=None, ddp=self._in_place, buffers_of=like)
        self.batches = synthetic_batches(job)

    @property
    def device(self) -> torch.device:
        return next(iter(self.training.parameters().values())).device

    @contextmanager
    def in_force(self) -> Iterator[Any]:
        """Its plan's installation while the block runs; None for stock Megatron."""
        from megatron_lynx.apply import install

        if self.candidate.plan is None:
            yield None
            return
        with install(self.training.chunks, self.candidate.plan) as installation:
            yield installation

    def step(self) -> list[torch.Tensor]:
        """Forward, backward and reductions of one step; its losses."""
        with self._quietly():
            return self.training.step(self.batches)

    def uncleared_step(self, forward_step: ForwardStep | None = None) -> None:
        """Forward and backward only; gradients are added to those that are there, so none is allocated or freed."""
        from megatron_lynx.testbed.step import run_schedule

        run_schedule(self.training.chunks, self.job, self.batches, forward_step_func=forward_step)

    def repeatable_step(self) -> dict[str, torch.Tensor]:
        """One step with the random numbers of `SEED`: copies of its losses and gradients, by name."""
        from megatron_lynx.testbed.groups import seed_random_numbers

        seed_random_numbers(SEED)
        losses = self.step()
        return {f"loss {index}": loss.detach().clone() for index, loss in enumerate(losses)} | self.training.gradients()

    def counted_step(self) -> MemoryUse:
        """What a step holds and needs; marked at the end of every forward pass. Warm up before."""
        from megatron_lynx.testbed.step import forward_step

        def step(meter: ActivationMeter) -> None:
            self.uncleared_step(marked(forward_step, meter, "forward"))

        allocated = () if self._in_place else self.training.parameters().values()
        return count_step(step, self.device, allocated)

    def traced_step(self, installation: Any) -> list[dict[str, Any]]:
        """The events of one step under a plan. All ranks start their clocks behind one barrier."""
        dist.barrier()
        installation.engine.trace.start()
        self.step()
        return [event.as_dict() for event in installation.engine.trace.stop()]


def subjects_of(job: Job, candidates: Sequence[Candidate]) -> dict[str, Subject]:
    """One model for each setting, by its name, all with the weights of the first; the groups of the job's ranks are made."""
    from megatron_lynx.testbed.groups import initialise

    initialise(job)
    first = Subject(job, candidates[0])
    return {each.name: first if each is candidates[0] else Subject(job, each, first) for each in candidates}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, and equal tensors under each."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def most_of_all_ranks(figures: Sequence[int], device: torch.device) -> list[int]:
    """The largest of each figure over all ranks."""
    most = torch.tensor(figures, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return [int(figure) for figure in most.tolist()]


@contextmanager
def without_its_table() -> Iterator[None]:
    """Nothing is printed while the block runs: that manager prints a table of what its first step offloads."""
    with redirect_stdout(io.StringIO()):
        yield


def forget_offloaded() -> None:
    """Stock Megatron's own offloading has one manager for the whole process, which learns its first step by heart, and later ones
    must be that again. Let the next step be the first one of another model."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    PipelineOffloadManager.reset_instance()
