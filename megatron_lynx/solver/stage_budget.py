"""The memory that the layers of a stage may use: the device's budget less everything else on the device.

budget of the device   -   parameters, gradients, optimizer, embedding, head, logits, the rest      =  layers may hold
                           `cost.stage_memory` names each

budget.activation_mib   bounds the layers alone
budget.memory_gib       bounds the device; without one, its memory less the cluster's reserve
neither, on a GPU       the device's memory: the fastest plan that fits is wanted
neither, on the testbed no bound, because other processes share that memory: the plan with the least memory is wanted
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.config.job import Job
from megatron_lynx.cost.stage_memory import StageMemory, stage_memory
from megatron_lynx.units import MIB


def layers_budget_bytes(job: Job, stage: int) -> int | None:
    """The smallest of the bounds, which is below 0 where the rest alone is too much; None where there is no bound."""
    bounds = []
    if job.budget.activation_mib is not None:
        bounds.append(int(job.budget.activation_mib * MIB))
    if bounded_by_device(job):
        bounds.append(job.memory_budget_bytes - beside_layers(job, stage).total)
    return min(bounds, default=None)


def bounded_by_device(job: Job) -> bool:
    return job.budget.memory_gib is not None or job.cluster.device == "cuda"


def beside_layers(job: Job, stage: int) -> StageMemory:
    """Everything on a device of a stage but what its layers hold."""
    everything = stage_memory(job.model_copy(update={"policy": "none"}), stage)
    return replace(everything, activations=0, staging=0, recomputed=0)
