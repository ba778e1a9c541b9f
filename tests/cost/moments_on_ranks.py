"""What a rank really holds at every moment of a step, byte by byte. Megatron is imported inside, after the rank's stand-in.

model ── optimizer ── step 1 ── step 2
                         └ micro-batch: layers forward, head, loss, loss's backward, head's backward, layers backward, embedding
"""

from __future__ import annotations

import gc
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.moments import MOMENTS
from megatron_lynx.measure.memory import ActivationMeter, MemoryUse
from megatron_lynx.plan.plan import Plan
from tests.cost.on_ranks import forget_auxiliary_losses

Counted = dict[str, int]
"""The most that was held, by moment."""


def count(rank: int, job: Job, fields: dict[str, Any], plan: Plan | None = None) -> Counted:
    """The most that is held at every moment, without the micro-batches themselves.

    Two steps with Megatron's buffers and optimizer; `fields`: of its configuration. All but the first update are of step 2.
    Under a plan, if there is one.
    """
    from megatron.core import parallel_state

    from megatron_lynx.apply.installation import install
    from megatron_lynx.measure.memory import activation_meter, remember_blocks
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    remember_blocks()
    initialise(job)
    parallel_state.destroy_global_memory_buffer()  # a job before this one may have made it larger
    parallel_state._set_global_memory_buffer()
    if job.model.experts is not None:  # Megatron's table of losses has as many rows as the layers of whoever asked first
        forget_auxiliary_losses()
    batches = synthetic_batches(job)
    gc.collect()
    with activation_meter("cpu") as meter:
        training = Training(job, build_model(job, **fields), optimizer="megatron", ddp=True)
        gc.collect()  # modules that were built and replaced
        _watch(training, meter, in_pieces=plan is not None and plan.head is not None)
        installation = install(training.chunks, plan) if plan is not None else None
        for name in ("first", "later"):
            _step(training, meter, batches, name)
        if installation is not None:
            installation.remove()
    if job.model.experts is not None:
        forget_auxiliary_losses()
    return _by_moment(meter.use)


def count_with_rows(rank: int, job: Job, fields: dict[str, Any]) -> tuple[Counted, int]:
    """The same, and how many rows this rank's experts got in a micro-batch, in all layers together; in the one with most."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from torch.nn.modules.module import register_module_forward_pre_hook

    rows: list[int] = []

    def noted(module: Any, given: Any) -> None:
        if isinstance(module, SequentialMLP):
            rows.append(given[0].shape[0])

    with register_module_forward_pre_hook(noted):
        counted = count(rank, job, fields)
    layers = job.model.layers
    return counted, max(sum(rows[first : first + layers]) for first in range(0, len(rows), layers))


def count_adapted(rank: int, job: Job, fields: dict[str, Any]) -> Counted:
    """The same for a model with adapters."""
    from tests.transparency.adapters import adapters

    with adapters(job):
        return count(rank, job, fields)


def _step(training: Any, meter: ActivationMeter, batches: list[Any], name: str) -> None:
    from megatron_lynx.measure.memory import marked
    from megatron_lynx.testbed.training import forward_step, run_schedule

    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    meter.mark(f"{name} step")
    run_schedule(training.chunks, training.job, batches, forward_step_func=marked(forward_step, meter, "forward is over"))
    meter.mark(f"{name} update")
    training.optimizer.step()
    meter.mark("updated")


def _watch(training: Any, meter: ActivationMeter, *, in_pieces: bool) -> None:
    """Marks where moments begin, by hooks on modules and on the gradients of what they return. `in_pieces`: the head runs so."""
    from megatron.core.utils import get_model_config, unwrap_model

    for model in unwrap_model(training.chunks):
        if training.job.parallel.expert > 1:  # behind the last exchange of a forward, and before its mark
            model.decoder.final_layernorm.register_forward_pre_hook(lambda _, args: exchange_nothing())
        _watch_chunk(model, meter, in_pieces=in_pieces)
    config = get_model_config(training.chunks[0])
    finalize = config.finalize_model_grads_func

    def finalized(*args: Any, **named: Any) -> None:
        meter.mark("reduction")
        finalize(*args, **named)
        meter.mark("reduced")

    config.finalize_model_grads_func = finalized


def exchange_nothing() -> None:
    """Some of gloo's threads keep what they exchanged until they exchange something else. That is by chance, and not NCCL's."""
    import torch
    import torch.distributed as dist

    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_world_size(group) == dist.get_world_size():
            for _ in range(4):  # each of its threads gets one
                dist.all_reduce(torch.zeros(1), group=group)


def _watch_chunk(model: Any, meter: ActivationMeter, *, in_pieces: bool) -> None:
    layers, ends = model.decoder.layers, "embedding_backward" if model.pre_process else "handed on"
    layers[0].register_forward_pre_hook(
        lambda _, given, named: _layers_begin((*given, *named.values())[0], meter, ends), with_kwargs=True
    )
    layers[-1].register_forward_hook(lambda _, args, made: _before_gradient(made[0], meter, "backward"))
    layers[-2].register_forward_hook(lambda _, args, made: _before_gradient(made[0], meter, "backward of others"))
    if model.post_process:
        model.decoder.final_layernorm.register_forward_pre_hook(lambda _, args: meter.mark("forward"))
        if in_pieces:  # then nobody may be shown logits
            model.output_layer.register_forward_pre_hook(lambda _, args: meter.mark("loss"))
        else:
            model.output_layer.register_forward_hook(lambda _, args, made: _before_loss(made[0], meter))


def _layers_begin(hidden_states: Any, meter: ActivationMeter, ends: str) -> None:
    meter.mark("layers run forward")
    _before_gradient(hidden_states, meter, ends)


def _before_loss(logits: Any, meter: ActivationMeter) -> None:
    meter.mark("loss")
    _before_gradient(logits, meter, "head_backward")


def _before_gradient(tensor: Any, meter: ActivationMeter, name: str) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: meter.mark(name))


def _by_moment(use: MemoryUse) -> Counted:
    """Peaks from one mark to the next, but the level at which forward ends."""
    names = [mark.name for mark in use.marks]
    marks = use.marks[names.index("later step") :]
    found = {name: max(mark.peak_bytes for mark in marks if mark.name == name) for name in {mark.name for mark in marks}}
    ends = "forward" if "forward" in found else "forward is over"
    found["forward"] = max(mark.bytes for mark in marks if mark.name == ends)
    if "loss" in found:  # its backward is no part of a forward
        found["loss"] = max(found["loss"], found["forward is over"])
    found["first_update"] = next(mark.peak_bytes for mark in use.marks if mark.name == "first update")
    found["update"] = found.pop("later update")
    return {name: size for name, size in found.items() if name in MOMENTS}
