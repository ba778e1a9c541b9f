"""What the package says of a setting before anything is run: seconds of a step's passes, bytes at each moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_lynx.config.job import Job
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.cost.update import update_s
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock import StockSetting
from megatron_lynx.stock.price import priced
from megatron_lynx.stock.stage import StockStage

IN_PASSES = ("forward", "loss", "head_backward", "backward", "embedding_backward")
"""Moments of forwards and backwards; the others are the update's."""


@dataclass(frozen=True)
class Predicted:
    """Of the first stage, where there are several."""

    passes_s: float
    """Its forwards and backwards in a step, what is waited for copies included. No pass is shorter than its host time."""
    device_s: float
    """The same if Python took no time."""
    update_s: float
    states_bytes: int
    """What is there when a step begins, buffers that an earlier step has made included."""
    moments: Mapping[str, int]
    """Everything on the device, by moment."""
    layers_bytes: int
    """What the layers hold of one micro-batch behind its forward."""
    recompute_s: float

    @property
    def peak_bytes(self) -> int:
        """The most in forwards and backwards."""
        return max(size for moment, size in self.moments.items() if moment in IN_PASSES)


def of_stock(job: Job, profile: Profile, setting: StockSetting) -> Predicted:
    memory = priced(job, profile, setting).stages[0]
    run, alone = (priced(job, costs, setting).simulation for costs in (profile, without_host(profile)))
    stage = StockStage(job, setting, 0)
    stays = sum(layer.bytes.stays for layer in stage.chunks[0])
    return _predicted(job, profile, run, alone, memory, stays)


def of_plan(job: Job, profile: Profile, plan: Plan) -> Predicted:
    run, alone = rehearse(plan, profile), rehearse(plan, without_host(profile))
    curve = run.memory(0)
    resident = sum(change for _, change in run.executed[0][0].content.memory)
    in_flight = min(job.parallel.pipeline, job.microbatches)
    kept = min(curve.peak_bytes, in_flight * resident)
    held = replace(parts_beside_layers(job, 0), activations=kept, recomputed=curve.peak_bytes - kept, chunk=resident).fullest
    return _predicted(job, profile, run, alone, held, resident)


def without_host(profile: Profile) -> Profile:
    """The same layers on a machine whose Python takes no time."""
    return profile.model_copy(update={"host_time": None})


def _predicted(
    job: Job, profile: Profile, run: Simulation, alone: Simulation, memory: StageMemory, layers_bytes: int
) -> Predicted:
    return Predicted(
        passes_s=run.busy_s(0) + run.exposed_copy_s(0),
        device_s=alone.busy_s(0) + alone.exposed_copy_s(0),
        update_s=update_s(job, profile),
        states_bytes=memory.always + memory.buffers,
        moments={str(moment): size for moment, size in memory.totals.items()},
        layers_bytes=layers_bytes,
        recompute_s=run.total(0, "exposed_s") + run.total(0, "hidden_s"),
    )
