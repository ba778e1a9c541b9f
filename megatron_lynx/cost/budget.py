"""The memory that the layers of a stage may use: the device's budget less everything else on the device at that moment.

budget of the device   -   states, buffers, messages, what a backward has in hand  =  layers may hold while they run backward
                       -   states, ..., the head's inputs, copies of the logits    =  layers may hold while the loss is computed
                       -   states, copies that an update makes                     =  nothing of the layers is left then; without
                                                                                  flushes all micro-batches in flight but one are
                           `cost.stage_memory` names each, `cost.moments` says when it is there

budget.activation_mib   bounds the layers alone
budget.memory_gib       bounds the device; without one, its memory less the cluster's reserve, and less what others have of it
neither, on a GPU       the device's memory: the fastest plan that fits is wanted
neither, on the testbed no bound, because other processes share that memory: the plan with the least memory is wanted

A solver is given the first of these bounds, and by how much the second one is smaller (`loss_bytes`).
"""

from __future__ import annotations

from math import ceil

from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_hand import fullest_half_bytes
from megatron_lynx.cost.moments import Parts, StageMemory
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.units import GIB, MIB


def layers_budget_bytes(job: Job, stage: int) -> int | None:
    """The smallest of the bounds on layers that run backward, below 0 where the rest alone is too much; None without a bound."""
    return _budget_bytes(job, stage, beside_layers(job, stage)) if _bounded(job) else None


def loss_bytes(job: Job, stage: int) -> int:
    """By how much less the layers may hold while the loss is computed than while they run backward."""
    if not bounded_by_device(job):
        return 0
    parts = beside_layers(job, stage)
    at_loss = max(parts.at(moment).total for moment in parts.moments if moment in ("forward", "loss", "head_backward"))
    return max(0, _budget_bytes(job, stage, parts) - (job.memory_budget_bytes - at_loss))


def if_it_runs(held_bytes: int) -> str:
    """What to state where a launch holds more than its devices are taken to have, and runs."""
    return f"If it runs, it holds less than counted, or has more: state that by --memory-gib {ceil(held_bytes / GIB)}."


def bounded_by_device(job: Job) -> bool:
    return job.budget.of_device or job.cluster.device == "cuda"


def beside_layers(job: Job, stage: int) -> Parts:
    """Everything that a device of a stage ever holds but what its layers hold."""
    return parts_beside_layers(job, stage)


def most_beside_layers(job: Job, stage: int) -> StageMemory:
    """What is held beside layers that run backward, or by an update, where that alone is too much."""
    return _most(job, beside_layers(job, stage))


def _bounded(job: Job) -> bool:
    return job.budget.activation_mib is not None or bounded_by_device(job)


def _budget_bytes(job: Job, stage: int, beside: Parts) -> int:
    """The smallest of the bounds, of which there is one. `beside`: of that stage, as below."""
    bounds = []
    if job.budget.activation_mib is not None:
        bounds.append(int(job.budget.activation_mib * MIB))
    if bounded_by_device(job):
        bounds.append(_on_device_bytes(job, stage, beside))
    return min(bounds)


def _most(job: Job, beside: Parts) -> StageMemory:
    update = max(beside.at("reduction"), beside.at("update"), key=lambda memory: memory.total)
    return update if update.total > job.memory_budget_bytes else beside.at("backward")


def _on_device_bytes(job: Job, stage: int, beside: Parts) -> int:
    """Where an update alone is too much, what is missing, below 0."""
    most = _most(job, beside)
    if most.moment != "backward":
        return job.memory_budget_bytes - most.total
    return job.memory_budget_bytes - most.total - _more_behind_backward(job, stage, beside)


def _more_behind_backward(job: Job, stage: int, beside: Parts) -> int:
    """How much more is held beside the layers when these have run backward for one micro-batch, while others are in flight: in
    the embedding's backward, and without flushes in updates.

    Less what the layers of that micro-batch no longer hold then: at least their inputs, and what one half saves.
    """
    later = {"embedding_backward"} | (set() if beside.flushed else {"reduction", "first_update", "update"})
    most = max((beside.at(moment).total for moment in beside.moments if moment in later), default=0)
    shape, least = LayerShape.of(job), min(job.chunk_layers(stage))
    held = least * shape.input_bytes + fullest_half_bytes(shape) if least else 0
    return max(0, most - beside.at("backward").total - held)
